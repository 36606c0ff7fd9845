"""Training steps in PyTorch: with mpidist.DDP, with PyTorch's own wrapper, and with neither."""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch

from ..communicator.communicator import Communicator
from ..parallel import DDP, Stats
from .models_torch import MODELS
from .race import Contender, rows
from .results import Row
from .torch_collectives import process_groups
from .training import OURS, stepping

SAMPLES = 32  # of each rank in a step
BUSY_WIDTH, BUSY_SAMPLES, BUSY_BUCKET = 1024, 128, 4 << 20  # of the network of --overlap


def mlp(width: int, depth: int = 4) -> torch.nn.Module:
    """Return an MLP: `depth` layers of `width`² weights, then 10 classes; the same on all ranks."""
    torch.manual_seed(0)
    layers: list[torch.nn.Module] = []
    for _ in range(depth):
        layers += [torch.nn.Linear(width, width), torch.nn.ReLU()]
    return torch.nn.Sequential(*layers, torch.nn.Linear(width, 10))


def width_for(millions: float, depth: int = 4) -> int:
    """Return the width of the MLP with about `millions` of parameters."""
    return max(64, 64 * round(math.sqrt(millions * 1e6 / depth) / 64))


def stepper(
    model: Any,
    parameters: Any,
    width: int,
    sync: Callable[[], object] = lambda: None,
    samples: int = SAMPLES,
) -> Callable[[], None]:
    """Return a function that runs one SGD step of `model`, with `sync()` before the update.

    The batch is random: `samples` inputs of `width` numbers.
    """
    optimizer = torch.optim.SGD(parameters, lr=1e-3)
    x, labels = torch.randn(samples, width), torch.randint(10, (samples,))

    def step() -> None:
        torch.nn.functional.cross_entropy(model(x), labels).backward()
        sync()
        optimizer.step()
        optimizer.zero_grad()

    return step


def one_by_one(comm: Communicator, net: torch.nn.Module) -> Callable[[], None]:
    """Return a function that averages the gradients of `net`, one allreduce per parameter."""

    def sync() -> None:
        for p in net.parameters():
            assert p.grad is not None
            flat = p.grad.numpy()
            comm.allreduce(flat, op="mean", out=flat)

    return sync


def training(comm: Communicator, rounds: int, width: int) -> tuple[list[Row], Stats]:
    """Time `rounds` SGD steps of an MLP with each wrapper; return rows and mpidist.DDP's stats."""
    net, bare, each = mlp(width), mlp(width), mlp(width)
    count = sum(p.numel() for p in net.parameters())
    with threads(comm):
        model = DDP(net, comm)
        contenders = [
            stepping(OURS, stepper(model, net.parameters(), width), model),
            Contender("no communication", stepper(bare, bare.parameters(), width)),
        ]
        work = f"step, MLP of {count / 1e6:.1f} M parameters"
        if comm.size == 1:
            return rows(comm, work, contenders, rounds), model.stats()
        sync = one_by_one(comm, each)
        name = "one allreduce per parameter"
        contenders.append(Contender(name, stepper(each, each.parameters(), width, sync)))
        with process_groups(comm) as (_, gloo):
            theirs = torch.nn.parallel.DistributedDataParallel(mlp(width), process_group=gloo)
            name = "torch DDP over gloo"
            contenders.append(Contender(name, stepper(theirs, theirs.parameters(), width)))
            found = rows(comm, work, contenders, rounds)
            del theirs, contenders
    return found, model.stats()


def model_steps(comm: Communicator, rounds: int, name: str) -> tuple[list[Row], Stats]:
    """Time `rounds` AdamW steps with each wrapper; return rows and mpidist.DDP's stats.

    `name` is a model of :data:`mpidist.bench.models_torch.MODELS`.
    """

    def step(wrap: Callable[[torch.nn.Module], Any]) -> tuple[Callable[[], None], Any]:
        torch.manual_seed(0)
        net, loss = MODELS[name]()
        model, optimizer = wrap(net), torch.optim.AdamW(net.parameters())

        def act() -> None:
            loss(model).backward()
            optimizer.step()
            optimizer.zero_grad()

        return act, model

    with threads(comm):
        ours, model = step(lambda net: DDP(net, comm))
        bare, net = step(lambda net: net)
        count = sum(p.numel() for p in net.parameters())
        work = f"step, {name} of {count / 1e6:.1f} M parameters"
        contenders = [
            stepping(OURS, ours, model),
            Contender("no communication", bare),
        ]
        if comm.size == 1:
            return rows(comm, work, contenders, rounds), model.stats()
        with process_groups(comm) as (over_mpidist, over_gloo):
            unused = {"find_unused_parameters": True} if name == "moe" else {}
            for backend, group, views in (
                ("mpidist", over_mpidist, True),
                ("gloo", over_gloo, True),
                ("gloo", over_gloo, False),
            ):
                theirs = step(  # not its model: process_groups frees that
                    partial(
                        torch.nn.parallel.DistributedDataParallel,
                        process_group=group,
                        gradient_as_bucket_view=views,
                        **unused,
                    )
                )[0]
                label = f"torch DDP over {backend}" + ", views" * views
                contenders.append(Contender(label, theirs))
            found = rows(comm, work, contenders, rounds)
            del theirs, contenders
    return found, model.stats()


def busy(comm: Communicator, overlap: str) -> tuple[Callable[[], None], DDP]:
    """Return a function that runs a training step of a compute-bound MLP, and the MLP's DDP.

    It is for ``mpidist bench ddp --overlap``.
    """
    net = mlp(BUSY_WIDTH)
    model = DDP(net, comm, BUSY_BUCKET, overlap=overlap)
    step = stepper(model, net.parameters(), BUSY_WIDTH, samples=BUSY_SAMPLES)
    return step, model


@contextmanager
def threads(comm: Communicator) -> Iterator[None]:
    """Within the block, let each rank's PyTorch use an equal part of the node's cores.

    If OMP_NUM_THREADS is set, nothing changes.
    """
    before = torch.get_num_threads()
    if "OMP_NUM_THREADS" not in os.environ:
        cores = len(os.sched_getaffinity(0))
        torch.set_num_threads(max(1, cores // comm.topology.local_size))
    try:
        yield
    finally:
        torch.set_num_threads(before)
