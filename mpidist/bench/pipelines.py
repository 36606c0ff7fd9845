"""Pipelines: the overhead of the engine, averaging by replicas, and steps beside PyTorch's."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from functools import partial
from time import sleep
from typing import TYPE_CHECKING, Any

import numpy as np

from ..communicator.communicator import Communicator
from ..errors import InvalidArgument
from ..nn import Identity, Module, Parameter
from ..parallel import DDP
from ..parallel.bucket import Bucket
from ..parallel.transport import chained
from ..pipeline import Pipeline
from ..pipeline.schedules import as_schedule
from ..topology import Grid
from .device import HOST, filled, until_idle, use_device
from .machine import make_header
from .race import Contender, medians, race, rows
from .results import Refusal, Results, Row
from .training import NO_TORCH, REFERENCE, mlp, ranks_have

if TYPE_CHECKING:
    import torch

MICROBATCHES = 8
WARM_STEPS = 50
SCHEDULES = ("gpipe", "1f1b", "zb-h1")


def no_loss(output: Any, target: Any, reduction: str = "mean") -> tuple[float, Any]:
    """Return 0 as the loss and `output` as its gradient, at no cost."""
    return 0.0, output


def engine_cost(
    comm: Communicator, steps: int, microbatches: int = MICROBATCHES, device: str = HOST
) -> list[Row]:
    """Time `steps` steps of identity stages by each schedule: the pipeline's own cost; collective.

    A microbatch has 16 numbers, on the device.  A row has the slowest rank's median time of a step,
    divided by the number of microbatches.  Every rank has one stage, so it is the cost of one
    microbatch and stage, waiting included.
    """
    found = []
    for name in SCHEDULES:
        if as_schedule(name).unsupported(comm.size, microbatches) is not None:
            continue
        pipe = Pipeline(Identity(), comm, microbatches, name)
        x = filled(device, (microbatches, 16), 1)
        contender = Contender(name, partial(pipe.step, x, x, no_loss), warm=WARM_STEPS)
        (seconds,) = medians(race(comm, [contender], steps, until_idle(device)))
        pipe.close()
        time_us = 1e6 * seconds / microbatches
        row = Row("microbatch of an identity stage", name, comm.size, time_us)
        row.figures["microbatches"] = microbatches
        found.append(row)
    return found


_FORWARD_SECONDS = 0.01  # time of forward; backward takes twice as long
AVERAGING = 0.015  # seconds to average the last stage's gradients: less than the backward above it
REPLICA_MICROBATCHES = 4


class TimedStage(Module):
    """A stage that takes a fixed time but no core, so that more ranks than cores are no slower."""

    saved = ()

    def __init__(self) -> None:
        self.weight = Parameter(np.zeros(1))

    def forward(self, x: Any) -> Any:
        """Sleep for the time of a forward, and return `x`."""
        sleep(_FORWARD_SECONDS)
        return x

    def backward(self, grad: Any) -> Any:
        """Sleep for twice the time of a forward, and return `grad`."""
        sleep(2 * _FORWARD_SECONDS)
        self.weight.accumulate(np.ones(1))
        return grad


@chained
def slowly(bucket: Bucket) -> Iterator[Any]:
    """Communication hook: average a bucket after a fixed delay, which stands for a slow link."""
    sleep(AVERAGING)
    yield bucket.comm.iallreduce(bucket.flat, op="mean", out=bucket.flat)


def replicas(comm: Communicator, rounds: int) -> list[Row]:
    """Time `rounds` steps of 2 stages, 2 replicas each; the last stage's averaging is slow.

    The replicas' gradients are averaged by :class:`~mpidist.Pipeline` within the step, after the
    step, or not at all.  Averaging begins when a stage's backward has ended (``overlap="none"``),
    so the last stage's can be hidden only behind the remaining backward of the first stage.
    """
    grid = Grid(comm, pipe=2)
    hook = slowly if grid.pipe_index else None
    plain, after, within = TimedStage(), TimedStage(), TimedStage()
    models = [
        DDP(stage, grid.data, sync="manual", overlap="none", hook=hook) for stage in (within, after)
    ]
    pipes = [
        Pipeline(stage, grid.pipe, REPLICA_MICROBATCHES) for stage in (models[0], after, plain)
    ]
    contenders = [
        Contender("mpidist Pipeline of DDP", pipeline_step(pipes[0])),
        Contender("averaged after the step", pipeline_step(pipes[1], models[1].sync_gradients)),
        Contender("not averaged", pipeline_step(pipes[2])),
    ]
    work = f"step of timers, 2 stages on 2 ranks each, {1e3 * AVERAGING:g} ms to average the last"
    found = rows(comm, work, contenders, rounds)
    for pipe in pipes:
        pipe.close()
    return found


def pipeline_step(pipe: Pipeline, after: Callable[[], None] | None = None) -> Callable[[], None]:
    """Return a function that runs one step of a pipeline, and then `after` if given."""
    x = np.ones((REPLICA_MICROBATCHES, 1))

    def step() -> None:
        pipe.step(x, x, no_loss)
        if after is not None:
            after()

    return step


# -- steps in PyTorch, which is imported when they run ---------------------------------------------

WIDTHS_AND_ROWS = ((128, 8), (256, 16), (512, 16), (1024, 16))
"""Widths of the layers, and numbers of rows of a microbatch."""
OUR_PIPELINE, TORCH_PIPELINING = "mpidist Pipeline", "torch pipelining"
NO_CUDA_MESSAGES = "gloo has no send and recv of CUDA tensors"


def updating(
    module: torch.nn.Module,
    run: Callable[[torch.Tensor, torch.Tensor], object],
    shape: Any,
    device: str,
) -> Callable[[], None]:
    """Return a function that calls ``run(input, target)`` and then updates `module` by SGD.

    The input is random, of the given shape, on the device; the targets are classes, one per row.
    """
    import torch

    optimizer = torch.optim.SGD(module.parameters(), lr=1e-3)
    torch.manual_seed(0)
    x = torch.randn(*shape, device=device)
    labels = torch.randint(10, (shape[0],), device=device)

    def step() -> None:
        run(x, labels)
        optimizer.step()
        optimizer.zero_grad()

    return step


def theirs(
    comm: Communicator, module: torch.nn.Module, group: Any
) -> Callable[[torch.Tensor, torch.Tensor], object]:
    """Return a function (input, target) that runs PyTorch's own 1F1B over a process group.

    It runs forward and backward; the update is left to the caller.
    """
    import torch
    from torch.distributed.pipelining import PipelineStage, Schedule1F1B

    device = next(module.parameters()).device  # with the number of a GPU
    part = PipelineStage(module, comm.rank, comm.size, device, group=group)
    loss = torch.nn.functional.cross_entropy
    schedule = Schedule1F1B(part, n_microbatches=MICROBATCHES, loss_fn=loss)

    def run(x: torch.Tensor, labels: torch.Tensor) -> None:
        losses: list[torch.Tensor] = []
        first, last = comm.rank == 0, comm.rank == comm.size - 1
        inputs = (x,) if first else ()
        schedule.step(*inputs, **({"target": labels, "losses": losses} if last else {}))

    return run


def torch_steps(comm: Communicator, rounds: int, device: str = HOST) -> list[Row]:
    """Time `rounds` 1F1B steps of each of several MLPs, by mpidist and by PyTorch; collective.

    PyTorch's is over gloo, or on "cuda" over the backend "mpidist".  Each rank uses one thread.
    """
    import torch

    from .torch import GLOO, MPIDIST, process_groups, threads

    found: list[Row] = []
    loss = torch.nn.functional.cross_entropy
    with threads(comm, 1), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        with process_groups(comm) as (over_mpidist, over_gloo):
            backend, group = (GLOO, over_gloo) if device == HOST else (MPIDIST, over_mpidist)
            for width, each in WIDTHS_AND_ROWS:
                shape = (MICROBATCHES * each, width)
                ends = comm.rank == comm.size - 1
                own, other = (mlp(width, comm.rank, ends, device) for _ in range(2))
                pipe = Pipeline(own, comm, MICROBATCHES, "1f1b")
                contenders = [
                    Contender(
                        OUR_PIPELINE,
                        updating(own, lambda x, t, p=pipe: p.step(x, t, loss), shape, device),  # type: ignore[misc]
                    ),
                    Contender(
                        f"{TORCH_PIPELINING}, {backend}",
                        updating(other, theirs(comm, other, group), shape, device),
                    ),
                ]
                count = comm.allreduce(float(sum(p.numel() for p in own.parameters())))
                work = f"step, {float(count) / 1e6:.1f} M parameters, {each} rows a microbatch"
                found += rows(comm, work, contenders, rounds, until_idle(device))
                pipe.close()
    return found


def measure_pipelines(comm: Communicator, iterations: int, device: str = HOST) -> Results:
    """Measure the pipeline's own cost, and steps beside PyTorch's pipelining; collective.

    All of it is on the `device`, "cpu" or "cuda".  On exactly 4 ranks and the CPU, also the
    averaging by replicas (:func:`replicas`), whose stages are timers.
    """
    if comm.size < 2:
        raise InvalidArgument("bench pipeline on 1 rank: expected 2 or more (mpidist run -n 2)")
    has_torch = ranks_have(comm, "torch", "torch.distributed.pipelining")
    header = make_header(comm, *["torch"] * has_torch)
    results = Results(header, benchmark="pipeline", reference=REFERENCE)
    use_device(comm, device, results)
    results.rows += engine_cost(comm, iterations, device=device)
    if has_torch:
        results.rows += torch_steps(comm, iterations, device)
    else:
        results.notes.append(NO_TORCH)
    if device != HOST:
        refused = Refusal("step", f"{TORCH_PIPELINING}, gloo", None, NO_CUDA_MESSAGES)
        results.unsupported.append(refused)
    elif comm.size == 4:
        results.rows += replicas(comm, iterations)
    return results
