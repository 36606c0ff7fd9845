"""Serves calls: chooses the way, runs it under the deadline, says who is missing."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from functools import partial
from typing import Any

from .backends.base import Backend
from .binding import Program
from .calibration import calibrate_shortly
from .call import Call
from .choosing import Chooser
from .config import CollectiveConfig
from .engine import Engine, Run
from .errors import (
    CollectiveTimeout,
    CommunicatorBroken,
    InvalidArgument,
)
from .measure import Calibration
from .operations import finish_mean
from .pipelining import Pipelining
from .plan import SLOTS, TAG_SPACE, slot_of
from .prepare import Prepared
from .programs import ProgramCache
from .reports import Reports
from .selection import Way
from .shared import SharedMemory
from .symmetric import STAGED, SYMMETRIC, Place
from .symmetric.kernels import Kernel
from .topology import Topology
from .watchdog import WATCHDOG
from .work import UNSET, Work

log = logging.getLogger("mpidist")


class Service:
    """What a communicator has behind its methods.

    Attributes
    ----------
    sequence : int
        Number of collectives begun on this communicator.
    broken : str or None
        Why the communicator can no longer be used.
    """

    def __init__(self, backend: Backend, config: CollectiveConfig, pipelining: Pipelining):
        self.backend, self.config = backend, config
        self.timeout: float | None = config.timeout
        self.topology = Topology.from_hosts(backend.rank, list(backend.hosts), {})
        self.groups = config.groups(self.topology.groups)  # by node, as the configuration counts
        self.sequence: int = 0
        self.cache = ProgramCache(backend, self.groups, pipelining)
        self.shared = SharedMemory(backend, self.cache)
        self.reports = Reports(backend, self.shared, lambda: self.sequence)
        # Ranks that are threads of one process see at once that they wait in vain.
        alarm = self.reports.alarm if backend.native is not None else None
        self.engine = Engine(backend, alarm)

        self.chooser = Chooser(backend, config, self.groups, self.shared, lambda: self.calibrate())
        self.broken: str | None = None
        self._guarded = False
        self.inside = 0  # number of the native call that this rank is in, for the watchdog
        self.pending: set[Work] = set()  # what is under way in the background
        self._begun = 0
        self._in_slot: dict[int, tuple[Run, int]] = {}  # with the number of its operation

    def calibrate(self) -> Calibration:
        """Measure the cost model's constants now; collective.  Choices by them are made anew."""
        backend, groups = self.backend, self.topology.groups
        try:
            found = self.meet(
                "calibrate", lambda: calibrate_shortly(backend, groups, self.deadline(UNSET))
            )
        except BaseException as error:
            if self.broken is not None:
                raise
            raise self.broke(error, "calibrate", self.sequence) from error.__cause__
        if self.chooser.advice is not None:
            self.chooser.advice.learn(found)
        self.chooser.forget()
        return found

    # -- running --------------------------------------------------------------------------------

    def serve(self, prepared: Prepared, algorithm: str) -> Any:
        """Serve a call, blocking, and give the user's result."""
        call = prepared.call
        place = self.shared.place(call)
        way = self.chooser.way(call, algorithm, place)
        self.check_usable()
        if not self.shared.is_ready(way.name):
            self.chooser.forget()
            way = self.chooser.way(call, algorithm, place)
        what = self.chooser.describe(call, way, place)
        if way.name in (SYMMETRIC, STAGED):
            self.enter(self.shared.kernel(call, way.name, place, self.sequence + 1), what, way.name)
            return prepared.give()
        sequence = self._announce(what)
        try:
            if way.choice is None:
                self.arrive(sequence, what, self.deadline(UNSET))
                self._native(call)
            else:
                program = self.cache.program(call, way.choice, self.arity(way), False)
                self.run(program, what, sequence, way.name)
                self.reports.check_same(sequence, what)
        except BaseException as error:
            raise self.broke(error, what, sequence) from error.__cause__
        return prepared.give()

    def enter(self, kernel: Kernel, what: str, how: str) -> None:
        """Run a kernel as the next operation, blocking: nothing is touched until all have come."""
        self.sequence = sequence = self.sequence + 1
        try:
            self.take_slot(kernel, sequence, what, how)
            for action in kernel.before:
                action()
            self.backend.board.announce(sequence, self.reports.fingerprint(what))
            self.arrive(sequence, what, self.deadline(UNSET), always=True)
            self.run(kernel, what, sequence, how)
        except BaseException as error:
            raise self.broke(error, what, sequence) from error.__cause__

    def take_slot(self, kernel: Kernel, sequence: int, what: str, how: str) -> None:
        """Wait until the staging slot of a kernel, if it has one, may be written again."""
        if kernel.slot is None:
            return
        free, last_use = self.shared.slot_is_free, self.shared.last_use
        if not free(kernel.slot):
            slot = kernel.slot
            if not self.engine.wait(lambda: free(slot), self.deadline(UNSET)):
                raise self.timed_out(what, last_use[slot] + 1, how)
        last_use[kernel.slot] = sequence

    def run(self, program: Program, what: str, sequence: int, how: str) -> None:
        """Run a program for operation number `sequence`, blocking."""
        program.tag_base[0] = 0
        if not self.engine.run(program, self.deadline(UNSET)):
            raise self.timed_out(what, sequence, how)

    def begin(self, prepared: Prepared, algorithm: str) -> Work:
        """Begin to serve a call in the background."""
        call = prepared.call
        place = self.shared.place(call)
        way = self.chooser.way(call, algorithm, place, background=True)
        self.check_usable()
        what = self.chooser.describe(call, way, place, background=True)
        sequence, give = self.sequence + 1, prepared.give
        try:
            program = self._background_program(call, way, place, sequence, what)
            if program is not None:
                self._take_tags(program, what, way.name)
            for action in program.before if isinstance(program, Kernel) else ():
                action()
            sequence = self._announce(what)
            self.sweep()
            if program is None:
                look, give = self._begin_native(prepared)
            else:
                look = self._start(program, sequence)
        except BaseException as error:
            raise self.broke(error, what, sequence) from error.__cause__

        def test() -> bool:
            self.check_usable()
            try:
                return look()
            except BaseException as error:
                raise self.broke(error, what, sequence) from error.__cause__

        def wait(test: Callable[[], bool], timeout: Any) -> None:
            self.check_usable()
            deadline = self.deadline(timeout)
            try:
                if not self.engine.wait(test, deadline):
                    raise self.timed_out(what, sequence, way.name, timeout)
            except BaseException as error:
                raise self.broke(error, what, sequence) from error.__cause__

        return Work(test, wait, give, self.pending)

    def _background_program(
        self, call: Call, way: Way, place: Place | None, sequence: int, what: str
    ) -> Program | None:
        """Give the program of operation number `sequence`; None for native."""
        if way.name == SYMMETRIC:
            kernel = self.shared.kernel(call, SYMMETRIC, place, 0, background=True)
            assert kernel.arrival is not None
            kernel.arrival.sequence = sequence
            kernel.arrival.check = partial(self.reports.check_same, sequence, what)
            return kernel
        if way.choice is None:
            return None
        return self.cache.program(call, way.choice, self.arity(way), True)

    def _take_tags(self, program: Program, what: str, how: str) -> None:
        """Give a program tags of its own; every rank counts alike, so all take the same.

        They come before anything is done, for what a kernel notes is told apart by them.
        """
        self._begun += 1
        slot = self._begun % max(1, min(SLOTS, self.backend.tag_limit // 2 // TAG_SPACE - 1))
        before, number = self._in_slot.get(slot, (None, 0))
        if before is not None and not self.engine.wait(before.test, self.deadline(UNSET)):
            raise self.timed_out(what, number, how)
        self._in_slot = {s: r for s, r in self._in_slot.items() if not r[0].done}
        program.tag_base[0] = TAG_SPACE * (1 + slot)

    def _start(self, program: Program, sequence: int) -> Callable[[], bool]:
        """Start a program that has its tags."""
        slot = slot_of(program.tag_base) - 1
        run = self.engine.start(program)
        self._in_slot[slot] = (run, sequence)
        return run.test

    def sweep(self) -> None:
        """Let go of what was begun and dropped by the caller, and has ended."""
        for work in list(self.pending):
            try:
                work.test()
            except Exception:  # it is for who waits for that work
                log.debug("an operation in the background failed", exc_info=True)

    def finish(self) -> None:
        """Wait for what is under way in the background."""
        for work in list(self.pending):
            work.wait()

    def arity(self, way: Way) -> int:
        """Give the arity of a way's tree: the name's, else the configured one."""
        assert way.choice is not None
        return way.choice.arity or self.config.tree_arity

    def _native(self, call: Call) -> None:
        self.inside = self.sequence
        self._guard()
        self.backend.native.bind(call)()
        self.inside = 0
        if call.op is not None and call.op.name == "mean" and call.out is not None:
            finish_mean(call.out, call.size)

    def _begin_native(self, prepared: Prepared) -> tuple[Callable[[], bool], Callable[[], Any]]:
        call = prepared.call
        request = self.backend.native.start(call)

        def give() -> Any:
            if call.op is not None and call.op.name == "mean" and call.out is not None:
                finish_mean(call.out, call.size)
            return prepared.give()

        return request.Test, give

    # -- deadlines ------------------------------------------------------------------------------

    def deadline(self, timeout: Any) -> float | None:
        """Give the moment by which a wait that begins now must end; None for never."""
        seconds = self.timeout if timeout is UNSET else timeout
        if seconds is not None and not isinstance(seconds, (int, float)):
            raise InvalidArgument(
                f"rank {self.backend.rank}: timeout={seconds!r}: allowed are seconds, or None"
            )
        return None if seconds is None else time.monotonic() + seconds

    def _announce(self, what: str) -> int:
        self.sequence = sequence = self.sequence + 1
        self.backend.board.announce(sequence, self.reports.fingerprint(what))
        return sequence

    def _guard(self) -> None:
        """Have the watchdog look at this communicator: a native call is about to begin."""
        if not self._guarded:
            WATCHDOG.watch(self)
            self._guarded = True

    def arrive(
        self, sequence: int, what: str, deadline: float | None, always: bool = False
    ) -> None:
        """Wait until every rank has come: a native call cannot be interrupted later.

        Without a deadline a native call needs no such wait; `always` says that this one does.
        """
        waits = always or deadline is not None
        if waits and not self.engine.patiently(
            lambda until: self.backend.arrive(sequence, until, self.engine.background()), deadline
        ):
            raise self.timed_out(what, sequence, "waiting for all to come")
        self.reports.check_same(sequence, what, harmless=waits)

    def meet(self, what: str, act: Callable[[], Any]) -> Any:
        """Do something collective that cannot be interrupted, such as a split, once all have come.

        Backends without calls of a library underneath keep deadlines themselves.
        """
        self.check_usable()
        if self.backend.native is None:
            return act()
        sequence = self._announce(what)
        try:
            self.arrive(sequence, what, self.deadline(UNSET))
            self._guard()
            self.inside = sequence
            result = act()
            self.inside = 0
        except BaseException as error:
            raise self.broke(error, what, sequence) from error.__cause__
        return result

    def timed_out(
        self, what: str, sequence: int | None, how: str, timeout: Any = UNSET
    ) -> CollectiveTimeout:
        """Make the report of a deadline that passed."""
        seconds = self.timeout if timeout is UNSET else timeout
        return self.reports.timed_out(what, sequence, how, seconds)

    def check_usable(self) -> None:
        """Raise `CommunicatorBroken` with the reason if an operation was left unfinished."""
        if self.broken is not None:
            raise CommunicatorBroken(f"rank {self.backend.rank}: {self.broken}")

    def broke(self, error: BaseException, what: str, sequence: int) -> BaseException:
        """Note that an operation that began did not end, and give the error to be raised.

        What every rank sees before anything is under way leaves the communicator usable.
        """
        if isinstance(error, CommunicatorBroken) or getattr(error, "harmless", False):
            return error
        self.inside = 0
        self.engine.abandon()
        error = self.backend.translate(error)
        self.broken = (
            f"the communicator is broken since {what} (collective #{sequence}) ended with "
            f"{type(error).__name__}: {error}; create a new one"
        )
        return error
