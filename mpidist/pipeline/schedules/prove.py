"""``prove``: a pipeline schedule is complete, cannot deadlock, and keeps its messages bounded."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from .actions import Placement
from .messages import Message, Step, derive
from .schedule import PipelineSchedule, as_schedule
from .walk import check, peak_live, walk


@dataclass(frozen=True)
class PipelineProof:
    """What was shown of a pipeline schedule, whatever the actions and messages take.

    Attributes
    ----------
    name : str
        The schedule.
    size, microbatches, chunks : int
        Ranks; microbatches; virtual stages on every rank.
    actions : int
        Actions of all ranks together.
    messages : int
        Messages between ranks; what a rank hands to itself is not counted.
    outstanding : tuple of int
        For each rank, how many messages to it can be sent and not yet used at a time.
    outstanding_edge : int
        The same for the fullest edge: one direction between two virtual stages.
    peak : tuple of int
        Activations, one for each chunk and microbatch, that are alive at most on each rank.
    splits : bool
        Some backwards are split into I and W.
    """

    name: str
    size: int
    microbatches: int
    chunks: int
    actions: int
    messages: int
    outstanding: tuple[int, ...]
    outstanding_edge: int
    peak: tuple[int, ...]
    splits: bool


class Outstanding:
    """Bounds on the messages that are sent and not yet used, from who must wait for whom.

    A message may already be sent when its target begins step i unless its sender had to wait for
    step i or a later one.  So of each message it keeps the first step of the target that it cannot
    follow, and the step that uses it: a vector clock gives the one, the order of steps the other.

    Parameters
    ----------
    ranks : int
        Number of ranks.
    """

    def __init__(self, ranks: int):
        self._clock = [[0] * ranks for _ in range(ranks)]
        self._sent: dict[Message, list[int]] = {}
        self._lives: dict[tuple[int, int, int, str], list[tuple[int, int]]] = {}

    @property
    def messages(self) -> int:
        """Messages between ranks."""
        return sum(map(len, self._lives.values()))

    def see(self, rank: int, index: int, step: Step) -> None:
        """Note a step; steps come in an order in which they can run."""
        clock = self._clock[rank]
        message = step.receive
        if message is not None and not message.local:
            known = self._sent.pop(message)
            life = known[rank], index
            self._lives.setdefault(message.edge, []).append(life)
            clock = self._clock[rank] = list(map(max, clock, known))
        clock[rank] = index + 1
        for message in step.sends:
            if not message.local:
                self._sent[message] = list(clock)

    def into(self, rank: int) -> int:
        """Give how many messages to `rank` can be outstanding at a time."""
        edges = (lives for edge, lives in self._lives.items() if edge[1] == rank)
        return _most([life for lives in edges for life in lives])

    def fullest_edge(self) -> int:
        """Give how many messages of one edge can be outstanding at a time, on the fullest."""
        return max(map(_most, self._lives.values()), default=0)


def _most(lives: Iterable[tuple[int, int]]) -> int:
    """Give how many lives, first to last step with both ends counted, share a step at most."""
    lives = list(lives)
    begins = sorted(first for first, _ in lives)
    most = 0
    for used, (_, last) in enumerate(sorted(lives, key=lambda life: life[1])):
        begun = bisect_left(begins, last + 1)
        most = max(most, begun - used)
    return most


def prove(
    schedule: str | PipelineSchedule | Callable,
    size: int,
    microbatches: int,
    chunks: int | None = None,
) -> PipelineProof:
    """Prove a pipeline schedule for one number of ranks, microbatches and chunks.

    It shows that every microbatch goes forward and backward once through every virtual stage, each
    F before its B (each I before its W); that the messages of an edge are taken in the order in
    which they are sent; and that no rank waits for ever, with receives posted and sends that block
    nobody.

    Parameters
    ----------
    schedule : str, PipelineSchedule or callable
        A name, a schedule, or a generator function of your own.
    size, microbatches : int
        Ranks and microbatches, each ≥ 1.
    chunks : int, optional
        Virtual stages on every rank; by default what the schedule declares.

    Returns
    -------
    PipelineProof
        Counts, and bounds on messages and live activations that hold whatever anything takes.

    Raises
    ------
    ScheduleError
        The counter-example: rank, virtual stage, step and reason.
    Unsupported
        If the schedule does not serve these numbers.
    """
    known = as_schedule(schedule)
    parts = derive(known, size, microbatches, chunks)
    return prove_parts(known.name, parts, known.place(size, chunks), microbatches)


def prove_parts(
    name: str, parts: Sequence[Sequence[Step]], placement: Placement, microbatches: int
) -> PipelineProof:
    """Prove steps that are already derived; see :func:`prove`."""
    check(parts, placement, microbatches)
    outstanding = Outstanding(placement.ranks)
    for rank, index, step in walk(parts, placement):
        outstanding.see(rank, index, step)
    return PipelineProof(
        name,
        placement.ranks,
        microbatches,
        placement.chunks,
        sum(map(len, parts)),
        outstanding.messages,
        tuple(outstanding.into(rank) for rank in range(placement.ranks)),
        outstanding.fullest_edge(),
        tuple(peak_live(step.action for step in part) for part in parts),
        any(step.action.kind == "I" for part in parts for step in part),
    )
