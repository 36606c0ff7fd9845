"""``prove``: a pipeline schedule is complete, cannot deadlock, and has bounded memory."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from ...schedule.notebook import html_fields
from .actions import Placement
from .messages import Message, Step, derived
from .schedule import PipelineSchedule
from .walk import check, peak_live, walk


@dataclass(frozen=True)
class PipelineProof:
    """Proved facts about a pipeline schedule, true for all durations of actions and messages.

    Attributes
    ----------
    name : str
        Name of the schedule.
    size, microbatches, chunks : int
        Numbers of ranks, of microbatches, and of virtual stages on every rank.
    actions : int
        Number of actions of all ranks together.
    messages : int
        Number of messages between ranks; those that stay on a rank are not counted.
    outstanding : tuple of int
        For each rank, the largest number of messages to it that are sent and not yet used.
    outstanding_edge : int
        The largest number of messages from one virtual stage to the next, or back, that are sent
        and not yet used.
    peak : tuple of int
        Largest number of live activations (of a chunk for a microbatch) on each rank.
    splits : bool
        Whether a backward is split into I and W.
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

    def _repr_html_(self) -> str:
        return html_fields(self)


class Outstanding:
    """Upper bounds on the number of messages that are sent and not yet used.

    A message may be on its way when its target rank begins step i, unless the sender had to wait
    for the end of step i or a later one.  So each message has a life in steps of its target: from
    the first step that need not end before the sending (by a vector clock) to the step that uses
    it::

        target  step   0    1    2    3    4
        message             |---------|         sent after step 0 at the earliest, used by step 3
        message                  |---------|    both may be outstanding at steps 2 and 3
    """

    def __init__(self, ranks: int):
        # clock[r][q]: how many steps of rank q have ended for sure, as far as rank r can know.
        self._clock = [[0] * ranks for _ in range(ranks)]
        self._sent: dict[Message, list[int]] = {}
        self._lives: dict[tuple[int, int, int, str], list[tuple[int, int]]] = {}

    @property
    def messages(self) -> int:
        """Number of messages between ranks, in the steps seen so far."""
        return sum(map(len, self._lives.values()))

    def see(self, rank: int, index: int, step: Step) -> None:
        """Count the messages of a step, which is number `index` of `rank`.

        To be called for all steps of all ranks, in an order in which they can run.
        """
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
        """Return the largest number of outstanding messages to `rank`."""
        edges = (lives for edge, lives in self._lives.items() if edge[1] == rank)
        return _most([life for lives in edges for life in lives])

    def fullest_edge(self) -> int:
        """Return the largest number of outstanding messages of one edge (:attr:`Message.edge`)."""
        return max(map(_most, self._lives.values()), default=0)


def _most(lives: Iterable[tuple[int, int]]) -> int:
    """Return the largest number of `lives` that share a step; each is (first step, last step)."""
    # The number is largest just before a message is used: there, all that have begun by then are
    # alive but those used earlier.  Sorted, both are counted in O(n log n).
    lives = list(lives)
    begins = sorted(first for first, _ in lives)
    most = 0
    for used, (_, last) in enumerate(sorted(lives, key=lambda life: life[1])):
        sent = bisect_left(begins, last + 1)
        most = max(most, sent - used)
    return most


def prove(
    schedule: str | PipelineSchedule | Callable,
    size: int,
    microbatches: int,
    chunks: int | None = None,
) -> PipelineProof:
    """Prove a pipeline schedule for one number of ranks, microbatches and chunks.

    What is proved: every microbatch passes forward and backward once through every virtual stage,
    each F before its B, or its I, and that before its W; messages from one stage to another are
    used in the order in which they are sent; and no rank waits forever, if receives are posted and
    sends do not block.  The parameters are those of :func:`~mpidist.pipeline.derive`.

    Returns
    -------
    PipelineProof
        Counts, and bounds on messages and live activations that hold for any times.

    Raises
    ------
    ScheduleError
        The counter-example: rank, virtual stage, step and reason.
    Unsupported
        If the schedule does not serve these numbers.
    """
    it = derived(schedule, size, microbatches, chunks)
    return prove_parts(it.name, it.parts, it.placement, microbatches)


def prove_parts(
    name: str, parts: Sequence[Sequence[Step]], placement: Placement, microbatches: int
) -> PipelineProof:
    """Return the proof of a schedule from the derived steps of each rank; see :func:`prove`."""
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
