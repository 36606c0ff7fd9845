"""The cache of bound calls: a repeated call with the same arrays runs without binding."""

from __future__ import annotations

import weakref
from collections import OrderedDict
from collections.abc import Callable, Hashable, Sequence
from dataclasses import replace
from itertools import repeat
from typing import Any

import numpy as np

from ..backends.program import Program
from ..calls.arrays import address
from ..calls.call import Call
from ..schedule.registry import GENERATION
from ..trace import Served
from .binding import held_bytes
from .sequencer import Sequencer

LIMIT = 128 << 20  # bytes held by the bound calls of one communicator, scratch memory included
MOST_USES = 1 << 14  # calls that are remembered without being kept, about 300 bytes each
_MOST_ALIKE = 64 << 10  # bytes of calls that are found by the likeness of their arrays
_SEEN = 1 << 12  # arrays of such calls that are remembered, about 200 bytes each
CALL_BYTES = 6 << 10  # of a bound call itself
_LOOKS = 8  # bound calls that are looked at to make room for one

CallKey = tuple[Hashable, ...]


def key_of(call: Call, algorithm: str) -> CallKey:
    """Return the key of a call in the cache: all that its program depends on, with addresses."""
    x, out, op = call.x, call.out, call.op
    at = _at(x)
    return (
        call.collective,
        algorithm,
        None if op is None else op.identity,
        call.dtype,
        call.root,
        call.counts,
        call.out_counts,
        call.even,
        call.agreed,
        at,
        at if out is x else _at(out),
    )


def _at(data: np.ndarray | None) -> tuple[int, int] | None:
    """Return the address and number of elements of an array, for a key; None for None."""
    if data is None:
        return None
    size = data.size
    return (address(data), size) if size else (0, 0)  # an empty array may be anywhere


def _likeness(key: CallKey, x: np.ndarray, out: np.ndarray | None) -> CallKey:
    """Return what a program with own arrays depends on; `key` has the ids of the arrays second."""
    # The flags say whether an array owns its memory, may be written, and is contiguous.
    like = key[0], key[3:], x.dtype, x.shape, x.flags.num
    if out is None or out is x:
        return *like, out is x
    return *like, out.dtype, out.shape, out.flags.num


def owners_of(call: Call) -> list[Any]:
    """Return the objects that a bound call depends on: when one dies, the bound call is dropped.

    These are the owners of its arrays' memory, and a user's function, which the cache must not keep
    alive: the user may make a new one for every call.  If the owner of an array's memory takes no
    weak reference, it is replaced by the last base of the array that does.
    """
    found: list[Any] = []
    for data in (call.x, call.out):
        if data is None or not data.size:
            continue
        holder = data
        while isinstance(holder, np.ndarray) and holder.base is not None:
            last, holder = holder, holder.base
            if not getattr(type(holder), "__weakrefoffset__", 0):
                holder = last
                break
        if not found or holder is not found[0]:
            found.append(holder)
    function = _function_of(call)
    if function is not None:
        found.append(function)
    return found


def _function_of(call: Call) -> Callable[[Any, Any], Any] | None:
    """Return the user's function by which a call combines; None for a built-in operation."""
    op = call.op
    return None if op is None or op.builtin or isinstance(op.function, np.ufunc) else op.function


def to_keep(call: Call) -> Call:
    """Return a copy of a call for the cache, which does not keep a user's function alive.

    Whoever makes the call has the function; when the function dies, the program is dropped.
    """
    function, op = _function_of(call), call.op
    if function is None or op is None:
        return call
    held: Callable[[], Any] = weakref.ref(function)
    return replace(call, op=replace(op, function=lambda left, right: held()(left, right)))


class _Weak(weakref.ref):
    """A part of a key that is equal to an object without keeping it alive."""

    __slots__ = ()

    def __eq__(self, other: object) -> bool:
        return self is other or self() is other

    __hash__ = weakref.ref.__hash__


class Bound:
    """A call bound to memory, ready to be served again by `programs`, which take turns.

    ``run()`` serves it for a caller outside the communicator's door, ``within()`` for one inside;
    in the background ``run(result)`` begins it and returns its Work, and there is no `within`.
    `own` are its own input and result, if calls of a kind share it: each call's input is copied in,
    and its result copied out.
    """

    __slots__ = (
        *("program", "run", "within", "nbytes", "used", "generation", "shared", "x", "out"),
        *("watched", "repeated", "alike", "served"),
    )

    def __init__(
        self,
        programs: Sequence[Program],
        run: Callable[..., Any] | None = None,
        within: Callable[[], None] | None = None,
        own: Sequence[np.ndarray | None] = (),
        served: Served | None = None,
    ):
        self.program, self.shared = programs[0], bool(own)
        self.run, self.within = run, within
        nbytes = {id(data): data.nbytes for data in own if data is not None}
        self.nbytes = CALL_BYTES + sum(nbytes.values()) + sum(map(held_bytes, programs))
        # used: the number of operations begun before Programs.get last found it.
        self.used, self.generation, self.served = 0, GENERATION[0], served
        self.x, self.out = own or (None, None)
        self.watched: list[weakref.ref] = []
        self.repeated: dict[Hashable, Repeated] = {}
        self.alike: dict[Hashable, Alike] = {}

    def serve(self, call: Call) -> None:
        """Serve a call; own arrays, if any, get a copy of the input and give the result."""
        assert self.within is not None
        if self.x is not None:
            self.x[...] = call.x
        self.within()
        if self.out is not None and call.out is not None and not call.gives_input:
            call.out[...] = self.out


class Repeated:
    """A bound call, found by the identity of the objects that the user passed.

    It refers to the arrays weakly, which also keeps numpy from resizing them: an address that was
    right once stays right as long as the array lives.  `used` is the number of operations begun
    before its last use.
    """

    __slots__ = (
        *("x", "out", "run", "program", "used", "generation", "served"),
        *("dtype", "flags", "out_dtype", "out_flags"),
    )

    def __init__(self, bound: Bound, x: Any, out: Any, forget: Callable[[Any], Any]):
        assert bound.run is not None
        self.run, self.used, self.generation = bound.run, bound.used, bound.generation
        self.program, self.served = bound.program, bound.served
        self.x: Any = weakref.ref(x, forget)
        self.out: Any = None if out is None else weakref.ref(out, forget)
        # A strided or read-only array has other flags; of no array twice, of a barrier not at all.
        self.dtype, self.flags = x.dtype, None if x is out or not x.size else x.flags.num
        self.out_dtype = None if out is None else out.dtype
        self.out_flags = None if out is None else out.flags.num


class Alike:
    """A bound call with arrays of its own, found by the likeness of the user's arrays.

    The input is copied to its own array, and the result from there, to a new array if the user gave
    none.  `used` is as in `Repeated`.
    """

    __slots__ = ("bound", "source", "result", "makes", "gives", "used", "generation")

    def __init__(self, bound: Any, call: Call, x: Any, out: Any, result: Any):
        self.bound, self.used, self.generation = bound, bound.used, bound.generation
        self.makes = result is not None and result is not x and result is not out
        # Which of (x, out, None) is the result: a rank without one ignores an `out`.
        self.gives = 2 if result is None else int(result is out)
        # Flat arrays; those of the user are copied in their own shape, which may be of any strides.
        self.source: Any = None if call.x is None else bound.x.reshape(x.shape)
        filled = result is not None and not call.gives_input
        self.result: Any = bound.out.reshape(result.shape) if filled else None

    def serve(self, x: Any, out: Any) -> Any:
        """Serve a call of the user's arrays, and return its result."""
        if self.source is not None:
            self.source[...] = x
        self.bound.within()
        if self.makes:
            return self.result.copy()
        given: Any = (x, out, None)[self.gives]
        if self.result is not None:
            given[...] = self.result
        return given


class Programs:
    """The bound calls of one communicator, by key, up to a number of bytes.

    A call is bound at its second use: many arrays are used once, and binding takes as long as a
    call or two.  A bound call refers to memory by address and is dropped when the memory's owner
    dies, so it neither outlives the user's array nor keeps it alive.

    Once the cache is full, a new call replaces a kept one only if that has not been used since the
    previous use of the new call: their reuse distances are compared, as in LIRS (Jiang and Zhang,
    SIGMETRICS 2002).  A loop over more arrays than fit thus keeps as many as fit.  To drop the
    least recently used call would not do: each call of the loop would drop the one that is needed
    soonest, and be dropped before its next turn.

    A hit only writes `used`.  As in CLOCK, the order is brought up to date when room is needed.

    The `clock` counts the operations, by which the age of a bound call is measured.  The last call
    kept may exceed the `limit` in bytes, as its bytes are known only once it is bound: so a call
    that needs more than all others may be kept too.
    """

    def __init__(self, clock: Sequencer, limit: int = LIMIT):
        self.limit, self.nbytes, self._clock = limit, 0, clock
        self.entries: OrderedDict[Hashable, Bound] = OrderedDict()
        self._repeated: dict[Hashable, Repeated] = {}
        self._uses: dict[int, tuple[int, tuple[weakref.ref, ...]]] = {}
        self._alike: dict[Hashable, Alike] = {}
        self._seen: dict[int, weakref.ref] = {}  # arrays of such calls, by their id

    # -- looking up -----------------------------------------------------------------------------

    def find(self, key: Hashable, x: Any, out: Any) -> Repeated | None:
        """Return the call bound earlier with the same arguments (`key` has arrays by identity)."""
        try:
            found = self._repeated.get(key)
        except TypeError:  # an argument that cannot be hashed; the checks report it
            return None
        # In one function, for a call of another is a tenth of the time.  Dtype and flags of an
        # array can be changed.  So can its shape, which is not compared: the result is the same,
        # and to compare the shapes of matrices takes 5 to 11 % of a short call.
        if (
            found is None
            or found.x() is not x
            or x.dtype is not found.dtype
            or (
                found.out is not None
                and (
                    found.out() is not out
                    or out.dtype is not found.out_dtype
                    or out.flags.num != found.out_flags
                )
            )
            or (found.flags is not None and x.flags.num != found.flags)
            or found.generation != GENERATION[0]
        ):
            return None
        found.used = self._clock.sequence
        return found

    def alike(self, key: CallKey, x: Any, out: Any) -> Alike | None:
        """Return the call bound earlier for arrays like these, with the other arguments of `key`.

        None if the result will be in arrays that were here before: they may be bound themselves.
        """
        if type(x) is not np.ndarray or (out is not None and type(out) is not np.ndarray):
            return None
        try:
            found = self._alike.get(_likeness(key, x, out))
        except TypeError:  # an argument that cannot be hashed; the checks report it
            return None
        if found is None or found.generation != GENERATION[0]:
            return None
        if not found.makes and self._seen_before(x) and (out is None or self._seen_before(out)):
            return None
        found.used = self._clock.sequence
        return found

    def _seen_before(self, data: np.ndarray) -> bool:
        """Record an array; return whether it was recorded before."""
        # An id alone is also that of a new array in the place of a dead one.
        before = self._seen.get(id(data))
        if before is not None and before() is data:
            return True
        if len(self._seen) >= _SEEN:
            self._seen.clear()
        self._seen[id(data)] = weakref.ref(data)
        return False

    def get(self, key: Hashable) -> Bound | None:
        """Return the bound call of a key; None if there is none, or it is running now."""
        bound = self.entries.get(key)
        if bound is None or bound.program.busy:
            return None
        if bound.generation != GENERATION[0]:  # another algorithm may have its name by now
            self.drop(key)
            return None
        bound.used = self._clock.sequence
        return bound

    def get_or_bind(
        self,
        key: Hashable,
        call: Call,
        bind: Callable[..., Bound],
        *arguments: Any,
        owners: Callable[[Call], Sequence[Any]] | None = owners_of,
    ) -> Bound | None:
        """Return the bound call of a key: the kept one, or a new one if to keep it pays now.

        None at its first use, if there is no room, and while it runs.  ``bind(call, *arguments)``
        binds it.  ``owners(call)`` returns the objects whose memory the bound call uses: it is
        dropped when one of them dies.  Pass ``owners=None`` if the bound call copies into arrays of
        its own, of the same lengths as the call's; it is then never dropped because a user's array
        died.
        """
        if key in self.entries:
            return self.get(key)
        owned = () if owners is None else owners(call)
        try:
            since = self.last_use(key, *owned)
        except TypeError:  # no weak reference to an owner: its end would go unnoticed
            return None
        if since is None:
            return None
        # The bound call's own arrays, not made yet, will have as many bytes as these.
        alike = (call.x, call.out) if owners is None else ()
        if not self.make_room(since, sum(data.nbytes for data in alike if data is not None)):
            return None
        bound = bind(call, *arguments)
        self.keep(key, bound, owned)
        return bound

    def repeat(self, key: CallKey, call: Call, bound: Bound, x: Any, out: Any) -> None:
        """Let :meth:`find` find a bound call by the user's arrays, if it uses them and not copies.

        A view is registered at its second use only, because users may make new views for every
        call.
        """
        if type(x) is not np.ndarray or not x.flags.c_contiguous:
            return
        if out is not None and type(out) is not np.ndarray:
            return
        for mine, given in ((call.x, x), (call.out, x if out is None else out)):
            same = mine is None or mine.base is given or not mine.size
            if not same and address(mine) != address(given):
                return  # the call's own is a copy, which would stay as it is now
        if x.base is not None and self.last_use(key, x) is None:
            return

        def forget(_: Any) -> None:
            self._repeated.pop(key, None)
            bound.repeated.pop(key, None)

        if _function_of(call) is not None:  # the key must not keep the function, or its Op, alive
            plain = (type(None), str, int, type)
            key = tuple([part if isinstance(part, plain) else _Weak(part, forget) for part in key])
        self._repeated[key] = bound.repeated[key] = Repeated(bound, x, out, forget)

    def repeat_alike(
        self, key: CallKey, call: Call, bound: Bound, x: Any, out: Any, result: Any
    ) -> None:
        """Let :meth:`alike` find a bound call with own arrays, by arrays like the user's.

        Not for long ones, whose address is looked up first: to find it takes less time than to copy
        them.  Nor for views: they may overlap, or be in symmetric memory on some ranks only, which
        must be looked at each time.
        """
        arrays = type(x) is np.ndarray and (out is None or type(out) is np.ndarray)
        given = result is None or type(result) is np.ndarray
        if call.nbytes > _MOST_ALIKE or not arrays or not given:
            return
        if not (x.flags.owndata and (out is None or out.flags.owndata)):
            return
        # A scatter without `out` exchanges the shape each time.
        if not x.dtype.isbuiltin or (call.collective == "scatter" and out is None):
            return
        like = _likeness(key, x, out)
        self._alike[like] = bound.alike[like] = Alike(bound, call, x, out, result)

    # -- keeping --------------------------------------------------------------------------------

    def last_use(self, key: Hashable, *things: Any) -> int | None:
        """Record a use of a call that is not kept; return when it was used before, or None.

        Uses are counted by the number of the last operation begun.  A previous use counts only if
        it had these very `things`: after their end, new objects may have the same ``id``.  The
        record keeps neither them nor the key alive.  Raises TypeError if the key cannot be hashed,
        or a thing takes no weak reference.
        """
        mark = hash(key)
        before = self._uses.get(mark)
        if before is None and len(self._uses) >= MOST_USES:
            self._forget_half()
        self._uses[mark] = self._clock.sequence, tuple(map(weakref.ref, things))
        if before is None or len(before[1]) != len(things):
            return None
        for ref, thing in zip(before[1], things):
            if ref() is not thing:
                return None
        return before[0]

    def _forget_half(self) -> None:
        """Forget the older half of the recorded uses, and of the others those with dead arrays."""
        recent = list(self._uses.items())[MOST_USES // 2 :]
        self._uses = {m: n for m, n in recent if all(ref() is not None for ref in n[1])}

    def make_room(self, since: int | None, nbytes: int = 0) -> bool:
        """Drop bound calls to make room; return whether a call last used at `since` may be kept.

        If `since` is None, nothing is dropped.  `nbytes` are those of the call, as far as they are
        known before it is bound.
        """
        entries, looks = self.entries, 0
        while entries and self.nbytes + nbytes > self.limit:
            key, bound = next(iter(entries.items()))
            repeated, alike = bound.repeated.values(), bound.alike.values()
            used = max([bound.used, *(r.used for r in repeated), *(a.used for a in alike)])
            # LIRS: the new call was used at `since` and now.  A kept one that was not used in
            # between has the longer reuse distance, so it goes.
            if since is not None and used < since:
                self.drop(key)
                continue
            # CLOCK's second chance: used since, thus the last to be looked at again.
            entries.move_to_end(key)
            looks += 1
            # LIRS again: where the kept ones were all used since, the new one stays out; a few
            # looks are enough to say so, and no call walks through the whole cache.
            if since is None or looks == _LOOKS:
                return False
        return True

    def keep(self, key: Hashable, bound: Bound, owners: Sequence[Any] = ()) -> None:
        """Keep a bound call until one of its owners dies; it replaces one with the same key."""

        def forget(_: weakref.ref) -> None:
            self.drop(key)

        if key in self.entries:
            self.drop(key)
        self._uses.pop(hash(key), None)
        bound.used = self._clock.sequence
        bound.watched = list(map(weakref.ref, owners, repeat(forget))) if owners else []
        self.entries[key] = bound
        self.nbytes += bound.nbytes

    def drop(self, key: Hashable) -> None:
        """Drop the bound call of this key, if there is one, and its persistent requests."""
        bound = self.entries.pop(key, None)
        if bound is not None:
            self.nbytes -= bound.nbytes
            for found in bound.repeated:
                self._repeated.pop(found, None)
            for like in bound.alike:
                self._alike.pop(like, None)

    def clear(self) -> None:
        """Drop every bound call and every recorded use."""
        self.entries.clear()
        self._repeated.clear()
        self._alike.clear()
        self._seen.clear()
        self._uses.clear()
        self.nbytes = 0
