"""Steps of pipelines in PyTorch: by mpidist.Pipeline, and by PyTorch's own over gloo."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.distributed.pipelining import PipelineStage, Schedule1F1B

from ..communicator.communicator import Communicator
from ..pipeline import Pipeline
from .pipelines import MICROBATCHES, THEIRS
from .race import Contender
from .race import rows as race_rows
from .results import Row
from .torch_collectives import process_groups

SIZES = ((128, 8), (256, 16), (512, 16), (1024, 16))
"""Widths of the layers, and numbers of rows of a microbatch."""
OURS = "mpidist Pipeline"


def stage(width: int, rank: int, size: int) -> torch.nn.Module:
    """Return a rank's stage: 4 layers of `width`² weights; the last stage ends in 10 classes."""
    torch.manual_seed(rank)
    layers: list[torch.nn.Module] = []
    for _ in range(4):
        layers += [torch.nn.Linear(width, width), torch.nn.ReLU()]
    if rank == size - 1:
        layers.append(torch.nn.Linear(width, 10))
    return torch.nn.Sequential(*layers)


def stepper(
    module: torch.nn.Module, run: Callable[[torch.Tensor, torch.Tensor], object], shape: Any
) -> Callable[[], None]:
    """Return a function that calls ``run(input, target)`` and then updates `module` by SGD.

    The input is random, of the given shape; the targets are classes, one per row.
    """
    optimizer = torch.optim.SGD(module.parameters(), lr=1e-3)
    torch.manual_seed(0)
    x, labels = torch.randn(*shape), torch.randint(10, (shape[0],))

    def step() -> None:
        run(x, labels)
        optimizer.step()
        optimizer.zero_grad()

    return step


def theirs(
    comm: Communicator, module: torch.nn.Module, gloo: Any
) -> Callable[[torch.Tensor, torch.Tensor], object]:
    """Return a function (input, target) that runs PyTorch's own 1F1B over the group `gloo`.

    It runs forward and backward; the update is left to the caller.
    """
    part = PipelineStage(module, comm.rank, comm.size, torch.device("cpu"), group=gloo)
    loss = torch.nn.functional.cross_entropy
    schedule = Schedule1F1B(part, n_microbatches=MICROBATCHES, loss_fn=loss)

    def run(x: torch.Tensor, labels: torch.Tensor) -> None:
        losses: list[torch.Tensor] = []
        first, last = comm.rank == 0, comm.rank == comm.size - 1
        inputs = (x,) if first else ()
        schedule.step(*inputs, **({"target": labels, "losses": losses} if last else {}))

    return run


def steps(comm: Communicator, rounds: int) -> list[Row]:
    """Time `rounds` 1F1B steps of each of several MLPs, by mpidist and by PyTorch; collective.

    Each rank uses one thread.
    """
    rows: list[Row] = []
    loss = torch.nn.functional.cross_entropy
    with one_thread(), process_groups(comm) as (_, gloo):
        for width, each in SIZES:
            shape = (MICROBATCHES * each, width)
            own, other = (stage(width, comm.rank, comm.size) for _ in range(2))
            pipe = Pipeline(own, comm, MICROBATCHES, "1f1b")
            contenders = [
                Contender(
                    OURS,
                    stepper(own, lambda x, t, p=pipe: p.step(x, t, loss), shape),  # type: ignore[misc]
                ),
                Contender(THEIRS, stepper(other, theirs(comm, other, gloo), shape)),
            ]
            count = comm.allreduce(float(sum(p.numel() for p in own.parameters())))
            work = f"step, {float(count) / 1e6:.1f} M parameters, {each} rows a microbatch"
            rows += race_rows(comm, work, contenders, rounds)
            pipe.close()
    return rows


@contextmanager
def one_thread() -> Iterator[None]:
    """Within the block, limit PyTorch to one thread, as ranks share the cores; hide warnings."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        torch.set_num_threads(before)
