"""Functions that run a bound kernel in a repeated call: as compiled steps, or else in Python.

With compiled steps an in-place allreduce of 64 KiB in symmetric memory takes 3.7 µs instead of 6.5
on 2 ranks, and 21 instead of 30 on 4 that share 2 cores; of private arrays 12.6 instead of 16, and
36 instead of 77.

Used by ``engine/repeated.py``, and for the arrival of all other calls by ``engine/service.py``.
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
from .conditional import ConditionalAction
from .steps import Steps, WordAddresses

Serve = Callable[[int], Any]
"""Serves an operation, or a part of it; argument: the operation's sequence number."""
Actions = tuple[Callable[[], Any], ...]


class Fingerprints(Protocol):
    """The part of ``mpidist.engine.reports.Reports`` that computes fingerprints of operations."""

    def fingerprint(self, what: str, meets: bool = True) -> int:
        """Return the number that identifies an operation, described by `what`, on the board.

        `meets` is whether all ranks arrive at the operation before any of them works on it.
        """


class PendingWaiter(Protocol):
    """The part of the engine that polls pending operations while it waits."""

    def wait(self, test: Callable[[], bool], deadline: float | None) -> bool:
        """Wait until ``test()`` is true; return False if `deadline` passed first.

        `deadline` is a time of ``time.monotonic``; None waits for ever.
        """


class KernelService(Protocol):
    """The part of a communicator's service that kernels need.

    Attributes
    ----------
    backend : Backend
        Backend of the communicator.
    timeout : float or None
        Seconds until the deadline of an operation; None for no deadline.
    met : int
        Number of the last operation that all ranks are known to have reached.
    """

    backend: Backend
    timeout: float | None
    met: int

    @property
    def reports(self) -> Fingerprints:
        """The object that computes fingerprints of operations."""

    @property
    def engine(self) -> PendingWaiter:
        """The engine, which polls pending operations during a wait."""

    def deadline(self) -> float | None:
        """Return the deadline (``time.monotonic``) of a wait that begins now; None without one."""

    def arrive(self, sequence: int, what: str, deadline: float | None) -> None:
        """Wait until all ranks have reached operation `sequence`; raise at the deadline.

        Raise too if the ranks' operations differ.  `what` describes this rank's operation.
        """

    def timed_out(self, what: str, sequence: int | None, how: str) -> Exception:
        """Return the error for an operation `what` past its deadline; `how` names its algorithm.

        `sequence` is the operation's number, None if it has none.
        """


def kernel_runner(service: KernelService, what: str, how: str, kernel: Program) -> Serve:
    """Return ``run(sequence)``, which runs a whole kernel as operation number `sequence`.

    It runs the actions before the arrival, announces this rank, waits for all ranks, and runs the
    kernel's phases.

    Parameters
    ----------
    service : KernelService
        The service of the communicator.
    what : str
        The operation, as the ranks compare and report it.
    how : str
        Name of the algorithm, for the report of a deadline that passed.
    kernel : Program
        The bound kernel.
    """
    bind_kernel = _compiled_kernel if vector_width() else _python_kernel
    return bind_kernel(service, what, how, kernel)


def arrival_runner(service: KernelService, what: str) -> Serve:
    """Return ``run(sequence)``, which announces operation `what` and waits for all ranks.

    It raises at the deadline, and if the ranks' operations differ.
    """
    backend, board = service.backend, service.backend.board
    announce, fingerprint = board.announce, service.reports.fingerprint(what)

    def keep_waiting(sequence: int) -> None:
        service.arrive(sequence, what, service.deadline())

    def announce_and_wait(sequence: int) -> None:
        announce(sequence, fingerprint)
        keep_waiting(sequence)

    if len(board.ranks) < backend.size:  # ranks on other nodes announce themselves by messages
        return announce_and_wait
    if vector_width():
        return _compiled_arrival(service, fingerprint, keep_waiting)
    return _python_arrival(service, fingerprint, keep_waiting)


def unbound_arrival(service: KernelService) -> Callable[[int, int, str], None]:
    """Return ``run(sequence, fingerprint, what)``, which announces an operation and waits for all.

    Unlike the function of `arrival_runner` it is not bound to one operation: its arguments are the
    operation's number, fingerprint and description.
    """
    backend, board = service.backend, service.backend.board
    announce, current = board.announce, [""]

    def announce_and_wait(sequence: int, fingerprint: int, what: str) -> None:
        announce(sequence, fingerprint)
        service.arrive(sequence, what, service.deadline())

    if len(board.ranks) < backend.size or not vector_width():
        return announce_and_wait

    def keep_waiting(sequence: int) -> None:
        service.arrive(sequence, current[0], service.deadline())

    steps = Steps()
    arrival_step = steps.arrive(_board_words(service), 0, keep_waiting)
    run = steps.bind()

    def meet(sequence: int, fingerprint: int, what: str) -> None:
        arrival_step.mark, current[0] = fingerprint, what
        run(sequence)
        service.met = sequence

    return meet


def _keep_waiting(service: KernelService, what: str) -> Serve:
    """Return ``wait(sequence)``, which waits for all ranks and raises at the deadline.

    It is called where a first brief wait was not enough.
    """

    def keep_waiting(sequence: int) -> None:
        service.arrive(sequence, what, service.deadline())

    return keep_waiting


def _python_arrival(service: KernelService, fingerprint: int, keep_waiting: Serve) -> Serve:
    """Return ``arrive(sequence)``, which announces this rank and waits for all ranks, in Python.

    It is used without compiled code.  Usually all ranks have arrived or soon will: so it spins
    first, and only then calls `keep_waiting`, which raises at the deadline.
    """
    board, backend = service.backend.board, service.backend
    words, announce = board.words, board.announce
    patience, others = backend.patience, board.others

    def all_here(sequence: int, slot: int) -> bool:
        for other in others:
            if words[other] < sequence and not spin(words, others, sequence, patience):
                return False
        _fence()
        for other in others:
            if words[other] != sequence or words[other + slot] != fingerprint:
                return False
        return True

    def arrive(sequence: int) -> None:
        announce(sequence, fingerprint)
        if all_here(sequence, PRINTS + sequence % HISTORY):
            service.met = sequence
        else:
            keep_waiting(sequence)

    return arrive


def _compiled_arrival(service: KernelService, fingerprint: int, keep_waiting: Serve) -> Serve:
    steps = Steps()
    steps.arrive(_board_words(service), fingerprint, keep_waiting)
    run = steps.bind()

    def arrive(sequence: int) -> None:
        run(sequence)
        service.met = sequence

    return arrive


def _fence() -> None:
    if not STORES_KEEP_ORDER:
        fence()


def _split_phases(kernel: Program) -> tuple[Actions, tuple[tuple[Barrier, Actions], ...]]:
    """Split a kernel into the actions after the arrival of all ranks, and those after each barrier.

    Returns
    -------
    tuple of callable
        Actions of the first phase.
    tuple of (Barrier, tuple of callable)
        For each further phase, the barrier before it and its actions.
    """
    rounds = [item for item in kernel.items if isinstance(item, Round)]
    barriers = [part.transfer for part in rounds[1:] if isinstance(part.transfer, Barrier)]
    assert len(kernel.items) == len(rounds) <= len(barriers) + 1, "a kernel has no strands"
    first = rounds[0].after if rounds else ()
    return first, tuple((barrier, part.after) for barrier, part in zip(barriers, rounds[1:]))


def _barrier_wait(service: KernelService, what: str, how: str, barrier: Barrier) -> Serve:
    """Return ``wait(sequence)``, which waits in a barrier that this rank has already reached.

    It raises at the deadline; the error names the operation `what` and its algorithm `how`.
    """
    lines = barrier.lines
    words, mine, all_others = lines.words, lines.mine[0], lines.others[0]
    patience, awaits = lines.patience, barrier.awaits

    def wait(sequence: int) -> None:
        others, count = all_others if awaits is None else barrier.awaited_words(0), words[mine]
        for other in others:
            if words[other] < count and not spin(words, others, count, patience):
                wait_longer(others, count, sequence)
        _fence()

    def wait_longer(others: tuple[int, ...], count: int, sequence: int) -> None:
        def test() -> bool:
            return spin(words, others, count, (0, 0))

        if not service.engine.wait(test, service.deadline()):
            raise service.timed_out(what, sequence, how)

    return wait


def _python_kernel(service: KernelService, what: str, how: str, kernel: Program) -> Serve:
    """Return ``run(sequence)`` of :func:`kernel_runner`, in Python without compiled code."""
    arrive, (first, phases) = arrival_runner(service, what), _split_phases(kernel)
    before = kernel.before
    later = [
        (barrier.lines, _barrier_wait(service, what, how, barrier), actions)
        for barrier, actions in phases
    ]

    def serve(sequence: int) -> None:
        for action in before:
            action()
        arrive(sequence)
        for action in first:
            action()
        for lines, wait, actions in later:
            lines.arrive(0)
            wait(sequence)
            for action in actions:
                action()

    return serve


def _compiled_kernel(service: KernelService, what: str, how: str, kernel: Program) -> Serve:
    """Return ``run(sequence)`` of :func:`kernel_runner`, as steps of compiled code."""
    steps, (first, phases) = Steps(), _split_phases(kernel)
    steps.act(kernel.before)
    steps.arrive(
        _board_words(service), service.reports.fingerprint(what), _keep_waiting(service, what)
    )
    steps.act(first)
    for barrier, actions in phases:
        lines, awaits = barrier.lines, barrier.awaits
        wait = _barrier_wait(service, what, how, barrier)
        others = lines.others[0] if awaits is None else ()
        steps.meet(WordAddresses(lines.words, lines.mine[0], others, lines.patience), wait)
        if isinstance(awaits, ConditionalAction):
            steps.conditional(awaits, wait)
        elif awaits not in (None, tuple):
            steps.call(wait)
        steps.act(actions)
    return steps.bind()


def _board_words(service: KernelService) -> WordAddresses:
    """Return the WordAddresses of the arrival board: of the ranks' sequence numbers."""
    backend, board = service.backend, service.backend.board
    return WordAddresses(board.words, board.base(backend.rank), board.others, backend.patience)
