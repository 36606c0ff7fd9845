"""The first steps of a DDP: the order of gradients is observed, and transports are timed."""

from __future__ import annotations

import statistics
from collections.abc import Sequence

import numpy as np

from ..communicator.communicator import Communicator
from ..errors import InvalidArgument, Unsupported
from .bucketing import Grouping
from .transport import WAYS

ROUNDS = 5  # the first one warms up
GAIN = 0.95  # an overlap must bring a step below this share of the time without
WINS = 0.75  # and be the faster one in this share of the rounds


class Trial:
    """Steps of a training, each in one of several ways, in turn.

    Parameters
    ----------
    names : sequence of str
        The ways; the first is the one without overlap.

    Attributes
    ----------
    current : str
        The way of the next step.
    over : bool
        Whether enough steps were measured.
    """

    def __init__(self, names: Sequence[str]):
        self._names = list(names)
        self._seconds: list[float] = []

    @property
    def current(self) -> str:
        """The way of the next step."""
        return self._names[len(self._seconds) % len(self._names)]

    @property
    def over(self) -> bool:
        """Whether enough steps were measured."""
        return len(self._seconds) >= ROUNDS * len(self._names)

    def note(self, seconds: float) -> None:
        """Take down what the step took."""
        self._seconds.append(seconds)

    def decide(self, comm: Communicator) -> tuple[str, dict[str, float]]:
        """Give the best way and the time of each, equal on all ranks; collective.

        A step takes as long as on its slowest rank; a time is the median over the steps.
        """
        mine = np.array(self._seconds).reshape(ROUNDS, len(self._names))[1:]
        rounds = comm.allreduce(mine, op="max")
        medians = [statistics.median(column) for column in rounds.T.tolist()]
        best = int(np.argmin(medians))
        wins = float((rounds[:, best] < rounds[:, 0]).mean())
        gains = medians[best] < GAIN * medians[0] and wins >= WINS
        times = dict(zip(self._names, medians, strict=True))
        return self._names[best if gains else 0], times


def candidates(
    comm: Communicator, overlap: str, buckets: int, on_device: bool = False
) -> list[str]:
    """Give the ways that `overlap` leaves to be tried; the only one if it names one.

    With gradients on a GPU nothing is tried, for the host's clock does not see when they come.

    Raises
    ------
    InvalidArgument
        If there is no such way.
    Unsupported
        If a thread is asked for and MPI does not allow calls from several.
    """
    if overlap not in ("auto", *WAYS):
        allowed = ", ".join(map(repr, ("auto", *WAYS)))
        raise InvalidArgument(f"rank {comm.rank}: overlap={overlap!r}: allowed are {allowed}")
    threads = comm.backend.threads
    if overlap == "thread" and not threads:
        raise Unsupported(
            f"rank {comm.rank}: overlap='thread': MPI was not started with thread level 'multiple'"
        )
    if on_device and overlap == "thread":
        raise Unsupported(
            f"rank {comm.rank}: overlap='thread': the gradients are on a GPU, in the order of this "
            "thread's streams: allowed are 'auto', 'none' and 'polls'"
        )
    if overlap != "auto":
        return [overlap]
    if on_device:
        return ["polls" if comm.size > 1 and comm.gpu.uses_nccl else "none"]
    if buckets < 2 or comm.size == 1:  # the last bucket is complete when backward is over
        return ["none"]
    return [name for name in WAYS if name != "thread" or threads]


OBSERVED_SYNCS = 3  # for so long gradients may begin to announce themselves


class FirstSteps:
    """Watches the first steps, then leaves the buckets as they are best.

    Parameters
    ----------
    grouping : Grouping
        The buckets.
    comm : Communicator
        That of the buckets.
    names : sequence of str
        The ways of overlapping that come into question; the first is used at first.
    listens : bool
        Whether gradients announce themselves, if only on one rank of all.

    Attributes
    ----------
    times : dict of str to float
        Seconds that a step took in each way, in its last trial; empty before that is known.
    """

    def __init__(self, grouping: Grouping, comm: Communicator, names: Sequence[str], listens: bool):
        self._grouping, self._comm, self._names = grouping, comm, list(names)
        self._order: dict[int, None] = {}
        self._left = OBSERVED_SYNCS if listens and comm.size > 1 else 0
        self._trial: Trial | None = None
        self._won = False  # whether a way has been faster than none in one trial
        self.times: dict[str, float] = {}

    @property
    def over(self) -> bool:
        """Whether nothing will change any more."""
        return not self._left and self._trial is None

    @property
    def observed(self) -> bool:
        """Whether the order of gradients is known, or will never be."""
        return not self._left

    def ready(self, index: int) -> None:
        """Note that something was added to the gradient of parameter `index`."""
        if self._left:
            self._order.setdefault(index)

    def after(self, seconds: float, fixed: bool) -> str | None:
        """After a step that took so long: give the way of the next one, if it changes; collective.

        With `fixed`, parameters stay in their buckets.
        """
        if self._left:
            self._observe(fixed)
            return None
        if self._trial is None:
            return None
        self._trial.note(seconds)
        if not self._trial.over:
            return self._trial.current
        best, times = self._trial.decide(self._comm)
        self.times.update(times)
        without = self._names[0]
        # Of several that are equal the luckiest seems to be faster: it must win once more.
        self._trial = None if best == without or self._won else Trial([without, best])
        self._won = True
        return best if self._trial is None else self._trial.current

    def _observe(self, fixed: bool) -> None:
        """Take the order of rank 0's first step; then buckets know when they are complete."""
        self._left -= 1
        order = self._comm.broadcast_object(list(self._order))
        if not order:
            return
        self._left = 0
        grouping = self._grouping
        counts = {i: max(1, grouping.buckets[b].seen[k]) for i, (b, k) in grouping.where.items()}
        if not fixed:
            rest = set(range(len(grouping.named))).difference(order)
            grouping.make(self._comm, grouping.plan([*order, *sorted(rest, reverse=True)]))
        if self._names == ["none"]:
            return
        for bucket, chosen in zip(grouping.buckets, grouping.layout, strict=True):
            bucket.expect([counts[i] for i in chosen])
        if len(self._names) > 1 and len(grouping.buckets) > 1:
            self._trial = Trial(self._names)
