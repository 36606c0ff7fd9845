"""Background operations: starting them, and completing those that nobody waits for."""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Callable
from functools import partial
from typing import Any, Protocol

from ..backends.base import Backend, PendingArrival
from ..backends.program import Program, Round
from ..calls.call import Call
from ..calls.prepare import Prepared
from ..errors import CollectiveTimeout
from ..schedule.registry import SYMMETRIC
from ..schedule.unrolled import tags_of
from ..selection.choose import Way
from ..shared_memory import Place
from ..shared_memory.in_place import Kernel
from .chooser import Chooser
from .executors import SharedMemory
from .programs import ProgramCache
from .reports import Reports
from .run import Engine, Run
from .work import UNSET, Work

log = logging.getLogger("mpidist")
_TELLING_SECONDS = 1.0


class Serving(Protocol):
    """What serves the calls of a communicator, as far as background operations need it."""

    backend: Backend
    cache: ProgramCache
    chooser: Chooser
    engine: Engine
    reports: Reports
    sequence: int
    shared: SharedMemory

    @property
    def background(self) -> Background:
        """The background operations themselves."""

    def announce(self, fingerprint: int) -> int:
        """Announce that this rank has come to its next operation; return the operation's number."""

    def arity(self, way: Way) -> int:
        """Return the arity of a way's tree."""

    def broke(self, error: BaseException, what: str, sequence: int) -> BaseException:
        """Note that an operation that began did not end; return the error to be raised."""

    def check_usable(self) -> None:
        """Raise `CommunicatorBroken` with the reason if an operation was left unfinished."""

    def deadline(self, timeout: Any) -> float | None:
        """Return the moment by which a wait that begins now must end; None for never."""

    def timed_out(
        self, what: str, sequence: int | None, how: str, timeout: Any = UNSET
    ) -> CollectiveTimeout:
        """Return the report of a deadline that passed."""


class Background:
    """The background operations of one communicator.

    Attributes
    ----------
    works : set of Work
        What has begun and not ended.
    """

    def __init__(self, service: Serving):
        self._service = service
        self.works: set[Work] = set()
        self._begun = 0
        self._slots = tags_of(service.backend.tag_limit)[1]
        self._natives: deque[_Native] = deque()  # that are not started yet
        self._in_slot: dict[int, tuple[Run, int]] = {}  # with the number of its operation

    def begin(self, prepared: Prepared, algorithm: str) -> Work:
        """Begin to serve a call."""
        service, call = self._service, prepared.call
        place = service.shared.place(call)
        way = service.chooser.way(call, algorithm, place, background=True)
        service.check_usable()
        what = service.chooser.describe(call, way, place, background=True)
        sequence = service.sequence + 1
        try:
            program = self._program(call, way, place, sequence, what)
            if program is not None:
                self._take_tags(program, what, way.name)
            for action in program.before if isinstance(program, Kernel) else ():
                action()
            fingerprint = service.reports.fingerprint(what, meets=False)
            service.announce(fingerprint)
            service.reports.check_first(sequence, what, fingerprint)
            self.sweep()
            if program is not None and program.greeting is not None:
                program.greeting.name(sequence, what, fingerprint)
            if program is None:
                look = self._start_native(call, sequence, what)
            else:
                look = self._start(program, sequence)
        except BaseException as error:
            raise service.broke(error, what, sequence) from error.__cause__
        return self._work(look, prepared.give, what, sequence, way.name)

    def _work(
        self,
        look: Callable[[], bool],
        give: Callable[[], Any],
        what: str,
        sequence: int,
        how: str,
    ) -> Work:
        """Give what the user holds; an error in it breaks the communicator."""
        service = self._service

        def test() -> bool:
            service.check_usable()
            try:
                return look()
            except BaseException as error:
                raise service.broke(error, what, sequence) from error.__cause__

        def wait(test: Callable[[], bool], timeout: Any) -> None:
            service.check_usable()
            deadline = service.deadline(timeout)
            try:
                if not service.engine.wait(test, deadline):
                    raise service.timed_out(what, sequence, how, timeout)
            except BaseException as error:
                raise service.broke(error, what, sequence) from error.__cause__

        return Work(test, wait, give, self.works)

    def _program(
        self, call: Call, way: Way, place: Place | None, sequence: int, what: str
    ) -> Program | None:
        """Give the program of operation number `sequence`; None for native."""
        service = self._service
        if way.name == SYMMETRIC:
            kernel = service.shared.kernel(call, SYMMETRIC, place, 0, background=True)
            assert kernel.arrival is not None
            kernel.arrival.sequence = sequence
            fingerprint = service.reports.fingerprint(what, meets=False)
            kernel.arrival.check = partial(service.reports.check_same, sequence, what, fingerprint)
            return kernel
        if way.choice is None:
            return None
        return service.cache.program(call, way.choice, service.arity(way), True)

    def _take_tags(self, program: Program, what: str, how: str) -> None:
        """Give a program tags of its own; every rank counts alike, so all take the same.

        Before the kernel's first action: its notes are keyed by the tags.
        """
        service = self._service
        self._begun += 1
        slot = 1 + self._begun % self._slots
        before, number = self._in_slot.get(slot, (None, 0))
        if before is not None and not service.engine.wait(before.test, service.deadline(UNSET)):
            raise service.timed_out(what, number, how)
        self._in_slot = {s: r for s, r in self._in_slot.items() if not r[0].done}
        program.tags[0] = slot

    def _start(self, program: Program, sequence: int) -> Callable[[], bool]:
        """Start a program that has its tags."""
        run = self._service.engine.start(program)
        self._in_slot[program.tags[0]] = (run, sequence)
        return run.test

    def _start_native(self, call: Call, sequence: int, what: str) -> Callable[[], bool]:
        """Start a call of the library; between nodes, when all ranks are known to mean the same.

        On one node two ranks that differ see it on the board, and one of them before it starts.
        """
        service = self._service
        backend = service.backend
        assert backend.native is not None
        if len(backend.board.ranks) == backend.size:
            return backend.native.start(call)
        native = _Native(backend.begin_arrival(sequence), call, sequence, what, service)
        self._natives.append(native)
        run = service.engine.start(Program([Round((), native, ())], (), 0, 0, [0]))

        def test() -> bool:
            service.engine.progress()  # those begun before it come first
            return run.test()

        return test

    def start_natives(self, deadline: float | None) -> bool:
        """Start the native calls that were begun, once all ranks have come to a later operation.

        The library wants its calls in the same order on every rank.  False past the deadline.
        """
        return not self._natives or self._service.engine.wait(self.advance, deadline)

    def advance(self) -> bool:
        """Start the native calls to which all ranks have come; tell whether none is left."""
        while self._natives and self._natives[0].arrival.test():
            self._natives.popleft().start_call()
        return not self._natives

    def sweep(self) -> None:
        """Let go of what was begun and dropped by the caller, and has ended."""
        for work in list(self.works):
            try:
                work.test()
            except Exception:  # it is for who waits for that work
                log.debug("an operation in the background failed", exc_info=True)

    def finish(self) -> None:
        """Wait for all of it."""
        for work in list(self.works):
            work.wait()


class _Native:
    """A native call between nodes: a round that compares what the ranks mean, then starts it."""

    def __init__(
        self, arrival: PendingArrival, call: Call, sequence: int, what: str, service: Serving
    ):
        self.arrival, self._service = arrival, service
        self._call: Call | None = call  # until the library holds its arrays
        assert service.backend.roll_call is not None  # there are other nodes
        self._roll_call = service.backend.roll_call
        self._sequence, self._what = sequence, what
        self._look: Callable[[], bool] | None = None
        self._until: float | None = None  # when the others have told what they mean, or will not

    def start_call(self) -> None:
        """Start the call; unless the ranks mean different ones, of which all tell each other."""
        service, what = self._service, self._what
        if self.arrival.alike:
            assert self._call is not None and service.backend.native is not None
            self._look = service.backend.native.start(self._call)
            self._call = None
            return
        fingerprint = service.reports.fingerprint(what, meets=False)
        self._roll_call.tell(self._sequence, fingerprint, what)
        self._until = time.monotonic() + _TELLING_SECONDS

    def start(self) -> None:
        """Do nothing: the arrival has begun."""

    def test(self) -> bool:
        """Tell whether the call has ended; raise if the ranks mean different ones."""
        service = self._service
        if self._look is None and self._until is None:
            service.background.advance()
        if self._until is not None:
            reports, sequence, what = service.reports, self._sequence, self._what
            fingerprint = reports.fingerprint(what, meets=False)
            other = self._roll_call.different(sequence, fingerprint)
            if other or time.monotonic() > self._until:
                raise reports.mismatch(sequence, what, other)
        return self._look is not None and self._look()
