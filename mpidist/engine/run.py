"""The engine: runs programs on a backend, blocking or in the background, with a deadline."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, MutableSequence
from functools import partial
from typing import Any, Protocol

from ..backends.base import Backend
from ..backends.program import Program, Round, Side

ALARM_SECONDS = (0.1, 0.5)  # of waiting before the first alarm; between alarms


class PendingOperation(Protocol):
    """An operation in the background."""

    @property
    def done(self) -> bool:
        """Whether the operation is known to have ended."""

    def test(self) -> bool:
        """Poll; return whether the operation has ended; raise if it or its communicator failed."""

    def ended(self) -> bool:
        """Poll; return whether the operation has ended or failed, without raising."""


class _PendingEngines(threading.local):
    """The engines of this thread with pending operations; one per thread, as ranks may be threads.

    A rank that waits on one communicator must poll the pending operations of the others too, or two
    ranks could wait for each other: so this is shared by all communicators.
    """

    def __init__(self) -> None:
        self.engines: list[Engine] = []


_pending = _PendingEngines()


class Engine:
    """Runs the programs of one communicator and polls those in the background.

    ``alarm()`` is called repeatedly during a long wait, and raises if the wait cannot succeed;
    `active` has the pending operations, in the order of their start.
    """

    def __init__(self, backend: Backend, alarm: Callable[[], object] | None = None):
        self.backend, self.alarm = backend, alarm
        self.active: list[PendingOperation] = []

    def run(self, program: Program, deadline: float | None) -> bool:
        """Run a program to its end; return False if the deadline passed first.

        Rounds in a row are run here without a generator: that costs a third less per round.
        """
        for item in program.items:
            if not isinstance(item, Round):
                steps = _side(item)
                if not self.wait(partial(_ended, steps), deadline):
                    return False
                continue
            for action in item.before:
                action()
            transfer = item.transfer
            if transfer is not None:
                transfer.start()
                if not transfer.test() and not self.wait(transfer.test, deadline):
                    return False
            for action in item.after:
                action()
        for action in program.finish:
            action()
        return True

    def start(self, program: Program) -> Run:
        """Begin to run a program in the background; return its Run, which the waits poll."""
        run = Run(polled(program), program)
        # Finished operations are dropped here too: a caller that never waits never polls them.
        self.active = [other for other in self.active if not other.done]
        self.attend(run)
        run.test()
        return run

    def attend(self, pending: PendingOperation) -> None:
        """Register an operation, to be polled in every wait until it has ended."""
        self.active.append(pending)
        self.attend_here()

    def attend_here(self) -> None:
        """Have the registered operations polled in the waits of this thread, too."""
        if self not in _pending.engines:
            _pending.engines.append(self)

    def wait(
        self,
        test: Callable[[], bool],
        deadline: float | None,
        alarm: Callable[[], object] | None = None,
    ) -> bool:
        """Wait until ``test()`` is true, polling pending operations; False past the deadline.

        The `deadline` is a time of ``time.monotonic``, or None; ``alarm()`` is called during a long
        wait besides the engine's own.
        """
        wait = self.backend.wait
        return self.patiently(lambda until: wait(test, until, self.background()), deadline, alarm)

    def patiently(
        self,
        wait: Callable[[float | None], bool],
        deadline: float | None,
        alarm: Callable[[], object] | None = None,
    ) -> bool:
        """Return the result of ``wait(deadline)``, interrupted to call the alarms now and then."""
        if self.alarm is None:
            return wait(deadline)
        until = time.monotonic() + ALARM_SECONDS[0]
        while deadline is None or until < deadline:
            if wait(until):
                return True
            self.alarm()
            if alarm is not None:
                alarm()
            until = time.monotonic() + ALARM_SECONDS[1]
        return wait(deadline)

    def background(self) -> Callable[[], None] | None:
        """Return `progress`, to be called in a wait; None if no operation is pending."""
        return self.progress if _pending.engines else None

    def progress(self) -> None:
        """Poll pending operations of all communicators; raise errors of this one's only."""
        engines = _pending.engines
        for engine in tuple(engines):
            # Another thread may poll the same ones, and begin others: the list must stay the same.
            active = engine.active
            # Whoever waits on this communicator learns at once that it has failed.  Another one's
            # error, raised here, would break this communicator, which is sound: the other's `Run`
            # keeps it, and raises it in a wait of its own.
            for run in tuple(active):
                if run.test() if engine is self else run.ended():
                    discard(active, run)
            if not active:
                discard(engines, engine)

    def abandon(self) -> None:
        """Stop polling for this communicator: it is broken, or has no pending operation left."""
        self.active = []
        discard(_pending.engines, self)


def discard(some: MutableSequence[Any], one: object) -> None:
    """Remove `one` from `some`, if another thread has not."""
    try:
        some.remove(one)
    except ValueError:
        pass


class Run:
    """What runs in the background, a program or a receive, polled until it has ended.

    Its steps yield while a message is missing.  A program is busy until it has ended; after an
    `error` it is for ever.

    Several threads may poll it, and one at a time takes a step: a thread that waits polls the
    operations it began on other communicators, beside the thread that waits for them.
    """

    __slots__ = ("_steps", "_program", "done", "error")

    def __init__(self, steps: Iterator[None], program: Program | None = None):
        self._steps, self._program = [steps], program  # empty while a step is taken
        self.done = False
        self.error: BaseException | None = None
        if program is not None:
            program.busy = True

    def test(self) -> bool:
        """Poll; return whether it has ended.  After an error, each call raises it."""
        if self.error is not None:
            raise self.error
        if not self.done:
            try:
                if self._take_step():
                    self.done = True
                    if self._program is not None:
                        self._program.busy = False
            except BaseException as error:
                self.error = error
                raise
        return self.done

    def _take_step(self) -> bool:
        """Take a step; return whether it was the last one.

        It is False too while another thread takes a step, or what this call interrupts.
        """
        try:
            steps = self._steps.pop()  # atomic
        except IndexError:
            return False
        if next(steps, True) is True:
            return True
        self._steps.append(steps)
        return False

    def ended(self) -> bool:
        """Poll; return whether it has ended or failed."""
        try:
            return self.test()
        except Exception:  # test() raises it again in its own wait
            return True


def _ended(steps: Iterator[None]) -> bool:
    return next(steps, True) is True


def polled(program: Program) -> Iterator[None]:
    """Return the steps of a program for its :class:`Run`."""
    return _program(program) if program.finish else _strand(program.items)


def _program(program: Program) -> Iterator[None]:
    yield from _strand(program.items)
    for action in program.finish:
        action()


def _strand(items: list[Round | Side]) -> Iterator[None]:
    """Run one strand, a list of rounds; yield None while a message is missing."""
    for item in items:
        if isinstance(item, Side):
            yield from _side(item)
            continue
        for action in item.before:
            action()
        transfer = item.transfer
        if transfer is not None:
            transfer.start()
            while not transfer.test():
                yield
        for action in item.after:
            action()


def _side(side: Side) -> Iterator[None]:
    """Run strands (lists of rounds) concurrently; yield None while messages are missing.

    At most `side.window` run at a time: strand k + window starts when strand k has ended.
    """
    # Five strands, window 2; a row takes every second strand, however long the others are, because
    # strand k + window has the scratch memory of strand k:
    #     row 0:  0 ─── 2 ─────── 4 ──
    #     row 1:  1 ─────── 3 ──
    window = side.window
    rows: list[tuple[int, Iterator[None]] | None] = [
        (k, _strand(side.strands[k])) for k in range(min(window, len(side.strands)))
    ]
    left = len(side.strands)
    while left:
        for row, entry in enumerate(rows):
            while entry is not None and next(entry[1], True) is True:
                left -= 1
                k = entry[0] + window
                entry = (k, _strand(side.strands[k])) if k < len(side.strands) else None
                rows[row] = entry
        if left:
            yield
