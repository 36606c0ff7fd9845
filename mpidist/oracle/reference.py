"""The reference of a check: one process with the samples of all ranks."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import wraps
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from typing import Any

import numpy as np

from .. import data
from ..errors import Unsupported
from ..frameworks.base import Framework, framework_of
from ..parallel import DDP
from ..topology import Grid
from .plan import Plan
from .taps import Taps

# What `md.shard` gives to the reference depends on who makes the batches.
#
#   a loader makes them     joined: one process has batches of N times the size, with the samples
#                           that the ranks' batches have together
#   the script makes them,  copies: N processes take themselves for the only one, each has the
#   of single samples       samples of a rank, and this file averages their gradients
#
#   microbatches=M          as it is: one process has all M of a step by itself


def install(taps: Taps, link: Link | None = None) -> None:
    """Note how the script divides its data; in a reference, have it divided as the plan says.

    `link` connects the copies, if there are several.
    """
    plan = taps.plan
    _note_data(taps)
    if plan.role == "ranks":
        return
    data.Order = _order(plan, taps.rank)  # type: ignore
    _one_place(Grid)
    if plan.copies:
        _divide_streams(plan, taps.rank)
        assert link is not None
        _average(taps, link.mean)


def _note_data(taps: Taps) -> None:
    """Record among how many ranks `md.shard` divides, and whether it gives single samples."""
    order = data.Order.__init__

    @wraps(order)
    def ordered(self: Any, *arguments: Any, **options: Any) -> None:
        order(self, *arguments, **options)
        taps.writer.facts(shards=self.size)
        if self.block:  # of other data, as for an evaluation, there may be more
            taps.writer.facts(dealt=True)

    data.Order.__init__ = ordered  # type: ignore
    for kind in (data.Samples, data.Stream):
        make = kind.__init__

        def made(self: Any, *arguments: Any, make: Any = make) -> None:
            make(self, *arguments)
            if not (isinstance(self, data.Samples) and self.order.block):
                taps.writer.facts(items=True)

        kind.__init__ = made  # type: ignore


def _order(plan: Plan, rank: int) -> type[data.Order]:
    """Return the class of the order of samples in a reference."""

    class Order(data.Order):
        def __init__(self, *arguments: Any, **options: Any):
            super().__init__(*arguments, **options)
            if plan.copies:
                self.rank, self.size = rank, plan.ranks

        def _samples(self) -> np.ndarray:
            """Return the samples left in the epoch, as many as N ranks would take."""
            size, self.size = self.size, plan.shares
            try:
                return super()._samples()
            finally:
                self.size = size

    return Order


def _one_place(grid: type[Grid]) -> None:
    """Let one process be a whole grid."""
    make = grid.__init__

    @wraps(make)
    def made(self: Any, comm: Any, **_: Any) -> None:
        make(self, comm, data=1, pipe=1)

    grid.__init__ = made  # type: ignore


def _divide_streams(plan: Plan, rank: int) -> None:
    make = data.Stream.__init__

    @wraps(make)
    def made(self: Any, *arguments: Any) -> None:
        make(self, *arguments)
        self._rank, self._size = rank, plan.ranks

    data.Stream.__init__ = made  # type: ignore


class Link:
    """The connections of a copy of a reference to the others, over which they average."""

    def __init__(self, ends: list[Connection], first: bool):
        self._ends, self._first = ends, first

    def close(self) -> None:
        """Close the connections of this process."""
        for end in self._ends:
            end.close()

    def mean(self, values: np.ndarray) -> np.ndarray:
        """Return the mean of a flat float64 array over the copies, added in their order."""
        if self._first:
            total = values.copy()
            for end in self._ends:
                total += np.frombuffer(end.recv_bytes())
            total /= len(self._ends) + 1
            for end in self._ends:
                end.send_bytes(total.tobytes())
            return total
        (end,) = self._ends
        end.send_bytes(values.tobytes())
        return np.frombuffer(end.recv_bytes())


def connect(count: int) -> list[Link]:
    """Return the links of `count` copies."""
    pairs = [Pipe() for _ in range(count - 1)]
    return [Link([one for one, _ in pairs], True), *(Link([other], False) for _, other in pairs)]


def _average(taps: Taps, mean: Callable[[np.ndarray], np.ndarray]) -> None:
    """Average gradients over the copies when a DDP would, and before each optimizer's step.

    So a training that never averages them differs from the reference.
    """
    after = DDP._after_sync

    @wraps(after)
    def averaged(model: DDP, used: np.ndarray) -> None:
        average([p for _, p in model.reducer.grouping.named])
        after(model, used)

    def average(parameters: Sequence[Any]) -> None:
        if not parameters:
            return
        framework = framework_of(parameters[0])
        if any(getattr(p.grad, "is_sparse", False) for p in parameters):
            raise Unsupported("mpidist check: sparse gradients with data that the script batches")
        here = np.array([p.grad is not None for p in parameters], float)
        flat = [_values(framework, p) for p in parameters]
        means = mean(np.concatenate([here, *flat]))
        start = len(parameters)
        for p, values, share in zip(parameters, flat, means[: len(parameters)], strict=True):
            part = means[start : start + values.size].reshape(tuple(p.data.shape))
            start += values.size
            if share and p.grad is None:
                p.grad = framework.from_array(part.astype(framework.values(p).dtype))
            elif share:
                framework.copy(p.grad, framework.from_array(np.ascontiguousarray(part)))

    DDP._after_sync = averaged  # type: ignore
    taps.average = average


def _values(framework: Framework, p: Any) -> np.ndarray:
    """Return the gradient of a parameter as flat float64, zeros if it has none."""
    if p.grad is None:
        return np.zeros(int(np.prod(p.data.shape)))
    return np.array(framework.as_array(p.grad), np.float64).reshape(-1)
