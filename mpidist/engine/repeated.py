"""Repeated calls: a call made again with the same arrays is replayed without checks."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Hashable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np

from ..backends.program import Program
from ..calls.arrays import address
from ..calls.call import Call, Prepared
from ..operations import Op, scratch_bytes
from ..schedule.registry import GENERATION, NATIVE, STAGED
from ..selection.choose import Way
from ..shared_memory import Place, slots
from ..shared_memory.compile import arrival, body
from ..shared_memory.in_place import Kernel
from .binding import held_bytes
from .bound_calls import BoundCalls
from .service import Service

Run = Callable[[], None]
Held = Callable[[], tuple[object, ...]]


def native_run(service: Service, what: str, call: Callable[[], Any], held: Held) -> Run:
    """Make a call of the library's own collective, once all have come.

    Parameters
    ----------
    service : Service
        Of the communicator.
    what : str
        The operation, as the ranks compare and report it.
    call : callable
        The library's call, bound to its arrays.
    held : callable
        Gives what must be kept if the call does not end.
    """
    arrive = arrival(service, what)

    def run() -> None:
        if service.broken is not None:
            service.check_usable()
        service.sequence = sequence = service.sequence + 1
        try:
            arrive(sequence)
            service.inside = sequence
            call()
            service.inside = 0
        except BaseException as error:
            raise service.broke(error, what, sequence, *held()) from error.__cause__

    return run


def program_run(service: Service, what: str, how: str, program: Program, held: Held) -> Run:
    """Make a run of an algorithm over messages."""
    announce, reports = service.backend.board.announce, service.reports
    fingerprint = reports.fingerprint(what, meets=False)

    def run() -> None:
        if service.broken is not None:
            service.check_usable()
        service.sequence = sequence = service.sequence + 1
        try:
            announce(sequence, fingerprint)
            reports.check_first(sequence, what, fingerprint)
            service.run(program, what, sequence, how)
            reports.check_same(sequence, what, fingerprint)
        except BaseException as error:
            raise service.broke(error, what, sequence, *held()) from error.__cause__

    return run


def kernel_run(service: Service, what: str, how: str, kernels: Sequence[Kernel], held: Held) -> Run:
    """Make a run of a kernel; of several, one for each staging slot, in turn."""
    bodies = [(kernel, body(service, what, how, kernel)) for kernel in kernels]
    turns = len(kernels)

    def run() -> None:
        if service.broken is not None:
            service.check_usable()
        service.sequence = sequence = service.sequence + 1
        try:
            kernel, serve = bodies[sequence % turns]
            if kernel.slot is not None:
                service.take_slot(kernel, sequence, what, how)
            serve(sequence)
            service.met = sequence
        except BaseException as error:
            raise service.broke(error, what, sequence, *held()) from error.__cause__

    return run


_MOST_BYTES = 1 << 20  # at 2 MiB binding and copying take as long as each other
_KEPT_BYTES = 16 << 20


@dataclass
class _Kind:
    """Arrays and kernels shared by all short calls of one collective, dtype and size."""

    x: np.ndarray | None
    out: np.ndarray | None
    op: Op | None  # by its identity it is found
    run: Callable[[], None]
    nbytes: int
    used: int = 0


class ShortCalls:
    """The kinds of short calls of one communicator."""

    def __init__(self, service: Service):
        self._service = service
        self._kinds: BoundCalls[_Kind] = BoundCalls(_KEPT_BYTES)

    def serve(self, prepared: Prepared, algorithm: str) -> bool:
        """Serve a call, if it is short and goes through the slots; tell whether it was."""
        call, service = prepared.call, self._service
        heap = service.shared.heap
        if call.nbytes > _MOST_BYTES or heap is None or not heap.has_staging:
            return False
        if call.collective == "barrier" or not (call.op is None or call.op.builtin):
            return False
        way = service.chooser.way(call, algorithm, service.shared.place(call))
        if way.name != STAGED:
            return False
        service.check_usable()
        kind = self._kind(call)
        if kind is None:
            return False
        if kind.x is not None:
            kind.x[...] = call.x
        kind.run()
        in_place = call.in_place and call.collective == "broadcast"  # the root's may be read-only
        if call.out is not None and not (in_place and call.rank == call.root):
            call.out[...] = kind.out
        return True

    def clear(self) -> None:
        """Forget every kind."""
        self._kinds.clear()

    def _kind(self, call: Call) -> _Kind | None:
        """Return what calls of this kind share, or None the first time."""
        sizes = tuple(None if data is None else data.size for data in (call.x, call.out))
        key = (call.collective, call.dtype, call.root, id(call.op), call.counts, *sizes)
        kinds, now = self._kinds, self._service.sequence
        kind = kinds.entries.get(key)
        if kind is None:
            since = kinds.last_use(key, now)
            own = sum(data.nbytes for data in (call.x, call.out) if data is not None)
            if since is None or not kinds.make_room(since, own):
                return None
            kind = self._made(call)
            kinds.keep(key, kind)
        kind.used = now
        return kind

    def _made(self, call: Call) -> _Kind:
        """Bind a call like this one to arrays of ours; a broadcast to one, else to two."""
        service = self._service
        out = None if call.out is None else np.empty(call.out.size, call.dtype)
        x = None if call.x is None else np.empty(call.x.size, call.dtype)
        if call.collective == "broadcast":
            x = out if call.rank == call.root else None
        ours = replace(call, x=x, out=out, in_place=call.collective == "broadcast")
        heap = service.shared.heap
        assert heap is not None
        kernels = [slots.kernel(ours, heap, slot) for slot in range(2)]
        what = service.chooser.describe(ours, service.chooser.way(ours, STAGED), None)
        nbytes = sum(data.nbytes for data in (x, out) if data is not None)
        nbytes += sum(held_bytes(kernel) for kernel in kernels)
        run = kernel_run(service, what, STAGED, kernels, tuple)
        return _Kind(x, out, call.op, run, nbytes)


LIMIT = 128 << 20  # bytes held by the calls of one communicator, scratch memory included
_CALL_BYTES = 6 << 10  # of a call itself


class QuickCall:
    """One call, bound to its arrays.

    It refers to the arrays weakly, which also keeps numpy from resizing them: so an address that
    was right once stays right as long as the array lives.

    Parameters
    ----------
    program : Program or None
        Of an algorithm over messages: it can be under way already.
    x, out : ndarray
        The arrays; `forget` is called when one dies.
    make_run : callable
        Makes `run`, given what tells what must live on if it does not end; gives its bytes as well.

    Attributes
    ----------
    run : callable
        Serves the call again.
    nbytes : int
        Bytes that it holds.
    used : int
        Number of the operation before its last use.
    """

    __slots__ = (
        *("x", "out", "run", "nbytes", "used", "generation", "program"),
        *("dtype", "flags", "out_dtype", "out_flags"),
    )

    def __init__(
        self,
        program: Program | None,
        x: Any,
        out: np.ndarray | None,
        forget: Callable[[Any], Any],
        make_run: Callable[[Held], tuple[Run, int]],
    ):
        self.program, self.generation = program, GENERATION[0]
        self.x: Any = weakref.ref(x, forget)
        self.out: Any = None if out is None else weakref.ref(out, forget)
        # A strided or read-only array has other flags; of no array twice, of a barrier not at all.
        self.dtype, self.flags = x.dtype, None if x is out or not x.size else x.flags.num
        self.out_dtype = None if out is None else out.dtype
        self.out_flags = None if out is None else out.flags.num
        self.run, self.nbytes = make_run(partial(_alive, program, self.x, self.out))
        self.used = 0


def _alive(program: Program | None, x: Any, out: Any) -> tuple[object, ...]:
    """Give what must live on if a call does not end: messages may still come to it."""
    return program, x(), out and out()


class QuickCalls:
    """The quick calls of one communicator, by arrays and arguments."""

    def __init__(self, service: Service):
        self._service = service
        self._kept: BoundCalls[QuickCall] = BoundCalls(LIMIT)
        self._calls = self._kept.entries

    def find(self, key: Hashable, x: Any, out: Any) -> QuickCall | None:
        """Give the call for these arguments, if it was made before with these very arrays."""
        try:
            quick = self._calls.get(key)
        except TypeError:  # an argument that cannot be hashed; the checks will say what is wrong
            return None
        # In one function, for a call of another is a tenth of the time.  Dtype and flags of an
        # array can be changed.
        if (
            quick is None
            or quick.x() is not x
            or x.dtype is not quick.dtype
            or (
                quick.out is not None
                and (
                    quick.out() is not out
                    or out.dtype is not quick.out_dtype
                    or out.flags.num != quick.out_flags
                )
            )
            or (quick.flags is not None and x.flags.num != quick.flags)
            or quick.generation != GENERATION[0]
            or (quick.program is not None and quick.program.busy)
        ):
            return None
        quick.used = self._service.sequence
        return quick

    def remember(self, key: Hashable, prepared: Prepared, algorithm: str, x: Any, out: Any) -> None:
        """Bind a call that has just been served, if its arrays can be used as they are.

        The second time: many arrays are used once, and binding takes as long as a call or two.
        """
        service, call, kept = self._service, prepared.call, self._kept
        op = call.op
        # The note does not keep a user's function alive, which may be a new one in every call.
        own = op is not None and not op.builtin and not isinstance(op.function, np.ufunc)
        try:
            watched = (x, op.function) if own and op is not None else (x,)
            since = kept.last_use(key, service.sequence, *watched)
        except TypeError:  # such a key is found by nobody, such an array cannot be watched
            return
        if since is None or not kept.make_room(since):
            return
        place = service.shared.place(call)
        way = service.chooser.way(call, algorithm, place)
        packed = prepared.staging is not None or not getattr(x, "flags", {"C": False})["C"]
        if packed or type(x) is not np.ndarray or (out is not None and type(out) is not np.ndarray):
            return
        for mine, given in ((call.x, x), (call.out, x if out is None else out)):
            if mine is not None and mine.size and address(mine) != address(given):
                return  # prepared from a copy, which would stay as it is now
        program = None
        if way.choice is not None:
            program = service.cache.program(call, way.choice, service.arity(way), False)
            if program.busy:
                return

        def forget(_: Any) -> None:
            kept.drop(key)

        def make_run(held: Held) -> tuple[Run, int]:
            return self._runner(prepared, way, place, program, held)

        with suppress(TypeError):  # not every result can be watched
            quick = QuickCall(program, x, out, forget, make_run)
            quick.used = service.sequence
            kept.keep(key, quick)

    def _runner(
        self, prepared: Prepared, way: Way, place: Place | None, program: Program | None, held: Held
    ) -> tuple[Run, int]:
        """Make what serves the call again; give it with the bytes that it holds."""
        service, call = self._service, prepared.call
        what = service.chooser.describe(call, way, place)
        if program is not None:
            run = program_run(service, what, way.name, program, held)
            return run, _CALL_BYTES + held_bytes(program)
        if way.name == NATIVE:
            assert service.backend.native is not None
            nbytes = _CALL_BYTES + scratch_bytes(call.op, call.dtype, call.count)
            return native_run(service, what, service.backend.native.bind(call), held), nbytes
        turns = 2 if way.name == STAGED else 1
        make = partial(service.shared.kernel, call, way.name, place, keep=False)
        kernels = [make(turn) for turn in range(turns)]
        nbytes = _CALL_BYTES + sum(held_bytes(kernel) for kernel in kernels)
        return kernel_run(service, what, way.name, kernels, held), nbytes

    def clear(self) -> None:
        """Forget every call."""
        self._kept.clear()
