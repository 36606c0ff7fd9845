"""The quick way: a call that was made before with the very same arrays needs no checks again."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Hashable
from functools import partial
from typing import Any

import numpy as np

from .arrays import address
from .binding import Program
from .operations import Op
from .prepare import Prepared
from .quick_runs import Held, Run, kernel_run, native_run, program_run
from .rules import NATIVE
from .schedule.registry import generation
from .selection import Way
from .service import Service
from .symmetric import STAGED, Place

_LIMIT = 64
_NOTED = 256  # calls that were made once


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
        Makes `run`, given what tells what must live on if it does not end.

    Attributes
    ----------
    run : callable
        Serves the call again.
    """

    __slots__ = (
        *("x", "out", "run", "_generation", "_program"),
        *("_dtype", "_flags", "_out_dtype", "_out_flags"),
    )

    def __init__(
        self,
        program: Program | None,
        x: Any,
        out: np.ndarray | None,
        forget: Callable[[Any], Any],
        make_run: Callable[[Held], Run],
    ):
        self._program, self._generation = program, generation()
        self.x: Any = weakref.ref(x, forget)
        self.out: Any = None if out is None else weakref.ref(out, forget)
        # A strided or read-only array has other flags; of no array twice, of a barrier not at all.
        self._dtype, self._flags = x.dtype, None if x is out or not x.size else x.flags.num
        self._out_dtype = None if out is None else out.dtype
        self._out_flags = None if out is None else out.flags.num
        self.run = make_run(partial(_alive, program, self.x, self.out))

    def holds(self, x: Any, out: Any) -> bool:
        """Tell whether this is still the call for these arrays; dtype and flags can be changed."""
        program, held, flags = self._program, self.out, self._flags
        return (
            self.x() is x
            and x.dtype is self._dtype
            and (
                held is None
                or (
                    held() is out
                    and out.dtype is self._out_dtype
                    and out.flags.num == self._out_flags
                )
            )
            and (flags is None or x.flags.num == flags)
            and self._generation == generation()
            and (program is None or not program.busy)
        )


def _alive(program: Program | None, x: Any, out: Any) -> tuple[object, ...]:
    """Give what must live on if a call does not end: messages may still come to it."""
    return program, x(), out and out()


class QuickCalls:
    """The quick calls of one communicator, by arrays and arguments."""

    def __init__(self, service: Service):
        self._service = service
        self._calls: dict[Hashable, QuickCall] = {}
        self._made: dict[int, tuple[weakref.ref, ...]] = {}  # of calls that were made once

    def find(self, key: Hashable, x: Any, out: Any) -> QuickCall | None:
        """Give the call for these arguments, if it was made before with these very arrays."""
        try:
            quick = self._calls.get(key)
        except TypeError:  # an argument that cannot be hashed; the checks will say what is wrong
            return None
        return quick if quick is not None and quick.holds(x, out) else None

    def remember(self, key: Hashable, prepared: Prepared, algorithm: str, x: Any, out: Any) -> None:
        """Bind a call that has just been served, if its arrays can be used as they are.

        The second time: many arrays are used once, and binding takes as long as a call or two.
        """
        service, call = self._service, prepared.call
        if not self._made_before(key, x, call.op):
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
        calls = self._calls
        if len(calls) >= _LIMIT:
            calls.pop(next(iter(calls)), None)

        def forget(_: Any) -> None:
            calls.pop(key, None)

        def make_run(held: Held) -> Run:
            return self._runner(prepared, way, place, program, held)

        try:
            hash(key)
            calls[key] = QuickCall(program, x, out, forget, make_run)
        except TypeError:  # such a key is found by nobody, such an array cannot be watched
            return

    def _made_before(self, key: Hashable, x: Any, op: Op | None) -> bool:
        """Tell whether this call was made before with this very array, and note that it was.

        Nor is a function of the user kept by the note: it may be a new one in every call.
        """
        made, things = self._made, (x,) if op is None or op.builtin else (x, op.function)
        try:
            mark = hash(key)
            before = made.get(mark, ())
            if [ref() is thing for ref, thing in zip(before, things)] == [True] * len(things):
                return True
            if len(made) >= _NOTED:
                del made[next(iter(made))]
            made[mark] = tuple(map(weakref.ref, things))
        except TypeError:  # such a key is found by nobody, such an array cannot be watched
            pass
        return False

    def _runner(
        self, prepared: Prepared, way: Way, place: Place | None, program: Program | None, held: Held
    ) -> Run:
        service, call = self._service, prepared.call
        what = service.chooser.describe(call, way, place)
        if program is not None:
            return program_run(service, what, way.name, program, held)
        if way.name == NATIVE:
            return native_run(service, what, service.backend.native.bind(call), held)
        turns = 2 if way.name == STAGED else 1
        kernels = [service.shared.kernel(call, way.name, place, turn) for turn in range(turns)]
        return kernel_run(service, what, way.name, kernels, held)

    def clear(self) -> None:
        """Forget every call."""
        self._calls.clear()
        self._made.clear()
