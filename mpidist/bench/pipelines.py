"""``mpidist bench pipeline``: the cost of a pipeline besides computing; averaging by replicas."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from time import perf_counter, sleep
from typing import Any

import numpy as np

from ..errors import InvalidArgument
from ..nn import Identity, Module, Parameter
from ..parallel import DDP
from ..parallel.bucket import Bucket
from ..parallel.transport import chained
from ..pipeline import Pipeline
from ..pipeline.schedules import as_schedule
from ..topology import Grid
from .results import make_header
from .training import Contender, Row, race, ranks_have

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


SECONDS = 0.01  # of forward; backward takes twice as long
AVERAGING = 0.015  # of the last stage's gradients: less than the backward that hides it
REPLICA_MICROBATCHES = 4


class Timed(Module):
    """Takes a fixed time and no core, so that more ranks than cores are no slower."""

    saved = ()

    def __init__(self) -> None:
        self.weight = Parameter(np.zeros(1))

    def forward(self, x: Any) -> Any:
        """Wait."""
        sleep(SECONDS)
        return x

    def backward(self, grad: Any) -> Any:
        """Wait twice as long."""
        sleep(2 * SECONDS)
        self.weight.accumulate(np.ones(1))
        return grad


@chained
def slowly(bucket: Bucket) -> Iterator[Any]:
    """Average as over a slow link."""
    sleep(AVERAGING)
    yield bucket.comm.iallreduce(bucket.flat, op="mean", out=bucket.flat)


def replicas(comm: Any, rounds: int) -> list[Row]:
    """Measure steps of 2 stages on 4 ranks, of which the last one's gradients are averaged slowly.

    By :class:`~mpidist.Pipeline`, in the step; after its step; and not at all.  Nothing is sent
    before backward has ended (``overlap="none"``): what is hidden is hidden behind the cool-down of
    the stage before.
    """
    grid = Grid(comm, pipe=2)
    hook = slowly if grid.pipe_index else None
    plain, after, within = Timed(), Timed(), Timed()
    models = [DDP(stage, grid.data, overlap="none", hook=hook) for stage in (within, after)]
    pipes = [Pipeline(held, grid.pipe, REPLICA_MICROBATCHES) for held in (models[0], after, plain)]
    contenders = [
        Contender("mpidist Pipeline of DDP", stepper(pipes[0])),
        Contender("averaged after the step", stepper(pipes[1], models[1].sync_gradients)),
        Contender("not averaged", stepper(pipes[2])),
    ]
    work = f"step of timers, 2 stages on 2 ranks each, {1e3 * AVERAGING:g} ms to average the last"
    rows = race(comm, work, contenders, rounds)
    for pipe in pipes:
        pipe.close()
    return rows


def stepper(pipe: Pipeline, after: Callable[[], None] | None = None) -> Callable[[], None]:
    """Give a function that makes one step."""
    x = np.ones((REPLICA_MICROBATCHES, 1))

    def step() -> None:
        pipe.step(x, x, no_loss)
        if after is not None:
            after()

    return step


@dataclass(frozen=True)
class PipelineResults:
    """Results of `mpidist bench pipeline`.

    Attributes
    ----------
    header : dict
        Description of the run.
    engine : list of EngineCost
        Time of the pipeline's engine, by schedule.
    rows : list of Row
        Times of steps, beside PyTorch's pipelining and of replicas.
    has_torch : bool
        Whether PyTorch's pipelining was measured too.
    """

    header: dict[str, Any]
    engine: list[EngineCost]
    rows: list[Row]
    has_torch: bool

    def as_json(self) -> dict[str, Any]:
        """Return the results as a JSON object."""
        engine = [cost.as_json() for cost in self.engine]
        return {"header": self.header, "engine": engine, "rows": [r.as_json() for r in self.rows]}


def measure_pipelines(comm: Any, iterations: int) -> PipelineResults:
    """Measure the engine, steps beside PyTorch's where rank 0 has it, and replicas; collective.

    Replicas are measured on 4 ranks.

    Raises
    ------
    InvalidArgument
        On 1 rank.
    """
    if comm.size < 2:
        raise InvalidArgument("bench pipeline on 1 rank: expected 2 or more (mpidist run -n 2)")
    costs = engine_cost(comm, iterations)
    have = ranks_have(comm, "torch") and ranks_have(comm, "torch.distributed.pipelining")
    rows: list[Row] = []
    if have:
        from .pipelines_torch import steps

        rows += steps(comm, iterations)
    if comm.size == 4:
        rows += replicas(comm, iterations)
    return PipelineResults(make_header(comm, *["torch"] * have), costs, rows, have)
