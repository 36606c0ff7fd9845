"""Operations in the background: how they begin, and what becomes of those that nobody waits for."""

from __future__ import annotations

import logging
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any

from .binding import Program
from .call import Call
from .engine import Run
from .plan import SLOTS, TAG_SPACE, slot_of
from .prepare import Prepared
from .selection import Way
from .symmetric import SYMMETRIC, Place
from .symmetric.kernels import Kernel
from .work import UNSET, Work

if TYPE_CHECKING:
    from .service import Service

log = logging.getLogger("mpidist")


class UnderWay:
    """What one communicator has under way in the background.

    Attributes
    ----------
    works : set of Work
        What has begun and not ended.
    """

    def __init__(self, service: Service):
        self._service = service
        self.works: set[Work] = set()
        self._begun = 0
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
            service.announce(what)
            service.reports.check_first(sequence, what)
            self.sweep()
            if program is None:
                look = service.backend.native.start(call)
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
            kernel.arrival.check = partial(service.reports.check_same, sequence, what)
            return kernel
        if way.choice is None:
            return None
        return service.cache.program(call, way.choice, service.arity(way), True)

    def _take_tags(self, program: Program, what: str, how: str) -> None:
        """Give a program tags of its own; every rank counts alike, so all take the same.

        They come before anything is done, for what a kernel notes is told apart by them.
        """
        service = self._service
        self._begun += 1
        slot = self._begun % max(1, min(SLOTS, service.backend.tag_limit // 2 // TAG_SPACE - 1))
        before, number = self._in_slot.get(slot, (None, 0))
        if before is not None and not service.engine.wait(before.test, service.deadline(UNSET)):
            raise service.timed_out(what, number, how)
        self._in_slot = {s: r for s, r in self._in_slot.items() if not r[0].done}
        program.tag_base[0] = TAG_SPACE * (1 + slot)

    def _start(self, program: Program, sequence: int) -> Callable[[], bool]:
        """Start a program that has its tags."""
        run = self._service.engine.start(program)
        self._in_slot[slot_of(program.tag_base) - 1] = (run, sequence)
        return run.test

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
