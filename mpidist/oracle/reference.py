"""The reference of a check: one process with the samples of all ranks."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any

import numpy as np

from .. import data
from ..communicator import launch
from ..errors import Unsupported
from ..frameworks.base import Framework
from ..parallel import DDP
from .plan import Plan
from .taps import Taps

# What `md.shard` gives to the reference depends on who makes the batches.
#
#   a loader makes them     joined: one process has batches of N times the size, with the samples
#                           that the ranks' batches have together
#   the script makes them,  copies: N processes take themselves for the only one, each has the
#   of single samples       samples of a rank, and this file averages their gradients


def install(taps: Taps) -> None:
    """Note how the script divides its data; in a reference, have it divided as the plan says."""
    plan = taps.plan
    _note_data(taps)
    if plan.role == "ranks":
        return
    data.Order = _order(plan, taps.rank)  # type: ignore
    if plan.copies:
        _divide_streams(plan, taps.rank)
        average = _alone()
        _average(average)


def _note_data(taps: Taps) -> None:
    """Record whether `md.shard` gives single samples to the script."""
    for kind in (data.Samples, data.Stream):
        make = kind.__init__

        def made(self: Any, *arguments: Any, make: Any = make) -> None:
            taps.writer.facts(items=True)
            make(self, *arguments)

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
            size, self.size = self.size, plan.ranks
            try:
                return super()._samples()
            finally:
                self.size = size

    return Order


def _divide_streams(plan: Plan, rank: int) -> None:
    make = data.Stream.__init__

    @wraps(make)
    def made(self: Any, *arguments: Any) -> None:
        make(self, *arguments)
        self._rank, self._size = rank, plan.ranks

    data.Stream.__init__ = made  # type: ignore


def _alone() -> Callable[[np.ndarray], np.ndarray]:
    """Have ``md.init()`` return a communicator of this process only.

    Return a function that averages an array over the processes of the job.
    """
    mpi = launch.start_mpi("multiple")
    world = mpi.COMM_WORLD.Dup()
    init = launch.init

    @wraps(init)
    def alone(*arguments: Any, **options: Any) -> Any:
        if launch.started() is None:
            options.pop("comm", None)
            launch._default = init(*arguments, comm=mpi.COMM_SELF, **options)
            return launch._default
        return init(*arguments, **options)

    launch.init = alone

    def mean(values: np.ndarray) -> np.ndarray:
        # In the order of the ranks: the same bits in every run.
        total = np.zeros_like(values)
        for part in world.allgather(values):
            total += part
        return total / world.Get_size()

    return mean


def _average(mean: Callable[[np.ndarray], np.ndarray]) -> None:
    """Average gradients over the copies wherever a DDP averages them over the ranks."""
    after = DDP._after_sync

    @wraps(after)
    def averaged(model: DDP, used: np.ndarray) -> None:
        framework = model.framework
        named = model.reducer.grouping.named
        if framework.sparse(model.module):
            raise Unsupported("mpidist check: sparse gradients with data that the script batches")
        here = np.array([p.grad is not None for _, p in named], float)
        flat = [_values(framework, p) for _, p in named]
        means = mean(np.concatenate([here, *flat]))
        some, rest = means[: len(named)], means[len(named) :]
        start = 0
        for (_, p), values, share in zip(named, flat, some, strict=True):
            part = rest[start : start + values.size].reshape(tuple(p.data.shape))
            start += values.size
            if share and p.grad is None:
                p.grad = framework.from_array(part.astype(framework.values(p).dtype))
            elif share:
                framework.copy(p.grad, framework.from_array(np.ascontiguousarray(part)))
        after(model, used)

    DDP._after_sync = averaged  # type: ignore


def _values(framework: Framework, p: Any) -> np.ndarray:
    """Return the gradient of a parameter as flat float64, zeros if it has none."""
    if p.grad is None:
        return np.zeros(int(np.prod(p.data.shape)))
    return np.array(framework.as_array(p.grad), np.float64).reshape(-1)
