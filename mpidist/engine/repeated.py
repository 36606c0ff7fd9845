"""Repeated calls: functions that serve a bound call again, with few checks."""

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
from ..trace import Served
from .programs import Bound, to_keep
from .reports import Reports
from .run import Engine

Run = Callable[[], None]
Held = Callable[[], tuple[object, ...]]
"""Returns the memory to keep if an operation does not end: messages may still be stored there."""


class RepeatedService(Protocol):
    """The members of a communicator's service that repeated calls use."""

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
        """Return the deadline (``time.monotonic``) of a wait that begins now; None for never."""

    def guard(self) -> None:
        """Register this communicator with the watchdog, before a library's call."""

    def arrive(self, sequence: int, operation: str, deadline: float | None) -> None:
        """Wait until all ranks have reached operation number `sequence`."""

    def take_slot(self, slot: int, sequence: int, operation: str, how: str) -> None:
        """Wait until a staging slot may be overwritten, and record its use by an operation."""

    def execute(self, program: Program, operation: str, sequence: int, how: str) -> None:
        """Run the items of a program, blocking, after its operation has been announced."""

    def broke(
        self, error: BaseException, operation: str, sequence: int, *memory: object
    ) -> BaseException:
        """Mark the communicator broken by an unfinished operation; return the error to raise."""

    def timed_out(self, operation: str, sequence: int | None, how: str) -> Exception:
        """Return the error to raise for an operation that has passed its deadline."""


def repeated(
    service: RepeatedService,
    call: Call,
    executor: Executor,
    way: Way,
    operation: str,
    owners: Sequence[Any] | None = None,
) -> Bound:
    """Return a bound call whose ``run()`` serves the call again with few checks.

    Parameters
    ----------
    service : RepeatedService
        The service of the communicator.
    call : Call
        The call.
    executor, way : Executor, Way
        The executor and the implementation (algorithm) of the call.
    operation : str
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
        run = _run_messages(service, operation, way.name, first, held)
    elif first.interruptible:
        run = _run_kernels(service, operation, way.name, programs, held)
    else:
        run = _run_library(service, operation, first, held)
    return Bound(programs, run, own, served_by(call, executor, way))


def served_by(call: Call, executor: Executor, way: Way) -> Served:
    """Return the Served record of a call (executor, algorithm, size), for traces."""
    algorithm = None if way.choice is None else way.name
    op = None if call.op is None else call.op.name
    return Served(executor.name, algorithm, call.nbytes, call.dtype, op)


def with_own_arrays(call: Call) -> Call:
    """Return a copy of a call with new arrays: one for a broadcast, two for other collectives."""
    out = None if call.out is None else np.empty(call.out.size, call.dtype)
    x = None if call.x is None else np.empty(call.x.size, call.dtype)
    if call.collective == "broadcast":
        x = out if call.rank == call.root else None
    return replace(call, x=x, out=out, in_place=call.collective == "broadcast")


def _run_library(service: RepeatedService, operation: str, program: Program, held: Held) -> Run:
    """Return the function that runs a library's call, once all ranks have arrived."""
    arrive = arrival_runner(service, operation)
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
            raise service.broke(error, operation, sequence, *held()) from error.__cause__

    return run


def _run_messages(
    service: RepeatedService, operation: str, how: str, program: Program, held: Held
) -> Run:
    """Return the function that runs the program of an algorithm over messages."""
    announce, reports = service.backend.board.announce, service.reports
    fingerprint = reports.fingerprint(operation, meets=False)

    def run() -> None:
        if service.broken is not None:
            service.check_usable()
        service.sequence = sequence = service.sequence + 1
        try:
            announce(sequence, fingerprint)
            reports.check_first(sequence, operation, fingerprint)
            service.execute(program, operation, sequence, how)
            reports.check_same(sequence, operation, fingerprint)
        except BaseException as error:
            raise service.broke(error, operation, sequence, *held()) from error.__cause__

    return run


def _run_kernels(
    service: RepeatedService, operation: str, how: str, programs: Sequence[Program], held: Held
) -> Run:
    """Return the function that runs a kernel in shared memory; `programs` take turns.

    There is a program for each staging slot, or a single one without slots.
    """
    bodies = [(p.slot, kernel_runner(service, operation, how, p)) for p in programs]
    turns = len(programs)

    def run() -> None:
        if service.broken is not None:
            service.check_usable()
        service.sequence = sequence = service.sequence + 1
        try:
            slot, serve = bodies[sequence % turns]
            if slot is not None:
                service.take_slot(slot, sequence, operation, how)
            serve(sequence)
            service.met = sequence
        except BaseException as error:
            raise service.broke(error, operation, sequence, *held()) from error.__cause__

    return run
