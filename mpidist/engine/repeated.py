"""Repeated calls: functions that serve a bound call again, without checks and with few calls."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, Protocol

import numpy as np

from ..backends.base import Backend
from ..backends.executor import Executor
from ..backends.program import Program, Round
from ..calls.call import Call
from ..selection.choose import Way
from ..shared_memory.compile import arrival_runner, kernel_runner
from .programs import Bound, to_keep
from .reports import Reports
from .run import Engine

Run = Callable[[], None]
Held = Callable[[], tuple[object, ...]]
"""Returns the memory to keep if an operation does not end: messages may still be stored there."""


class Serving(Protocol):
    """The service of a communicator, as far as a repeated call needs it."""

    backend: Backend
    reports: Reports
    engine: Engine
    timeout: float | None
    broken: str | None
    sequence: int
    met: int
    inside: int

    def check_usable(self) -> None:
        """Raise `CommunicatorBroken` with the reason if an operation was left unfinished."""

    def deadline(self) -> float | None:
        """Return the moment by which a wait that begins now must end; None for never."""

    def guard(self) -> None:
        """Have the watchdog look at this communicator."""

    def arrive(self, sequence: int, what: str, deadline: float | None) -> None:
        """Wait until all ranks have reached operation number `sequence`."""

    def take_slot(self, slot: int, sequence: int, what: str, how: str) -> None:
        """Wait until a staging slot may be written again, and take it."""

    def execute(self, program: Program, what: str, sequence: int, how: str) -> None:
        """Run the items of a program that has been announced, blocking."""

    def broke(
        self, error: BaseException, what: str, sequence: int, *memory: object
    ) -> BaseException:
        """Note that an operation that began did not end; return the error to be raised."""

    def timed_out(self, what: str, sequence: int | None, how: str) -> Exception:
        """Return the report of a deadline that passed."""


def repeated(
    service: Serving,
    call: Call,
    executor: Executor,
    way: Way,
    what: str,
    owners: Sequence[Any] | None = None,
) -> Bound:
    """Bind a call for repetition.

    Parameters
    ----------
    service : Serving
        The service of the communicator.
    call : Call
        The call.
    executor, way : Executor, Way
        The executor and the way of the call.
    what : str
        The operation, as the ranks compare and report it.
    owners : sequence of object, optional
        Objects kept alive while it runs; by default the bound call has arrays of its own.
    """
    bind, choice, call = executor.bind, way.choice, to_keep(call)
    programs = [bind(call, choice, repeated=True)]
    for turn in range(1, executor.turns):
        programs.append(bind(call, choice, repeated=True, turn=turn))
    first, watched = programs[0], list(map(weakref.ref, owners or ()))

    own = (call.x, call.out) if owners is None else ()

    def held() -> tuple[object, ...]:
        return programs, own, *(ref() for ref in watched)

    if not first.meets:
        run = _run_messages(service, what, way.name, first, held)
    elif first.interruptible:
        run = _run_kernels(service, what, way.name, programs, held)
    else:
        run = _run_library(service, what, first, held)
    return Bound(programs, run, own)


def with_own_arrays(call: Call) -> Call:
    """Return a call like this one with arrays of its own: a broadcast has one, others two."""
    out = None if call.out is None else np.empty(call.out.size, call.dtype)
    x = None if call.x is None else np.empty(call.x.size, call.dtype)
    if call.collective == "broadcast":
        x = out if call.rank == call.root else None
    return replace(call, x=x, out=out, in_place=call.collective == "broadcast")


def _run_library(service: Serving, what: str, program: Program, held: Held) -> Run:
    """Return the run of a library's call, which starts once all ranks have arrived."""
    arrive = arrival_runner(service, what)
    (item,) = program.items
    assert isinstance(item, Round)
    actions = item.after
    service.guard()

    def run() -> None:
        if service.broken is not None:
            service.check_usable()
        service.sequence = sequence = service.sequence + 1
        try:
            arrive(sequence)
            service.inside = sequence
            for action in actions:
                action()
            service.inside = 0
        except BaseException as error:
            raise service.broke(error, what, sequence, *held()) from error.__cause__

    return run


def _run_messages(service: Serving, what: str, how: str, program: Program, held: Held) -> Run:
    """Return a run of an algorithm over messages."""
    announce, reports = service.backend.board.announce, service.reports
    fingerprint = reports.fingerprint(what, meets=False)

    def run() -> None:
        if service.broken is not None:
            service.check_usable()
        service.sequence = sequence = service.sequence + 1
        try:
            announce(sequence, fingerprint)
            reports.check_first(sequence, what, fingerprint)
            service.execute(program, what, sequence, how)
            reports.check_same(sequence, what, fingerprint)
        except BaseException as error:
            raise service.broke(error, what, sequence, *held()) from error.__cause__

    return run


def _run_kernels(
    service: Serving, what: str, how: str, programs: Sequence[Program], held: Held
) -> Run:
    """Return a run of a kernel in shared memory; of several, one for each slot, in turn."""
    bodies = [(program.slot, kernel_runner(service, what, how, program)) for program in programs]
    turns = len(programs)

    def run() -> None:
        if service.broken is not None:
            service.check_usable()
        service.sequence = sequence = service.sequence + 1
        try:
            slot, serve = bodies[sequence % turns]
            if slot is not None:
                service.take_slot(slot, sequence, what, how)
            serve(sequence)
            service.met = sequence
        except BaseException as error:
            raise service.broke(error, what, sequence, *held()) from error.__cause__

    return run
