"""``mpidist bench pipeline``: what a pipeline costs besides computing."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from time import perf_counter
from typing import Any

import numpy as np

from ..nn import Identity
from ..parallel import Pipeline
from ..pipeline import as_schedule

MICROBATCHES = 8
WARM_STEPS = 50
SCHEDULES = ("gpipe", "1f1b", "zb-h1")
THEIRS = "torch pipelining, gloo"
ENGINE_GOAL = 60e-6
"""Seconds of a microbatch and stage, on 2 ranks, that are not to be exceeded."""
SHARE_GOAL = 0.9
"""Share of the time of a step by PyTorch's own pipelining: not to be exceeded either."""


@dataclass(frozen=True)
class EngineCost:
    """What the pipeline's engine takes.

    Attributes
    ----------
    schedule : str
        With which schedule.
    microbatches : int
        In a step.
    seconds : float
        Of a step of identity stages on the slowest rank, the median, by the number of microbatches:
        every rank has one stage, so this is the cost of a microbatch and stage, waiting included.
    """

    schedule: str
    microbatches: int
    seconds: float

    def as_json(self) -> dict[str, Any]:
        """Give it as a dict."""
        return asdict(self)


def no_loss(output: Any, target: Any) -> tuple[float, Any]:
    """Give a loss and its gradient without computing anything."""
    return 0.0, output


def engine_cost(comm: Any, steps: int, microbatches: int = MICROBATCHES) -> list[EngineCost]:
    """Measure steps of identity stages, 16 numbers a microbatch."""
    found = []
    for name in SCHEDULES:
        if as_schedule(name).unsupported(comm.size, microbatches) is not None:
            continue
        pipe = Pipeline(Identity(), comm, microbatches, name)
        x = np.ones((microbatches, 16))
        times = np.empty(WARM_STEPS + steps)
        for k in range(len(times)):
            comm.barrier()
            began = perf_counter()
            pipe.step(x, x, no_loss)
            times[k] = perf_counter() - began
        pipe.close()
        slowest = comm.allreduce(times[WARM_STEPS:], op="max")
        found.append(EngineCost(name, microbatches, float(np.median(slowest)) / microbatches))
    return found
