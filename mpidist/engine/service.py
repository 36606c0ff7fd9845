"""Serves calls: chooses the way, runs it under the deadline, says who is missing."""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial
from typing import Any

from ..backends.base import Backend
from ..backends.program import Program
from ..calls.call import Call
from ..calls.prepare import Prepared
from ..errors import (
    CollectiveTimeout,
    CommunicationError,
    CommunicatorBroken,
    InvalidArgument,
    MpidistError,
)
from ..schedule.registry import SINGLE_COPY, STAGED, SYMMETRIC
from ..selection.choose import Way
from ..selection.config import CollectiveConfig
from ..selection.estimates import Calibration
from ..selection.segmentation import Pipelining
from ..shared_memory.in_place import Kernel
from ..topology import Topology
from . import rendezvous
from .background import Background
from .calibration import calibrate_shortly
from .chooser import Chooser
from .executors import SharedMemory
from .programs import ProgramCache
from .reports import Reports
from .run import Engine
from .watchdog import WATCHDOG
from .work import UNSET, keep


class Service:
    """Serves the calls of one communicator: numbers, deadlines, and whether it is broken.

    Attributes
    ----------
    sequence : int
        Number of collectives begun on this communicator.
    broken : str or None
        Why the communicator can no longer be used.
    freed : bool
        Whether that is because it was freed.
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

        self.chooser = Chooser(
            backend, config, self.groups, self.shared, lambda what: self.calibrate(what)
        )
        self.broken: str | None = None
        self.freed = False
        self._setting_up = ("set-up", 0)  # what a set-up exchange is for, and its number
        self._guarded = False
        self.met = 0  # number of the last operation to which all ranks are known to have come
        self.inside = 0  # number of the native call that this rank is in, for the watchdog
        self.background = Background(self)

    def calibrate(self, what: str = "calibrate") -> Calibration:
        """Measure the cost model's constants now; collective.  Choices by them are made anew.

        `what` is the call that needs them.
        """
        backend, groups = self.backend, self.topology.groups
        found = self.set_up(what, lambda: calibrate_shortly(backend, groups, self.deadline()))
        self.learn(found)
        return found

    def learn(self, calibration: Calibration) -> None:
        """Give the cost model its constants, the same on every rank; choices are made anew."""
        if self.chooser.advice is not None:
            self.chooser.advice.learn(calibration)
        self.chooser.forget()

    # -- running --------------------------------------------------------------------------------

    def serve(self, prepared: Prepared, algorithm: str, purpose: str = "") -> Any:
        """Serve a call, blocking, and give the user's result; `purpose` is the user's own call."""
        call = prepared.call
        place = self.shared.place(call)
        way = self.chooser.way(call, algorithm, place)
        self.check_usable()
        while not self.shared.has(way.name):
            self.set_up(call.fingerprint, partial(self.shared.make, way.name))
            self.chooser.forget()
            way = self.chooser.way(call, algorithm, place)
        what = purpose + self.chooser.describe(call, way, place)
        if way.name in (SYMMETRIC, STAGED, SINGLE_COPY):
            self.enter(self.shared.kernel(call, way.name, place, self.sequence + 1), what, way.name)
            return prepared.give()
        meets, program = way.choice is None, None
        fingerprint = self.reports.fingerprint(what, meets)
        sequence = self.announce(fingerprint)
        try:
            if way.choice is None:
                self.arrive(sequence, what, self.deadline())
                self._native(call)
            else:
                self.reports.check_first(sequence, what, fingerprint)
                program = self.cache.program(call, way.choice, self.arity(way), False)
                self.run(program, what, sequence, way.name)
                self.reports.check_same(sequence, what, fingerprint)
        except BaseException as error:
            raise self.broke(error, what, sequence, program, prepared) from error.__cause__
        return prepared.give()

    def enter(self, kernel: Kernel, what: str, how: str) -> None:
        """Run a kernel as the next operation, blocking: nothing is touched until all have come."""
        self.sequence = sequence = self.sequence + 1
        try:
            self.take_slot(kernel, sequence, what, how)
            for action in kernel.before:
                action()
            self.backend.board.announce(sequence, self.reports.fingerprint(what))
            self.arrive(sequence, what, self.deadline())
            self.run(kernel, what, sequence, how)
        except BaseException as error:
            raise self.broke(error, what, sequence) from error.__cause__

    def take_slot(self, kernel: Kernel, sequence: int, what: str, how: str) -> None:
        """Wait until the staging slot of a kernel, if it has one, may be written again."""
        if kernel.slot is None:
            return
        slot, free, last_use = kernel.slot, self.shared.slot_is_free, self.shared.last_use
        late = last_use[slot] >= self.met and not free(slot)
        if late and not self.engine.wait(lambda: free(slot), self.deadline()):
            raise self.timed_out(what, last_use[slot] + 1, how)
        last_use[slot] = sequence

    def run(self, program: Program, what: str, sequence: int, how: str) -> None:
        """Run a program for operation number `sequence`, blocking."""
        program.tags[0] = 0
        if program.greeting is not None:
            program.greeting.name(sequence, what, self.backend.board.fingerprint(sequence))
        if not self.engine.run(program, self.deadline()):
            raise self.timed_out(what, sequence, how)

    def arity(self, way: Way) -> int:
        """Give the arity of a way's tree: the name's, else the configured one."""
        assert way.choice is not None
        return way.choice.arity or self.config.tree_arity

    def _native(self, call: Call) -> None:
        self.inside = self.sequence
        self._guard()
        assert self.backend.native is not None
        self.backend.native.bind(call)()
        self.inside = 0

    # -- deadlines ------------------------------------------------------------------------------

    def deadline(self, timeout: Any = UNSET) -> float | None:
        """Give the moment by which a wait that begins now must end; None for never."""
        seconds = self.timeout if timeout is UNSET else timeout
        if seconds is not None and not isinstance(seconds, (int, float)):
            raise InvalidArgument(
                f"rank {self.backend.rank}: timeout={seconds!r}: allowed are seconds, or None"
            )
        return None if seconds is None else time.monotonic() + seconds

    def announce(self, fingerprint: int) -> int:
        """Announce that this rank has come to its next operation; return the operation's number."""
        self.sequence = sequence = self.sequence + 1
        self.backend.board.announce(sequence, fingerprint)
        return sequence

    def _guard(self) -> None:
        """Have the watchdog look at this communicator: a native call is about to begin."""
        if not self._guarded:
            WATCHDOG.watch(self)
            self._guarded = True

    def arrive(
        self, sequence: int, what: str, deadline: float | None, how: str = "waiting for all to come"
    ) -> None:
        """Wait until every rank has come: a native call cannot be interrupted later.

        Without a deadline too: a native call brings nothing forward that was begun in the
        background, and for which a rank may wait before it comes.
        """
        if not self.engine.patiently(
            lambda until: self.backend.arrive(sequence, until, self.engine.background()), deadline
        ) or not self.background.start_natives(deadline):
            raise self.timed_out(what, sequence, how)
        self.reports.check_arrived(sequence, what, self.everyone)
        self.met = sequence

    def meet(self, what: str, act: Callable[[], Any]) -> Any:
        """Do something collective that cannot be interrupted, such as a split, once all have come.

        Backends without calls of a library underneath keep deadlines themselves.
        """
        self.check_usable()
        if self.backend.native is None:
            return act()
        sequence = self.announce(self.reports.fingerprint(what))
        try:
            self.arrive(sequence, what, self.deadline())
            self._guard()
            self.inside = sequence
            result = act()
            self.inside = 0
        except BaseException as error:
            raise self.broke(error, what, sequence) from error.__cause__
        return result

    # -- set-up ---------------------------------------------------------------------------------

    def set_up(
        self, what: str, act: Callable[[], Any], how: str = "set-up", same: str | None = None
    ) -> Any:
        """Do something collective that a call needs, by :meth:`everyone`, once all have come.

        Parameters
        ----------
        what : str
            The user's call, for reports.
        act : callable
            Raises on every rank alike, but for what goes wrong between them.
        how : str
            What it is, for reports.
        same : str, optional
            What is compared between the ranks instead of `what`.
        """
        self.check_usable()
        meets = self.backend.native is not None  # other backends keep deadlines themselves
        sequence, before = 0, self._setting_up
        if meets:
            sequence = self.announce(self.reports.fingerprint(same or what))
        self._setting_up = (what, sequence)
        try:
            if meets:
                self.arrive(sequence, what, self.deadline(), how)
            return act()
        except BaseException as error:
            alike = isinstance(error, MpidistError) and not isinstance(error, CommunicationError)
            if alike or isinstance(error, MemoryError):
                raise
            raise self.broke(error, what, sequence) from error.__cause__
        finally:
            self._setting_up = before

    def everyone(self, value: Any) -> list[Any]:
        """Give the values of all ranks to every rank, in rank order; collective.

        Past the deadline the report names the call that needs it, never this exchange.
        """
        deadline, (what, sequence) = self.deadline(), self._setting_up

        def wait(test: Callable[[], bool]) -> None:
            if not self.engine.wait(test, deadline):
                raise self.timed_out(what, sequence or None, "set-up")

        return rendezvous.everyone(self.backend, value, wait)

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

    def broke(
        self, error: BaseException, what: str, sequence: int, *memory: object
    ) -> BaseException:
        """Note that an operation that began did not end, and give the error to be raised.

        What every rank sees before anything is under way leaves the communicator usable.  `memory`
        is what messages may still come to.
        """
        if isinstance(error, CommunicatorBroken) or getattr(error, "harmless", False):
            return error
        self.inside = 0
        self.engine.abandon()
        keep(memory)
        error = self.backend.translate(error)
        self.reports.notify(sequence, error)
        self.broken = (
            f"the communicator is broken since {what} (collective #{sequence}) ended with "
            f"{type(error).__name__}: {error}; create a new one"
        )
        return error
