"""What a kernel does in a quick call: by compiled code where there is some, else step by step.

An allreduce of 64 KiB in symmetric memory, in place, takes 3.7 µs instead of 6.5 on 2 ranks, and 21
instead of 30 on 4 that share 2 cores; of private arrays 12.6 instead of 16, and 36 instead of 77.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

from ..backends.base import Backend
from ..backends.board import HISTORY, PRINTS, STORES_KEEP_ORDER, fence
from ..backends.program import Program, Round
from ..backends.waiting import spin
from .barrier import Barrier
from .compiled import vector_width
from .conditional import Unless
from .steps import Steps, Words

Serve = Callable[[int], Any]
"""Does something for operation number so and so."""
Actions = tuple[Callable[[], Any], ...]


class Marks(Protocol):
    """Numbers the operations as the arrival board has them."""

    def fingerprint(self, what: str, meets: bool = True) -> int:
        """Return the number that stands for an operation on the arrival board."""


class Waits(Protocol):
    """Waits while pending operations are polled."""

    def wait(self, test: Callable[[], bool], deadline: float | None) -> bool:
        """Wait for ``test()``; False if the deadline passed first."""


class Serving(Protocol):
    """What serves calls on a communicator, as far as a kernel needs it."""

    backend: Backend
    timeout: float | None
    met: int

    @property
    def reports(self) -> Marks:
        """Numbers the operations."""

    @property
    def engine(self) -> Waits:
        """Waits while pending operations are polled."""

    def deadline(self) -> float | None:
        """Return the moment by which a wait that begins now must end; None for never."""

    def arrive(self, sequence: int, what: str, deadline: float | None) -> None:
        """Wait until every rank has come to operation number `sequence`."""

    def timed_out(self, what: str, sequence: int | None, how: str) -> Exception:
        """Return the report of a deadline that passed."""


def body(service: Serving, what: str, how: str, kernel: Program) -> Serve:
    """Give what does all of a kernel.

    Parameters
    ----------
    service : Serving
        Of the communicator.
    what : str
        The operation, as the ranks compare and report it.
    how : str
        The way, for the report of a deadline that passed.
    kernel : Program
        The kernel.
    """
    make = _compiled if vector_width() else _step_by_step
    return make(service, what, how, kernel)


def arrival(service: Serving, what: str) -> Serve:
    """Make what announces this rank and waits until all have come."""
    backend, board = service.backend, service.backend.board
    announce, mark = board.announce, service.reports.fingerprint(what)

    def late(sequence: int) -> None:
        service.arrive(sequence, what, service.deadline())

    def one_by_one(sequence: int) -> None:
        announce(sequence, mark)
        late(sequence)

    if len(board.ranks) < backend.size:  # those on other nodes tell by messages
        return one_by_one
    if vector_width():
        return _compiled_meeting(service, mark, late)
    return _meeting(service, mark, late)


def meeting(service: Serving) -> Callable[[int, int, str], None]:
    """Return what announces this rank to an operation, by number, mark and words, and meets all.

    One for all operations that are not bound for repetition.
    """
    backend, board = service.backend, service.backend.board
    announce, named = board.announce, [""]

    def one_by_one(sequence: int, mark: int, what: str) -> None:
        announce(sequence, mark)
        service.arrive(sequence, what, service.deadline())

    if len(board.ranks) < backend.size or not vector_width():
        return one_by_one

    def late(sequence: int) -> None:
        service.arrive(sequence, named[0], service.deadline())

    steps = Steps()
    told = steps.arrive(_board_words(service), 0, late)
    run = steps.bind()

    def meet(sequence: int, mark: int, what: str) -> None:
        told.mark, named[0] = mark, what
        run(sequence)
        service.met = sequence

    return meet


def _late(service: Serving, what: str) -> Serve:
    """Give what goes on waiting until all have come, and reports."""

    def late(sequence: int) -> None:
        service.arrive(sequence, what, service.deadline())

    return late


def _meeting(service: Serving, mark: int, late: Serve) -> Serve:
    """Make what announces this rank and waits for the others.

    Usually all are here already, or soon: so it looks before it sets up a wait that can report.
    """
    board, backend = service.backend.board, service.backend
    words, at = board.words, board.base(backend.rank)
    patience, others = backend.patience, board.others

    def all_here(sequence: int, slot: int) -> bool:
        for other in others:
            if words[other] < sequence and not spin(words, others, sequence, patience):
                return False
        _fence()
        for other in others:
            if words[other] != sequence or words[other + slot] != mark:
                return False
        return True

    def arrive(sequence: int) -> None:
        slot = PRINTS + sequence % HISTORY
        _fence()
        words[at + slot] = mark
        words[at] = sequence
        if all_here(sequence, slot):
            service.met = sequence
        else:
            late(sequence)

    return arrive


def _compiled_meeting(service: Serving, mark: int, late: Serve) -> Serve:
    steps = Steps()
    steps.arrive(_board_words(service), mark, late)
    run = steps.bind()

    def arrive(sequence: int) -> None:
        run(sequence)
        service.met = sequence

    return arrive


def _fence() -> None:
    if not STORES_KEEP_ORDER:
        fence()


def _phases(kernel: Program) -> tuple[Actions, tuple[tuple[Barrier, Actions], ...]]:
    """Take a kernel apart: what is done when all have come, and what from each barrier on."""
    rounds = [item for item in kernel.items if isinstance(item, Round)]
    barriers = [part.transfer for part in rounds[1:] if isinstance(part.transfer, Barrier)]
    assert len(kernel.items) == len(rounds) <= len(barriers) + 1, "kernels have no strands"
    first = rounds[0].after if rounds else ()
    return first, tuple((barrier, part.after) for barrier, part in zip(barriers, rounds[1:]))


def _waiting(service: Serving, what: str, how: str, barrier: Barrier) -> Serve:
    """Make what waits in a barrier, which this rank has come to."""
    lines = barrier.lines
    words, mine, everyone = lines.words, lines.mine[0], lines.others[0]
    patience, awaits = lines.patience, barrier.awaits

    def wait(sequence: int) -> None:
        others, count = everyone if awaits is None else barrier.awaited(0), words[mine]
        for other in others:
            if words[other] < count and not spin(words, others, count, patience):
                slowly(others, count, sequence)
        _fence()

    def slowly(others: tuple[int, ...], count: int, sequence: int) -> None:
        def test() -> bool:
            return spin(words, others, count, (0, 0))

        if not service.engine.wait(test, service.deadline()):
            raise service.timed_out(what, sequence, how)

    return wait


def _step_by_step(service: Serving, what: str, how: str, kernel: Program) -> Serve:
    """Make what does a kernel without any compiled code."""
    arrive, (first, phases) = arrival(service, what), _phases(kernel)
    before = kernel.before
    later = [
        (barrier.lines, _waiting(service, what, how, barrier), actions)
        for barrier, actions in phases
    ]

    def serve(sequence: int) -> None:
        for action in before:
            action()
        arrive(sequence)
        for action in first:
            action()
        for lines, wait, actions in later:
            lines.come(0)
            wait(sequence)
            for action in actions:
                action()

    return serve


def _compiled(service: Serving, what: str, how: str, kernel: Program) -> Serve:
    """Make one program of compiled code of a kernel."""
    steps, (first, phases) = Steps(), _phases(kernel)
    steps.act(kernel.before)
    steps.arrive(_board_words(service), service.reports.fingerprint(what), _late(service, what))
    steps.act(first)
    for barrier, actions in phases:
        lines, awaits = barrier.lines, barrier.awaits
        wait = _waiting(service, what, how, barrier)
        others = lines.others[0] if awaits is None else ()
        steps.meet(Words(lines.words, lines.mine[0], others, lines.patience), wait)
        if isinstance(awaits, Unless):
            steps.unless(awaits, wait)
        elif awaits not in (None, tuple):
            steps.call(wait)
        steps.act(actions)
    return steps.bind()


def _board_words(service: Serving) -> Words:
    """Return the words of the arrival board."""
    backend, board = service.backend, service.backend.board
    return Words(board.words, board.base(backend.rank), board.others, backend.patience)
