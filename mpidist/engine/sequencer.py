"""The sequencer of a communicator: the number, arrival and deadline of each operation.

It is the only one to write them, and to say that the communicator is broken::

    number   sequence + 1, the same on all ranks, whatever the operation
    arrival  number and fingerprint on the board; a call of a library waits for all ranks first
    work     within the deadline, or under the watchdog's eyes
    broke    the end of every failure: nothing is polled any more, memory is kept, ranks are told
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any

from ..backends import rendezvous
from ..backends.base import Backend
from ..backends.board import private_words
from ..backends.flight import ARRIVED, ENDED
from ..backends.liveness import failed
from ..backends.program import Action, Program, library_call
from ..backends.recorder import Track
from ..errors import (
    CollectiveTimeout,
    CommunicationError,
    CommunicatorBroken,
    InvalidArgument,
    MpidistError,
    RankFailed,
)
from ..shared_memory import compiled
from ..shared_memory.steps import Steps, WordAddresses, announcing
from .call_site import call_site
from .door import Door
from .reports import Reports
from .run import Engine
from .watchdog import WATCHDOG
from .work import UNSET, keep

KNOWN_WITHIN = 0.03  # seconds from a rank's loss until the system tells how it ended
Serve = Callable[[int], Any]
"""Serves an operation, or a part of it; argument: the operation's number."""
Made = Callable[[Callable[[], Any], Callable[[Any], object]], Callable[[], None]]
"""``made(take, put)`` returns the function that serves a call again, as the next operation.

It enters the communicator's door by them, and leaves.
"""
Held = Callable[[], tuple[object, ...]]
"""Returns the memory to keep if an operation does not end: messages may still be stored there."""


class Sequencer:
    """Numbers the operations of one communicator; keeps their deadlines and the broken state."""

    def __init__(self, backend: Backend, timeout: float | None):
        self.backend, self.timeout = backend, timeout  # seconds until a wait's deadline, or None
        self.sequence = 0  # number of operations begun
        self.met = 0  # number of the last operation that all ranks are known to have reached
        self.inside = 0  # number of the native call that this rank is in, for the watchdog
        self.door, self.freed = Door(backend.rank), False
        # Returns the ranks that have not reached a barrier in symmetric memory.
        self.behind: Callable[[], tuple[int, ...]] = lambda: ()
        # Starts the native calls of the background that all ranks have reached; are none left?
        self.start_natives: Callable[[], bool] = lambda: True
        # The track in the flight record; else words that nobody reads.
        self.progress = private_words(1) if backend.track is None else backend.track.state
        self.announce = self._make_announce()
        if isinstance(backend.track, Track):
            backend.waiting_line = call_site  # type: ignore[attr-defined]
        self.reports = Reports(backend, lambda: self.behind(), lambda: self.sequence)
        # Ranks that are threads of one process see at once that they wait in vain.
        alarm = self.reports.alarm if backend.native is not None else None
        self.engine = Engine(backend, alarm)
        self._setting_up = ("set-up", 0)  # call that needs a set-up exchange, and its number
        self._guarded = False
        self._slot_used = [0, 0]  # number of the operation that last used each staging slot
        self._meet: Callable[[int, int, str], None] | None = None

    # -- running --------------------------------------------------------------------------------

    def run(self, program: Program, operation: str, how: str, *memory: object) -> None:
        """Run a program as the next operation, blocking; keep `memory` if it does not end."""
        meets = program.meets
        if not program.announced or (meets and self.backend.native is None):
            # Backends without calls of a library underneath keep deadlines themselves.
            self.engine.run(program, None)
            return
        reports = self.reports
        self.sequence = sequence = self.sequence + 1
        try:
            if program.slot is not None:
                self.take_slot(program.slot, sequence, operation, how)
            for action in program.before:
                action()
            fingerprint = reports.fingerprint(operation, meets)
            if meets:
                meet = self._meet or self._make_meet()
                meet(sequence, fingerprint, operation)
            else:
                self.announce(sequence, fingerprint)
                reports.check_first(sequence, operation, fingerprint)
            self.execute(program, operation, sequence, how)
            if not meets:  # once more: ranks that came later have announced their operation now
                reports.check_same(sequence, operation, fingerprint)
            self.progress[ENDED] = sequence
        except BaseException as error:
            raise self.broke(error, operation, sequence, program, *memory) from error.__cause__

    def begin(self, operation: str) -> int:
        """Announce the next operation, which runs in the background; return its fingerprint."""
        fingerprint = self.reports.fingerprint(operation, meets=False)
        sequence = self._announce(fingerprint)
        self.reports.check_first(sequence, operation, fingerprint)
        return fingerprint

    def _announce(self, fingerprint: int) -> int:
        self.sequence = sequence = self.sequence + 1
        self.announce(sequence, fingerprint)
        return sequence

    def take_slot(self, slot: int, sequence: int, operation: str, how: str) -> None:
        """Wait until every rank has left the operation that used a slot last; record this use."""
        # A rank that announces `last + 1` has left `last`.  The slots take turns by the number, so
        # `last + 1` < `sequence`: this rank has been there, and nobody waits here for one who waits
        # here.  `met` saves reading the board: ranks that have met after `last` have left it.
        last = self._slot_used[slot]
        if last and last >= self.met:
            reached = self.backend.board.all_reached
            if not reached(last + 1) and not self.engine.wait(
                lambda: reached(last + 1), self.deadline()
            ):
                raise self.timed_out(operation, last + 1, how)
        self._slot_used[slot] = sequence

    def execute(self, program: Program, operation: str, sequence: int, how: str) -> None:
        """Run the rounds of a program, blocking, after its operation has been announced."""
        program.bank[0] = 0
        if program.named is not None:
            program.named.name(sequence, operation, self.backend.board.fingerprint(sequence))
        if program.interruptible:
            if not self.engine.run(program, self.deadline()):
                raise self.timed_out(operation, sequence, how)
            return
        if not self._guarded:
            self._guard()
        self.inside = sequence
        self.engine.run(program, None)
        self.inside = 0

    def meet(self, operation: str, act: Callable[[], Any]) -> Any:
        """Run an uninterruptible collective action, such as a split, once all ranks have arrived.

        A backend without native calls runs it at once: its own waits have deadlines.
        """
        self.check_usable()
        found: list[Any] = []
        self.run(library_call(lambda: found.append(act())), operation, operation)
        return found[0]

    # -- repeated calls -------------------------------------------------------------------------
    # Entering the door, numbering and leaving stand in each of the three functions: one around them
    # took 45 ns more, of the 900 of a sum in symmetric memory on one rank.

    def repeated_library_call(self, operation: str, actions: Sequence[Action], held: Held) -> Made:
        """Return how to make the function that runs a native call, once all ranks have arrived."""
        arrive, sequencer, door = self.arrival(operation), self, self.door
        progress = self.progress
        self._guard()

        def made(take: Callable[[], Any], put: Callable[[Any], object]) -> Callable[[], None]:
            def run() -> None:
                try:
                    token = take()
                except IndexError:
                    token = door.take_or_refuse()
                sequencer.sequence = sequence = sequencer.sequence + 1
                try:
                    arrive(sequence)
                    sequencer.inside = sequence
                    for action in actions:
                        action()
                    sequencer.inside = 0
                    progress[ENDED] = sequence
                except BaseException as error:
                    cause = sequencer.broke(error, operation, sequence, *held())
                    if door.broken is None:
                        put(token)
                    raise cause from error.__cause__
                if door.broken is None:  # another thread may have closed it meanwhile
                    put(token)

            return run

        return made

    def repeated_messages(
        self, operation: str, how: str, programs: Sequence[Program], held: Held
    ) -> Made:
        """Return how to make the function that runs programs with messages, which take turns."""
        announce, reports, turns = self.announce, self.reports, len(programs)
        fingerprint = reports.fingerprint(operation, meets=False)
        sequencer, door, progress = self, self.door, self.progress

        def made(take: Callable[[], Any], put: Callable[[Any], object]) -> Callable[[], None]:
            def run() -> None:
                try:
                    token = take()
                except IndexError:
                    token = door.take_or_refuse()
                sequencer.sequence = sequence = sequencer.sequence + 1
                try:
                    program = programs[sequence % turns]
                    if program.slot is not None:
                        sequencer.take_slot(program.slot, sequence, operation, how)
                    for action in program.before:
                        action()
                    announce(sequence, fingerprint)
                    reports.check_first(sequence, operation, fingerprint)
                    sequencer.execute(program, operation, sequence, how)
                    reports.check_same(sequence, operation, fingerprint)
                    progress[ENDED] = sequence
                except BaseException as error:
                    cause = sequencer.broke(error, operation, sequence, *held())
                    if door.broken is None:
                        put(token)
                    raise cause from error.__cause__
                if door.broken is None:  # another thread may have closed it meanwhile
                    put(token)

            return run

        return made

    def repeated_kernels(
        self, operation: str, how: str, kernels: Sequence[tuple[int | None, Serve]], held: Held
    ) -> Made:
        """Return how to make the function that runs a kernel in shared memory.

        `kernels` take turns: a staging slot or None, and ``serve(sequence)``, which runs the kernel
        and all its waits.
        """
        turns, sequencer, door, used = len(kernels), self, self.door, self._slot_used

        def made(take: Callable[[], Any], put: Callable[[Any], object]) -> Callable[[], None]:
            def run() -> None:
                try:
                    token = take()
                except IndexError:
                    token = door.take_or_refuse()
                sequencer.sequence = sequence = sequencer.sequence + 1
                try:
                    slot, serve = kernels[sequence % turns]  # by the number: on all ranks alike
                    if slot is None:
                        pass
                    elif used[slot] < sequencer.met:  # as take_slot, without the call
                        used[slot] = sequence
                    else:
                        sequencer.take_slot(slot, sequence, operation, how)
                    serve(sequence)
                    sequencer.met = sequence
                except BaseException as error:
                    cause = sequencer.broke(error, operation, sequence, *held())
                    if door.broken is None:
                        put(token)
                    raise cause from error.__cause__
                if door.broken is None:  # another thread may have closed it meanwhile
                    put(token)

            return run

        return made

    # -- arrival --------------------------------------------------------------------------------

    def arrive(
        self,
        sequence: int,
        operation: str,
        deadline: float | None,
        how: str = "waiting for all ranks",
    ) -> None:
        """Wait until all ranks have arrived: a native call cannot be interrupted later.

        All ranks wait, even if there is no deadline: a native call does not poll the operations in
        the background, and another rank may wait for one of them before it arrives.  The MPI
        library needs its calls in the same order on every rank: so those of the background start
        here, once all ranks have reached a later operation.
        """
        engine, start = self.engine, self.start_natives
        if not engine.patiently(
            lambda until: self.backend.arrive(sequence, until, engine.background()), deadline
        ) or not (start() or engine.wait(start, deadline)):
            raise self.timed_out(operation, sequence, how)
        self.reports.check_arrived(sequence, operation, self.everyone)
        self.met = self.progress[ARRIVED] = sequence

    def arrival(self, operation: str) -> Serve:
        """Return ``arrive(sequence)``, which announces an operation and waits for all ranks."""
        fingerprint = self.reports.fingerprint(operation)

        def keep_waiting(sequence: int) -> None:
            self.arrive(sequence, operation, self.deadline())

        words = self.board_words()
        if words is None:
            announce = self.announce

            def announce_and_wait(sequence: int) -> None:
                announce(sequence, fingerprint)
                keep_waiting(sequence)

            return announce_and_wait
        steps = Steps()
        steps.arrive(words, fingerprint, keep_waiting)
        run = steps.bind()

        def arrive(sequence: int) -> None:
            run(sequence)
            self.met = sequence

        return arrive

    def _make_meet(self) -> Callable[[int, int, str], None]:
        """Return ``meet(sequence, fingerprint, operation)``: :meth:`arrival` at any operation."""
        words, operations = self.board_words(), [""]

        def keep_waiting(sequence: int) -> None:
            self.arrive(sequence, operations[0], self.deadline())

        if words is None:
            announce = self.announce

            def meet(sequence: int, fingerprint: int, operation: str) -> None:
                announce(sequence, fingerprint)
                self.arrive(sequence, operation, self.deadline())

        else:
            steps = Steps()
            arrival_step = steps.arrive(words, 0, keep_waiting)
            run = steps.bind()

            def meet(sequence: int, fingerprint: int, operation: str) -> None:
                arrival_step.mark, operations[0] = fingerprint, operation
                run(sequence)
                self.met = sequence

        self._meet = meet
        return meet

    def board_words(self) -> WordAddresses | None:
        """Return the addresses of the ranks' numbers on the board, for compiled code.

        None without compiled code, and if ranks of other nodes announce themselves by messages.
        """
        backend, board = self.backend, self.backend.board
        if len(board.ranks) < backend.size or not compiled.runs_steps():
            return None
        words, mine = board.words, board.base(backend.rank)
        return WordAddresses(words, mine, board.others, backend.patience, backend.track)

    def _make_announce(self) -> Callable[[int, int], None]:
        """Return ``announce(sequence, fingerprint)``: on the board, and in the flight record."""
        board, track = self.backend.board, self.backend.track
        if track is None:
            return board.announce
        compiled_one = announcing(board.words, board.base(self.backend.rank), track)
        if compiled_one is not None:
            return compiled_one

        def announce(sequence: int, fingerprint: int) -> None:
            track.begin(sequence, fingerprint)
            board.announce(sequence, fingerprint)

        return announce

    # -- set-up ---------------------------------------------------------------------------------

    def set_up(
        self, operation: str, act: Callable[[], Any], how: str = "set-up", same: str | None = None
    ) -> Any:
        """Run ``act()``, a set-up that may use :meth:`everyone`, once all ranks have arrived.

        Its errors must be the same on every rank, except communication errors.  `operation` is the
        user's call and `how` the set-up, for reports; the ranks compare `same` instead of
        `operation`, if given.
        """
        self.check_usable()
        meets = self.backend.native is not None  # other backends keep deadlines themselves
        sequence, before = 0, self._setting_up
        if meets:
            sequence = self._announce(self.reports.fingerprint(same or operation))
        self._setting_up = (operation, sequence)
        try:
            if meets:
                self.arrive(sequence, operation, self.deadline(), how)
            made = act()
            if meets:
                self.progress[ENDED] = sequence
            return made
        except BaseException as error:
            alike = isinstance(error, MpidistError) and not isinstance(error, CommunicationError)
            if alike or isinstance(error, MemoryError):
                raise
            raise self.broke(error, operation, sequence) from error.__cause__
        finally:
            self._setting_up = before

    def cannot_begin(self, collective: str, error: Exception) -> None:
        """Take the part of this rank in a collective that it has no memory for, to say so.

        Ranks that begin the collective raise CollectiveMismatch, with that text.
        """
        with suppress(CommunicationError):  # this rank is to raise `error`
            self.set_up(f"{collective} without memory ({error})", lambda: None)

    def everyone(self, value: Any) -> list[Any]:
        """Return the values of all ranks, in rank order, on every rank; collective.

        Past the deadline the report names the call that needs this exchange, not the exchange.
        """
        deadline, (operation, sequence) = self.deadline(), self._setting_up

        def wait(test: Callable[[], bool]) -> None:
            if not self.engine.wait(test, deadline):
                raise self.timed_out(operation, sequence or None, "set-up")

        return rendezvous.everyone(self.backend, value, wait)

    # -- deadlines ------------------------------------------------------------------------------

    def deadline(self, timeout: Any = UNSET) -> float | None:
        """Return the deadline (``time.monotonic``) of a wait that begins now; None for never."""
        seconds = self.timeout if timeout is UNSET else timeout
        if seconds is not None and not isinstance(seconds, (int, float)):
            raise InvalidArgument(
                f"rank {self.backend.rank}: timeout={seconds!r}: expected seconds, or None"
            )
        return None if seconds is None else time.monotonic() + seconds

    def timed_out(
        self, operation: str, sequence: int | None, how: str, timeout: Any = UNSET
    ) -> CollectiveTimeout:
        """Return the error for an operation past its deadline; see :meth:`Reports.timed_out`."""
        seconds = self.timeout if timeout is UNSET else timeout
        return self.reports.timed_out(operation, sequence, how, seconds)

    def _guard(self) -> None:
        """Register this communicator with the watchdog, before a native call."""
        if not self._guarded:
            WATCHDOG.watch(self)
            self._guarded = True

    # -- the end --------------------------------------------------------------------------------

    @property
    def broken(self) -> str | None:
        """Why the communicator can no longer be used; None while it can."""
        return self.door.broken

    def check_usable(self) -> None:
        """Raise `CommunicatorBroken`, with the reason, if the communicator is broken or freed.

        If it is broken by the loss of a rank, raise `RankFailed`.
        """
        self.door.check()

    def free(self) -> None:
        """Let nobody use the communicator any more, whose memory and requests have been freed."""
        self.freed = True
        self.door.close("the communicator was freed")

    def broke(
        self,
        error: BaseException,
        operation: str,
        sequence: int | None,
        *memory: object,
        elsewhere: bool = True,
    ) -> BaseException:
        """Mark the communicator broken by an unfinished operation; return the error to raise.

        An error that every rank sees before any work is done leaves the communicator usable.  With
        no number `sequence`, as of a message, this rank begins no further operation.  `memory` is
        kept, as messages may still be stored there.  `elsewhere` is whether MPI may be called, to
        notify ranks of other nodes: not by a thread of its own.

        It is raised ``from error.__cause__``: the traceback shows one error and its cause, and not
        the one from which it was translated.
        """
        told = isinstance(error, (CommunicatorBroken, RankFailed)) and not getattr(
            error, "echo", False
        )
        if (told and self.broken is not None) or getattr(error, "harmless", False):
            return error
        self.inside = 0
        self.engine.abandon()
        keep(memory)
        error = self.backend.translate(error)
        number = "" if sequence is None else f" (collective #{sequence})"
        loss = None
        if isinstance(error, RankFailed):
            error = self._lost_in(error, f"{operation}{number}")
            loss = None if error.echo else error  # of an exception: that rank may be alive
        self.reports.notify(sequence, error, elsewhere)
        self.door.close(
            f"the communicator is broken since {operation}{number} ended with "
            f"{type(error).__name__}: {error}; create a new one",
            loss,
        )
        return error

    def _lost_in(self, error: RankFailed, operation: str) -> RankFailed:
        """Return the error with the operation, and with what the system knows of the lost ranks."""
        reasons, until = {**error.reasons, **self.backend.lost()}, time.monotonic() + KNOWN_WITHIN
        while error.ranks and not reasons and time.monotonic() < until:
            time.sleep(1e-3)  # its memory is gone a moment before the process has ended
            reasons = dict(self.backend.lost())
        if not reasons or operation in str(error):
            return error
        named = failed(self.backend.rank, reasons, operation)
        named.__cause__ = error.__cause__
        return named
