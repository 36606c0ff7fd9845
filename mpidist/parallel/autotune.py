"""The first steps of a DDP: observes the order of gradients, and times the transports."""

from __future__ import annotations

import statistics
from collections.abc import Sequence

import numpy as np

from ..arguments import one_of
from ..communicator.communicator import Communicator
from ..errors import Unsupported
from .bucketing import Grouping
from .transport import TRANSPORTS

ROUNDS = 5  # the first one is a warm-up
GAIN = 0.95  # overlap is kept if a step takes less than this fraction of the time without it
WINS = 0.75  # and is faster in at least this fraction of the rounds


class Trial:
    """Times training steps with several transports of the buckets in turn.

    The first name is that of the transport without overlap.
    """

    def __init__(self, names: Sequence[str]):
        self._names = list(names)
        self._seconds: list[float] = []

    @property
    def current(self) -> str:
        """Name of the transport to use in the next step."""
        return self._names[len(self._seconds) % len(self._names)]

    @property
    def over(self) -> bool:
        """Whether enough steps were timed."""
        return len(self._seconds) >= ROUNDS * len(self._names)

    def note(self, seconds: float) -> None:
        """Record the seconds of a step with the current transport, and go on to the next one."""
        self._seconds.append(seconds)

    def decide(self, comm: Communicator) -> tuple[str, dict[str, float]]:
        """Return the name of the best transport, and the seconds of a step with each; collective.

        That is the fastest one if it is clearly faster than the first, otherwise the first.  The
        seconds are medians over the steps, of which each counts as long as on its slowest rank.
        """
        # In turn, and round by round: what slows the machine for a while slows all of them.
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
    """Return the names of the transports that the first steps are to time.

    It is one name unless `overlap` is "auto" and there are several ranks, and several buckets on
    the host: with one bucket nothing overlaps, and the host's clock cannot time transports of
    gradients on a GPU.  InvalidArgument for an unknown name; Unsupported for "thread" where MPI
    allows no calls from several threads, or gradients are on a GPU.
    """
    one_of("overlap", overlap, ("auto", *TRANSPORTS), f"rank {comm.rank}: ")
    threads = comm.backend.threads
    if overlap == "thread" and not threads:
        raise Unsupported(
            f"rank {comm.rank}: overlap='thread': MPI was not started with thread level "
            "'multiple': expected 'auto', 'none' or 'polls'"
        )
    if on_device and overlap == "thread":
        raise Unsupported(
            f"rank {comm.rank}: overlap='thread': the gradients are on a GPU, whose streams belong "
            "to the calling thread: expected 'auto', 'none' or 'polls'"
        )
    if overlap != "auto":
        return [overlap]
    if on_device:
        return ["polls" if comm.size > 1 and comm.gpu.uses_nccl else "none"]
    if buckets < 2 or comm.size == 1:  # the last bucket is complete only at the end of backward
        return ["none"]
    return [name for name in TRANSPORTS if name != "thread" or threads]


OBSERVED_SYNCS = 3  # syncs without any callback after which no order of gradients is expected


class Autotune:
    """Finds the order of gradients and the fastest transport of a DDP, in its first steps.

    First it observes the order in which gradients are made, and regroups the buckets by it.  Then
    it times the transports with these buckets, and keeps the fastest::

        steps       1         2 … 11 or 16                     then, for one that won
        buckets     guessed   in the observed order
        transport   names[0]  "none", "polls", "thread" in turn  "none" and it in turn, once more
    """

    def __init__(self, grouping: Grouping, comm: Communicator, names: Sequence[str]):
        self._grouping, self._comm, self._names = grouping, comm, list(names)
        listens = any(gradient.reports for gradient in grouping.gradients)
        self._left = OBSERVED_SYNCS if listens and comm.size > 1 else 0
        self._trial: Trial | None = None
        self._won = False  # whether a transport was faster than "none" in one trial
        # Seconds of a step by transport, from its last trial; empty until one has ended.
        self.times: dict[str, float] = {}

    @property
    def over(self) -> bool:
        """Whether buckets and transport are final."""
        return not self._left and self._trial is None

    @property
    def observed(self) -> bool:
        """Whether observing the order of gradients has ended, with or without a result."""
        return not self._left

    def after_step(self, seconds: float) -> str | None:
        """Record a step's seconds; return the name of the next step's transport; collective.

        None means the same transport as before.
        """
        if self._left:
            self._observe()
            return None
        if self._trial is None:
            return None
        self._trial.note(seconds)
        if not self._trial.over:
            return self._trial.current
        best, times = self._trial.decide(self._comm)
        self.times.update(times)
        without = self._names[0]
        # Of several equal ones the luckiest seems to be faster: it must win a second trial.
        self._trial = None if best == without or self._won else Trial([without, best])
        self._won = True
        return best if self._trial is None else self._trial.current

    def _observe(self) -> None:
        """Make buckets by the order of gradients that rank 0 has seen, unless fixed; collective.

        Do nothing if rank 0 has seen no gradient yet.  Otherwise also set how many additions each
        gradient gets in a step, so that complete buckets are detected, and begin to time the
        transports.
        """
        self._left -= 1
        grouping = self._grouping
        seen = sorted((g for g in grouping.gradients if g.count), key=lambda g: g.order)
        order = self._comm.broadcast_object([gradient.index for gradient in seen])
        if not order:
            return
        self._left = 0
        if not grouping.fixed:
            rest = set(range(len(grouping.named))).difference(order)
            grouping.make(self._comm, grouping.plan([*order, *sorted(rest, reverse=True)]))
        if self._names == ["none"]:
            return
        # From here on a bucket is known to be complete, and can be sent during backward.
        for gradient in grouping.gradients:
            gradient.expected = max(1, gradient.count)
        if len(self._names) > 1 and len(grouping.buckets) > 1:
            self._trial = Trial(self._names)
