"""The quick way: a call that was made before with the very same arrays needs no checks again."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Hashable
from contextlib import suppress
from functools import partial
from typing import Any

import numpy as np

from .arrays import address
from .binding import Program, held_bytes
from .kept import Kept
from .operations import scratch_bytes
from .prepare import Prepared
from .quick_runs import Held, Run, kernel_run, native_run, program_run
from .rules import NATIVE
from .schedule.registry import GENERATION
from .selection import Way
from .service import Service
from .symmetric import STAGED, Place

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
        self._kept: Kept[QuickCall] = Kept(LIMIT)
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
