"""Background operations: starting them, and completing those without a waiting caller."""

from __future__ import annotations

import logging
from collections.abc import Callable
from functools import partial
from typing import Any, Protocol

from ..backends.base import Backend
from ..backends.executor import Executor
from ..backends.program import Program
from ..calls.call import Call
from ..calls.prepare import Prepared
from ..errors import CollectiveTimeout
from ..schedule.unrolled import tags_of
from ..selection.choose import Candidate
from .door import Door
from .programs import Bound, Programs, key_of, owners_of, to_keep
from .reports import Reports
from .run import Engine, Run
from .work import UNSET, Work

log = logging.getLogger("mpidist")


class BackgroundService(Protocol):
    """The members of a communicator's service that background operations use."""

    backend: Backend
    programs: Programs
    engine: Engine
    reports: Reports
    sequence: int
    door: Door

    def announce(self, fingerprint: int) -> int:
        """Announce this rank's arrival at its next operation; return the operation's number."""

    def choose(self, call: Call, algorithm: str, background: bool) -> tuple[Executor, Candidate]:
        """Return the executor of a call, and the chosen candidate."""

    def describe(self, call: Call, executor: Executor, chosen: Candidate, background: bool) -> str:
        """Return the text that ranks compare for a call."""

    def broke(self, error: BaseException, operation: str, sequence: int) -> BaseException:
        """Mark the communicator broken by an unfinished operation; return the error to raise.

        That is `error`, or the backend's translation of it.  A harmless error, after which nothing
        of the operation is pending, leaves the communicator usable.
        """

    def check_usable(self) -> None:
        """Raise `CommunicatorBroken`, with the reason, if the communicator is broken or freed."""

    def deadline(self, timeout: Any) -> float | None:
        """Return the deadline (``time.monotonic``) of a wait that begins now; None for never."""

    def timed_out(
        self, operation: str, sequence: int | None, how: str, timeout: Any = UNSET
    ) -> CollectiveTimeout:
        """Return the error to raise for an operation that has passed its deadline.

        `sequence` is its number (None for one without, such as a message); `how` names its executor
        or algorithm, or what it waits for.
        """


class Background:
    """The background operations of one communicator.

    Attributes
    ----------
    works : set of Work
        The operations that have begun and not ended.
    """

    def __init__(self, service: BackgroundService):
        self._service = service
        self.works: set[Work] = set()
        self._begun = 0
        self._slots = tags_of(service.backend.tag_limit)[1]
        self._in_slot: dict[int, tuple[Run, int]] = {}  # with the number of its operation

    def begin(self, prepared: Prepared, algorithm: str) -> Work:
        """Begin a call in the background; return its Work."""
        service, call = self._service, prepared.call
        service.check_usable()
        executor, chosen = service.choose(call, algorithm, True)
        operation = service.describe(call, executor, chosen, True)
        sequence = service.sequence + 1
        try:
            program = self._program(call, algorithm, executor, chosen)
            if program.begin is not None:  # its own calls are announced
                return program.begin(prepared.give)
            if program.interruptible:
                self._take_tags(program, operation, chosen.name)
            for action in program.before:
                action()
            fingerprint = service.reports.fingerprint(operation, meets=False)
            service.announce(fingerprint)
            service.reports.check_first(sequence, operation, fingerprint)
            self.sweep()
            if program.queue is not None:
                check = partial(service.reports.check_same, sequence, operation, fingerprint)
                done, end = program.queue(check)
                return self._queued(done, end, check, prepared.give, operation, sequence)
            if program.named is not None:
                program.named.name(sequence, operation, fingerprint)
            run = service.engine.start(program)
            if program.interruptible:
                self._in_slot[program.tags[0]] = (run, sequence)
        except BaseException as error:
            raise service.broke(error, operation, sequence) from error.__cause__
        return self._work(run.test, prepared.give, operation, sequence, chosen.name)

    def _program(
        self, call: Call, algorithm: str, executor: Executor, chosen: Candidate
    ) -> Program:
        """Return the program of a call: a cached one if it is not in use, else a new one."""
        if call.on_device:
            return executor.bind(call, chosen.choice, background=True)
        programs = self._service.programs
        key = ("background", *key_of(call, algorithm))
        bound = programs.get(key)
        if bound is not None:
            return bound.program
        owners = owners_of(call)
        try:
            since = programs.last_use(key, *owners)
        except TypeError:  # no weak reference to an owner: its end would go unnoticed
            since = None
        if since is None or key in programs.entries or not programs.make_room(since):
            return executor.bind(call, chosen.choice, background=True)
        program = executor.bind(to_keep(call), chosen.choice, background=True)
        programs.keep(key, Bound([program]), owners)
        return program

    def _work(
        self,
        poll: Callable[[], bool],
        give: Callable[[], Any],
        operation: str,
        sequence: int,
        how: str,
    ) -> Work:
        """Return the user's Work of a started program, polled by `poll`, with result ``give()``.

        An error in the program breaks the communicator.  `how` names its executor or algorithm.
        """
        service = self._service

        def test() -> bool:
            service.check_usable()
            try:
                return poll()
            except BaseException as error:
                raise service.broke(error, operation, sequence) from error.__cause__

        def wait(test: Callable[[], bool], timeout: Any) -> None:
            service.check_usable()
            deadline = service.deadline(timeout)
            try:
                if not service.engine.wait(test, deadline):
                    raise service.timed_out(operation, sequence, how, timeout)
            except BaseException as error:
                raise service.broke(error, operation, sequence) from error.__cause__

        return Work(test, wait, give, self.works, door=service.door)

    def _queued(
        self,
        done: Callable[[], bool],
        end: Callable[[], Any],
        check: Callable[[], Any],
        give: Callable[[], Any],
        operation: str,
        sequence: int,
    ) -> Work:
        """Return the user's Work of a run on a stream; the first three are of ``Program.queue``.

        Its ``wait()`` lets streams wait and not the host, so it never times out; but it raises, as
        every poll does, once another rank has announced a different call.
        """
        service = self._service

        def compare() -> None:
            service.check_usable()
            try:
                check()
            except BaseException as error:
                raise service.broke(error, operation, sequence) from error.__cause__

        def test() -> bool:
            compare()
            return done()

        def ended() -> Any:
            end()
            return give()

        return Work(test, lambda look, timeout: compare(), ended, door=service.door)

    def _take_tags(self, program: Program, operation: str, how: str) -> None:
        """Assign a slot (a numbered range of message tags) to a program; the same on all ranks.

        If a pending program uses the slot, this method waits until it has ended.  It is called
        before the program's first action, because kernels in shared memory synchronise the ranks
        by words in shared memory that belong to the slot too.
        `operation` and `how` (its executor or algorithm) are for the error of a passed deadline.
        """
        service = self._service
        self._begun += 1
        slot = 1 + self._begun % self._slots
        before, number = self._in_slot.get(slot, (None, 0))
        if before is not None and not service.engine.wait(before.test, service.deadline(UNSET)):
            raise service.timed_out(operation, number, how)
        self._in_slot = {s: r for s, r in self._in_slot.items() if not r[0].done}
        program.tags[0] = slot

    def sweep(self) -> None:
        """Poll the begun operations, and drop the references to those that have ended."""
        for work in list(self.works):
            try:
                work.poll()
            except Exception:  # raised again in wait() of that operation
                log.debug("an operation in the background failed", exc_info=True)

    def finish(self) -> None:
        """Wait for all pending operations."""
        for work in list(self.works):
            work.complete()
