"""``mpidist bench pipeline`` on 4 ranks: a stage's replicas average while others still go back."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from time import sleep
from typing import Any

import numpy as np

from ..nn import Module, Parameter
from ..parallel import DDP, Pipeline
from ..parallel.bucket import Bucket
from ..parallel.chain import chained
from ..topology import Grid
from .pipelines import no_loss
from .training import Contender, Row, race

SECONDS = 0.01  # of forward; backward takes twice as long
AVERAGING = 0.015  # of the last stage's gradients: less than the backward that hides it
MICROBATCHES = 4


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
    pipes = [Pipeline(held, grid.pipe, MICROBATCHES) for held in (models[0], after, plain)]
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
    x = np.ones((MICROBATCHES, 1))

    def step() -> None:
        pipe.step(x, x, no_loss)
        if after is not None:
            after()

    return step
