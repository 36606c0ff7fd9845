"""What the first steps of a training teach: the order of gradients, and the best way to overlap."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from .grouping import Grouping
from .overlap import Trial

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

    def __init__(self, grouping: Grouping, comm: Any, names: Sequence[str], listens: bool):
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
