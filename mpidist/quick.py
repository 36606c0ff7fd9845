"""The quick way: a call that was made before with the very same arrays needs no checks again."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Hashable
from typing import Any

import numpy as np

from .arrays import address
from .backends.board import HISTORY, PRINTS, STORES_KEEP_ORDER, fence
from .binding import Program
from .prepare import Prepared
from .schedule.registry import generation
from .service import Service
from .symmetric import SINGLE_COPY, STAGED, SYMMETRIC
from .symmetric.kernels import Kernel
from .waiting import SPINS
from .work import UNSET

_LIMIT = 64


class QuickCall:
    """One call, bound to its arrays.

    It refers to the arrays weakly, which also keeps numpy from resizing them: so an address that
    was right once stays right as long as the array lives.
    """

    __slots__ = (
        "x",
        "out",
        "_service",
        "_generation",
        "_what",
        "_print",
        "_native",
        "_program",
        "_kernels",
        "_how",
        "_dtype",
        "_out_dtype",
        "_fills",
        "_words",
        "_at",
        "_others",
        "_spin",
        "_patience",
    )

    def __init__(
        self,
        service: Service,
        what: str,
        how: str,
        native: Callable[[], Any] | None,
        program: Program | None,
        kernels: tuple[Kernel, ...] = (),
    ):
        self._service, self._how, self._native, self._program = service, how, native, program
        self._kernels = kernels  # one, or one for each staging slot
        self._generation = generation()
        self._what = what
        self._print = service.reports.fingerprint(self._what)
        board = service.backend.board
        self._words, self._at = board.words, board.base(service.backend.rank)
        self._spin, self._patience = board.spin, getattr(service.backend, "patience", SPINS)
        everyone = len(board.ranks) == service.backend.size
        mine = service.backend.rank
        self._others = tuple(board.base(r) for r in board.ranks if r != mine) if everyone else None

    def holds(self, x: Any, out: Any) -> bool:
        """Tell whether this is still the call for these arrays; dtype and flags can be changed."""
        program, held = self._program, self.out
        return (
            self.x() is x
            and x.dtype is self._dtype
            and (
                held is None
                or (held() is out and out.dtype is self._out_dtype and out.flags.writeable)
            )
            and (not self._fills or x.flags.writeable)
            and self._generation == generation()
            and (program is None or not program.busy)
        )

    def watch(
        self, x: Any, out: np.ndarray | None, fills: bool, forget: Callable[[Any], Any]
    ) -> None:
        """Remember the arrays; `forget` is called when one dies.  `fills`: `x` is written to."""
        self.x: Any = weakref.ref(x, forget)
        self.out: Any = None if out is None else weakref.ref(out, forget)
        self._dtype = x.dtype
        self._out_dtype = None if out is None else out.dtype
        self._fills = fills

    def run(self) -> None:
        """Serve the call again."""
        service, words, at = self._service, self._words, self._at
        if service.broken is not None:
            service.check_usable()
        service.sequence = sequence = service.sequence + 1
        slot = PRINTS + sequence % HISTORY
        kernels = self._kernels
        try:
            if kernels:
                kernel = kernels[sequence % len(kernels)]
                service.take_slot(kernel, sequence, self._what, self._how)
                for action in kernel.before:
                    action()
                if not STORES_KEEP_ORDER:
                    fence()
                words[at + slot] = self._print
                words[at] = sequence
                self._arrive(sequence, slot)
                service.run(kernel, self._what, sequence, self._how)
                return
            words[at + slot] = self._print
            words[at] = sequence
            if self._program is not None:
                service.reports.check_first(sequence, self._what)
                service.run(self._program, self._what, sequence, self._how)
                service.reports.check_same(sequence, self._what)
                return
            if service.timeout is not None:
                self._arrive(sequence, slot)
            service.inside = sequence
            self._native()  # type: ignore[misc]
            service.inside = 0
        except BaseException as error:
            held = (self._program, self.x(), self.out and self.out())
            raise service.broke(error, self._what, sequence, *held) from error.__cause__

    def _arrive(self, sequence: int, slot: int) -> None:
        """Wait until every rank has come; usually all are here already, or soon: look first."""
        words, others = self._words, self._others
        if others is not None and self._spin(sequence, self._patience):
            for other in others:
                if words[other] != sequence or words[other + slot] != self._print:
                    break
            else:
                return
        service = self._service
        service.arrive(sequence, self._what, service.deadline(UNSET), always=True)


class QuickCalls:
    """The quick calls of one communicator, by arrays and arguments."""

    def __init__(self, service: Service):
        self._service = service
        self._calls: dict[Hashable, QuickCall] = {}

    def find(self, key: Hashable, x: Any, out: Any) -> QuickCall | None:
        """Give the call for these arguments, if it was made before with these very arrays."""
        try:
            quick = self._calls.get(key)
        except TypeError:  # an argument that cannot be hashed; the checks will say what is wrong
            return None
        return quick if quick is not None and quick.holds(x, out) else None

    def remember(self, key: Hashable, prepared: Prepared, algorithm: str, x: Any, out: Any) -> None:
        """Bind a call that has just been served, if its arrays can be used as they are."""
        service, call = self._service, prepared.call
        place = service.shared.place(call)
        way = service.chooser.way(call, algorithm, place)
        packed = prepared.staging is not None or not getattr(x, "flags", {"C": False})["C"]
        if packed or type(x) is not np.ndarray or (out is not None and type(out) is not np.ndarray):
            return
        for mine, given in ((call.x, x), (call.out, x if out is None else out)):
            if mine is not None and mine.size and address(mine) != address(given):
                return  # prepared from a copy, which would stay as it is now
        native, program = None, None
        kernels: tuple[Kernel, ...] = ()
        if way.name in (SYMMETRIC, STAGED, SINGLE_COPY):
            turns = 2 if way.name == STAGED else 1
            make = service.shared.kernel
            kernels = tuple(make(call, way.name, place, turn) for turn in range(turns))
        elif way.choice is None:
            if call.op is not None and call.op.name == "mean":
                return
            native = service.backend.native.bind(call)
        else:
            program = service.cache.program(call, way.choice, service.arity(way), False)
            if program.busy:
                return
        what = service.chooser.describe(call, way, place)
        quick = QuickCall(service, what, way.name, native, program, kernels)
        calls = self._calls
        if len(calls) >= _LIMIT:
            calls.clear()

        def forget(_: Any) -> None:
            calls.pop(key, None)

        try:
            quick.watch(x, out, out is None and call.x is None, forget)
            hash(key)
        except TypeError:
            return
        calls[key] = quick

    def clear(self) -> None:
        """Forget every call."""
        self._calls.clear()
