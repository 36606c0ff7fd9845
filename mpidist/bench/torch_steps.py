"""Training steps that stand on torch.distributed: FSDP2 and tensor parallelism, beside gloo."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from ..communicator.communicator import Communicator
from ..errors import InvalidArgument
from .race import WARM, Contender, rows
from .results import Results, Row, make_header
from .torch_collectives import GLOO, OURS, process_groups
from .training_torch import threads

HEAD = 64  # width of an attention head
WORDS = 32  # of each sample of the transformer
AGREE = 1e-3  # largest error of an update, as a part of it; rounding makes less than 1e-5
ALONE = "no communication"


@dataclass(frozen=True)
class Scale:
    """Size of a model and of a batch.

    Attributes
    ----------
    width, layers : int
        Width of the model, a multiple of 64, and number of its layers.
    samples : int
        Samples of a batch: of each rank (FSDP2), or the same on all ranks (tensor parallelism).
    """

    width: int = 256
    layers: int = 4
    samples: int = 8


@dataclass
class Training:
    """A model that is trained, and the batch of this rank."""

    model: nn.Module
    batch: torch.Tensor

    def __post_init__(self) -> None:
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=1e-2)
        self.before = self.weights()

    def step(self) -> None:
        """Run one step."""
        (self.model(self.batch) - 1).pow(2).mean().backward()
        self.optimizer.step()
        self.optimizer.zero_grad()

    def weights(self) -> torch.Tensor:
        """Return all parameters whole, in one vector; collective if they are divided."""
        whole = (getattr(p, "full_tensor", lambda p=p: p)() for p in self.model.parameters())
        return torch.cat([p.detach().flatten() for p in whole])

    def update(self) -> torch.Tensor:
        """Return what the steps so far have changed of the parameters."""
        return self.weights() - self.before


class Fsdp2:
    """Transformer layers, each divided among the ranks by ``fully_shard``; each rank its batch."""

    work = "FSDP2"

    def __init__(self, comm: Communicator, scale: Scale):
        self.scale, self.rank, self.size = scale, comm.rank, comm.size

    def model(self, mesh: DeviceMesh | None) -> nn.Module:
        """Return the model, on one rank alone without a mesh."""
        from torch.distributed.fsdp import fully_shard

        width = self.scale.width
        model = nn.Sequential(
            *(
                nn.TransformerEncoderLayer(
                    width, width // HEAD, 4 * width, 0.0, "gelu", batch_first=True
                )
                for _ in range(self.scale.layers)
            )
        )
        if mesh is not None:
            for layer in model:
                fully_shard(layer, mesh=mesh)
            fully_shard(model, mesh=mesh)
        return model

    def batch(self, whole: bool) -> torch.Tensor:
        """Return the batch of this rank, or the batches of all ranks."""
        rows = self.scale.samples
        every = torch.randn(rows * self.size, WORDS, self.scale.width)
        return every if whole else every[rows * self.rank : rows * (self.rank + 1)]


class TensorParallel:
    """Pairs of linear layers, divided by columns and by rows; all ranks have the same batch."""

    work = "tensor-parallel MLP"

    def __init__(self, comm: Communicator, scale: Scale):
        self.scale = scale

    def model(self, mesh: DeviceMesh | None) -> nn.Module:
        """Return the model, on one rank alone without a mesh."""
        from torch.distributed.tensor.parallel import (
            ColwiseParallel,
            RowwiseParallel,
            parallelize_module,
        )

        width = self.scale.width
        model = nn.Sequential(
            *(
                nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))
                for _ in range(self.scale.layers)
            )
        )
        if mesh is not None:
            for k in range(self.scale.layers):
                plan = {f"{k}.0": ColwiseParallel(), f"{k}.2": RowwiseParallel()}
                parallelize_module(model, mesh, plan)
        return model

    def batch(self, whole: bool) -> torch.Tensor:
        """Return the batch, which is the same on all ranks."""
        return torch.randn(self.scale.samples, self.scale.width)


STEPS: dict[str, Callable[[Communicator, Scale], Any]] = {
    "fsdp2": Fsdp2,
    "tensor_parallel": TensorParallel,
}
"""What can be measured, by name."""


def measure_torch_steps(
    comm: Communicator, names: Sequence[str], scales: Sequence[Scale], rounds: int
) -> Results:
    """Measure training steps over mpidist, over gloo, and without communication; collective.

    The candidates take turns; the ratio refers to gloo.
    A row is correct if all steps together have changed the parameters as the same steps of a model
    on one rank with the whole batch.  The step without communication is the bound: the whole model
    on each rank with that rank's batch, and for tensor parallelism the whole work, which is more.

    Parameters
    ----------
    comm : Communicator
        The ranks, at least 2.
    names : sequence of str
        Names of :data:`STEPS`.
    scales : sequence of Scale
        Sizes of the models.
    rounds : int
        Timed steps of each candidate.
    """
    if comm.size == 1:
        raise InvalidArgument(
            "training steps of bench torch on 1 rank: expected 2 or more (mpidist run -n 2)"
        )
    for scale in scales:
        if scale.width % (HEAD * comm.size):
            multiple = f"a multiple of {HEAD * comm.size} on {comm.size} ranks"
            raise InvalidArgument(f"width={scale.width}: expected {multiple}")
    results = Results(make_header(comm, "torch"), benchmark="torch", reference=GLOO)
    with threads(comm):
        for name in names:
            for scale in scales:
                results.rows += _rows(comm, STEPS[name](comm, scale), rounds)
    return results


def _rows(comm: Communicator, kind: Any, rounds: int) -> list[Row]:
    def training(mesh: DeviceMesh | None, whole: bool = False) -> Training:
        torch.manual_seed(0)  # the same parameters and batches for all
        return Training(kind.model(mesh), kind.batch(whole))

    with process_groups(comm) as (over_mpidist, over_gloo):
        # With names: DTensor remembers results by the mesh, and two meshes of the same ranks
        # without are equal, so that both models would communicate over the group of the first.
        made = {
            name: training(DeviceMesh.from_group(group, "cpu", mesh_dim_names=(name,)))
            for name, group in ((GLOO, over_gloo), (OURS, over_mpidist))
        }
        alone = training(None)
        contenders = [Contender(name, one.step) for name, one in made.items()]
        contenders.append(Contender(ALONE, alone.step))
        count = sum(p.numel() for p in alone.model.parameters())
        work = f"step, {kind.work}, width {kind.scale.width}, {count / 1e6:.1f} M parameters"
        found = rows(comm, work, contenders, rounds)
        wanted = training(None, whole=True)
        for _ in range(WARM + rounds):
            wanted.step()
        for row in found:
            if row.candidate in made:
                row.correct = agree(comm, made[row.candidate].update(), wanted.update())
        # Before the groups end; the contenders hold the steps, which hold the models.
        del made, contenders
    return found


def agree(comm: Communicator, update: torch.Tensor, wanted: torch.Tensor) -> bool:
    """Return whether an update of the parameters is the wanted one on every rank; collective."""
    error = float((update - wanted).norm() / wanted.norm())
    return bool(comm.allreduce(np.array([error < AGREE]), "and")[0])
