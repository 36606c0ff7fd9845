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
from ..selection.choose import Candidate
from ..shared_memory.compile import arrival_runner, kernel_runner
from ..trace import Served
from .door import Door
from .programs import Bound, to_keep
from .reports import Reports
from .run import Engine

Run = Callable[[], None]
"""Serves a call again, as the next operation."""
Made = Callable[[Callable[[], Any], Callable[[Any], object]], Run]
"""``made(take, put)`` returns the Run that enters the communicator's door by them, and leaves."""
Held = Callable[[], tuple[object, ...]]
"""Returns the memory to keep if an operation does not end: messages may still be stored there."""


class RepeatedService(Protocol):
    """The members of a communicator's service that repeated calls use.

    Attributes
    ----------
    backend, reports, engine : Backend, Reports, Engine
        The backend, the writer of error reports, and the engine that runs programs.
    timeout : float or None
        Deadline of every wait in seconds.
    door : Door
        Admits one caller at a time.
    sequence : int
        Number of operations begun.
    met : int
        Number of the last operation that all ranks are known to have reached.
    inside : int
        Number of the operation in whose native call this rank is; 0 outside of any.
    """

    backend: Backend
    reports: Reports
    engine: Engine
    timeout: float | None
    door: Door
    sequence: int
    met: int
    inside: int

    def deadline(self) -> float | None:
        """Return the deadline (``time.monotonic``) of a wait that begins now; None for never."""

    def guard(self) -> None:
        """Register this communicator with the watchdog, before a native call."""

    def arrive(self, sequence: int, operation: str, deadline: float | None) -> None:
        """Wait until all ranks have reached operation number `sequence`."""

    def take_slot(self, slot: int, sequence: int, operation: str, how: str) -> None:
        """Wait until a staging slot may be overwritten, and record its use by an operation.

        A staging slot is shared memory through which arrays are copied.
        """

    def execute(self, program: Program, operation: str, sequence: int, how: str) -> None:
        """Run the rounds of a program, blocking, after its operation has been announced.

        `how` names its executor or algorithm, for reports.
        """

    def broke(
        self, error: BaseException, operation: str, sequence: int, *memory: object
    ) -> BaseException:
        """Mark the communicator broken by an unfinished operation; return the error to raise.

        `memory` is kept, as messages may still be stored there.
        """

    def timed_out(self, operation: str, sequence: int | None, how: str) -> Exception:
        """Return the error to raise for an operation that has passed its deadline.

        `sequence` is its number (None for one without, such as a message); `how` names its executor
        or algorithm, or what it waits for.
        """


def repeated(
    service: RepeatedService,
    call: Call,
    executor: Executor,
    chosen: Candidate,
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
    executor, chosen : Executor, Candidate
        The executor and the chosen candidate of the call.
    operation : str
        The operation, as the ranks compare and report it.
    owners : sequence of object, optional
        Owners of the call's memory, kept if an operation does not end.  By default the arrays of
        `call` belong to the bound call.
    """
    bind, choice, call = executor.bind, chosen.choice, to_keep(call)
    programs = [bind(call, choice, repeated=True)]
    for turn in range(1, executor.turns):
        programs.append(bind(call, choice, repeated=True, turn=turn))
    first, watched = programs[0], list(map(weakref.ref, owners or ()))

    own = (call.x, call.out) if owners is None else ()

    def held() -> tuple[object, ...]:
        return programs, own, *(ref() for ref in watched)

    if not first.meets:
        made = _run_messages(service, operation, chosen.name, first, held)
    elif first.interruptible:
        made = _run_kernels(service, operation, chosen.name, programs, held)
    else:
        made = _run_library(service, operation, first, held)
    run, within = made(service.door.take, service.door.put), made(_nothing, _nothing)
    return Bound(programs, run, within, own, served_by(call, executor, chosen))


def _nothing(_: object = None) -> None:
    """Enter or leave a door within which the caller is already."""


def served_by(call: Call, executor: Executor, chosen: Candidate) -> Served:
    """Return the Served record of a call (executor, algorithm, size), for traces."""
    algorithm = None if chosen.choice is None else chosen.name
    op = None if call.op is None else call.op.name
    return Served(executor.name, algorithm, call.nbytes, call.dtype, op)


def with_own_arrays(call: Call) -> Call:
    """Return a copy of a call with new, uninitialised arrays in place of those that it has.

    A broadcast gets one array, its result, which on the root is its input too.
    """
    out = None if call.out is None else np.empty(call.out.size, call.dtype)
    x = None if call.x is None else np.empty(call.x.size, call.dtype)
    if call.collective == "broadcast":
        x = out if call.rank == call.root else None
    return replace(call, x=x, out=out, in_place=call.collective == "broadcast")


# Entering the door, numbering and leaving stand in each of the three functions: one around them
# took 45 ns more, of the 900 of a sum in symmetric memory on one rank.


def _run_library(service: RepeatedService, operation: str, program: Program, held: Held) -> Made:
    """Return how to make the function that runs a native call, once all ranks have arrived.

    ``held()`` returns the memory to keep if an operation does not end.
    """
    arrive = arrival_runner(service, operation)
    (item,) = program.items
    assert isinstance(item, Round)
    actions = item.after
    service.guard()
    door = service.door

    def made(take: Callable[[], Any], put: Callable[[Any], object]) -> Run:
        def run() -> None:
            try:
                token = take()
            except IndexError:
                token = door.take_or_refuse()
            service.sequence = sequence = service.sequence + 1
            try:
                arrive(sequence)
                service.inside = sequence
                for action in actions:
                    action()
                service.inside = 0
            except BaseException as error:
                cause = service.broke(error, operation, sequence, *held())
                if door.broken is None:
                    put(token)
                raise cause from error.__cause__
            if door.broken is None:  # another thread may have closed it meanwhile
                put(token)

        return run

    return made


def _run_messages(
    service: RepeatedService, operation: str, how: str, program: Program, held: Held
) -> Made:
    """Return how to make the function that runs the program of an algorithm over messages.

    `how` names the algorithm.  ``held()`` returns the memory to keep if an operation does not end.
    """
    announce, reports = service.backend.board.announce, service.reports
    fingerprint = reports.fingerprint(operation, meets=False)
    door = service.door

    def made(take: Callable[[], Any], put: Callable[[Any], object]) -> Run:
        def run() -> None:
            try:
                token = take()
            except IndexError:
                token = door.take_or_refuse()
            service.sequence = sequence = service.sequence + 1
            try:
                announce(sequence, fingerprint)
                reports.check_first(sequence, operation, fingerprint)
                service.execute(program, operation, sequence, how)
                reports.check_same(sequence, operation, fingerprint)
            except BaseException as error:
                cause = service.broke(error, operation, sequence, *held())
                if door.broken is None:
                    put(token)
                raise cause from error.__cause__
            if door.broken is None:  # another thread may have closed it meanwhile
                put(token)

        return run

    return made


def _run_kernels(
    service: RepeatedService, operation: str, how: str, programs: Sequence[Program], held: Held
) -> Made:
    """Return how to make the function that runs a kernel in shared memory; `programs` take turns.

    There is a program for each staging slot (shared memory through which arrays are copied), or a
    single one without slots.  `how` names the executor.  ``held()`` returns the memory to keep if
    an operation does not end.
    """
    bodies = [(p.slot, kernel_runner(service, operation, how, p)) for p in programs]
    turns = len(programs)
    door = service.door

    def made(take: Callable[[], Any], put: Callable[[Any], object]) -> Run:
        def run() -> None:
            try:
                token = take()
            except IndexError:
                token = door.take_or_refuse()
            service.sequence = sequence = service.sequence + 1
            try:
                slot, serve = bodies[sequence % turns]
                if slot is not None:
                    service.take_slot(slot, sequence, operation, how)
                serve(sequence)
                service.met = sequence
            except BaseException as error:
                cause = service.broke(error, operation, sequence, *held())
                if door.broken is None:
                    put(token)
                raise cause from error.__cause__
            if door.broken is None:  # another thread may have closed it meanwhile
                put(token)

        return run

    return made
