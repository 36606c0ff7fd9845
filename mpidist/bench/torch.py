"""What stands on torch.distributed, over the backend "mpidist" beside gloo.

Collectives, beside the bare mpi4py call too, and training steps: FSDP2 and tensor parallelism.
"""

from __future__ import annotations

import gc
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import _functional_collectives as functional
from torch.distributed.device_mesh import DeviceMesh

import mpidist.torch

from ..communicator.communicator import Communicator
from ..errors import InvalidArgument
from ..measure import busbw
from ..selection.tuning import PRIVATE, SYMMETRIC
from .candidates import mpi_communicator
from .cases import BARE
from .device import HOST, until_idle, use_device
from .machine import make_header
from .race import WARM, Contender, Wait, medians, race, rows
from .results import Refusal, Results, Row

_C10D_COLLECTIVES = {"all_reduce": "allreduce", "all_gather": "allgather", "broadcast": "broadcast"}
GLOO, MPIDIST = "gloo", "mpidist"
WAYS = "blocking", "async_op", "functional", "queued"
BLOCK_SECONDS, MOST_CALLS = 4e-3, 100  # of a block of calls that is timed at once
# Seen with PyTorch 2.11: so it is not tried.
_GLOO_ENDS = "with CUDA tensors gloo's functional collectives end the process by SIGSEGV"
MOST_QUEUED, QUEUED_BYTES = 100, 1 << 26


def measure_torch(
    comm: Communicator,
    collectives: Sequence[str],
    sizes: Sequence[int],
    rounds: int,
    ways: Sequence[str] = WAYS[:2],
    device: str = HOST,
) -> Results:
    """Measure collectives of float32 tensors; the candidates take turns in blocks of calls.

    Each call passes a new tensor on the same memory, as PyTorch's own users do.  A time is the
    median over the blocks of the slowest rank's mean; the ratio refers to gloo, called in the same
    way.  The `ways` of a call: "blocking"; "async_op", with ``wait()`` at once; "functional", as
    DTensor and tensor parallelism make it, with a new result; "queued", many with ``async_op=True``
    before the first ``wait()``.  "blocking" is measured in any case.  No `collectives` means all of
    `_C10D_COLLECTIVES`; `rounds` is the number of blocks.  The tensors are on the `device`, "cpu"
    or "cuda".  Calls that gloo cannot serve there are in ``Results.unsupported``.
    """
    for name in collectives:
        if name not in _C10D_COLLECTIVES:
            raise InvalidArgument(
                f"collective {name!r}: allowed are {', '.join(_C10D_COLLECTIVES)}"
            )
    for way in ways:
        if way not in WAYS:
            raise InvalidArgument(f"way {way!r}: allowed are {', '.join(WAYS)}")
    results = Results(make_header(comm, "torch"), benchmark="torch", reference=GLOO)
    use_device(comm, device, results)
    with process_groups(comm) as (_, gloo):
        for name in collectives or _C10D_COLLECTIVES:
            for nbytes in sizes:
                able = _candidates(comm, name, nbytes, gloo, ways, device)
                results.rows += _rows(comm, name, nbytes, able, rounds, until_idle(device))
                if device != HOST and "functional" in ways:
                    refused = Refusal(name, f"{GLOO}, functional", nbytes, _GLOO_ENDS)
                    results.unsupported.append(refused)
    return results


@contextmanager
def process_groups(comm: Communicator) -> Iterator[tuple[Any, Any]]:
    """Yield two new process groups of all ranks, over mpidist and over gloo.

    If PyTorch has no default group yet, the block has one over mpidist, destroyed at its end.
    """
    if comm.topology.num_nodes == 1:
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    begun = not dist.is_initialized()
    if begun:
        dist.init_process_group("mpidist")
    try:
        groups = dist.new_group(backend="mpidist"), dist.new_group(backend="gloo")
        yield groups
    finally:
        # PyTorch's wrappers are cycles that hold their group.  One that is freed after `groups`
        # ends gloo with the GIL held, and waits for a thread of gloo that may wait for the GIL.
        gc.collect()
        if begun:
            dist.destroy_process_group()


@contextmanager
def threads(comm: Communicator, count: int | None = None) -> Iterator[None]:
    """Within the block, let each rank's PyTorch use `count` threads.

    By default that is an equal part of the node's cores, or no change if OMP_NUM_THREADS is set.
    """
    before = torch.get_num_threads()
    if count is None and "OMP_NUM_THREADS" not in os.environ:
        count = max(1, len(os.sched_getaffinity(0)) // comm.topology.local_size)
    torch.set_num_threads(count or before)
    try:
        yield
    finally:
        torch.set_num_threads(before)


@dataclass(kw_only=True)
class _Candidate(Contender):
    """A candidate of a collective: `act` performs it on each row of `data`, or gives the result."""

    way: str  # one of WAYS
    data: torch.Tensor  # the whole buffer of each operation of a call, one a row
    memory: str = PRIVATE


def _rows(
    comm: Communicator,
    name: str,
    nbytes: int,
    candidates: Sequence[_Candidate],
    rounds: int,
    wait: Wait,
) -> list[Row]:
    right = [_is_right(comm, name, candidate) for candidate in candidates]
    seconds = [min(candidate.measure(comm, wait) for _ in range(3)) for candidate in candidates]
    for candidate, calls in zip(candidates, comm.broadcast_object(list(map(_count, seconds)))):
        candidate.calls = calls
    of_blocks = medians(race(comm, candidates, rounds, wait))
    times = [seconds / len(c.data) for c, seconds in zip(candidates, of_blocks)]
    references = {c.way: time for c, time in zip(candidates, times) if c.name.startswith(GLOO)}
    rows = []
    for candidate, time, correct in zip(candidates, times, right):
        reference = references.get(candidate.way)
        ratio = None if reference is None else reference / time
        row = Row(name, candidate.name, comm.size, 1e6 * time, ratio, correct)
        row.bytes, row.dtype, row.memory = nbytes, "float32", candidate.memory
        row.busbw_gbs = busbw(_C10D_COLLECTIVES[name], nbytes, time, comm.size)
        rows.append(row)
    return rows


def _count(seconds: float) -> int:
    """Return how many calls of about `seconds` each make up one block, at least 1."""
    return max(1, min(MOST_CALLS, round(BLOCK_SECONDS / max(seconds, 1e-7))))


def _own(data: torch.Tensor, comm: Communicator) -> torch.Tensor:
    """Return the part of the tensor `data` that this rank contributes to an allgather, a view."""
    return data.chunk(comm.size)[comm.rank]


def _candidates(
    comm: Communicator, name: str, nbytes: int, gloo: Any, ways: Sequence[str], device: str
) -> list[_Candidate]:
    count = max(1, nbytes // 4)
    if name == "all_gather":
        count = max(1, count // comm.size) * comm.size

    def begun(x: torch.Tensor, group: Any, way: str) -> Any:
        """Call the collective with the tensor `x`; return what has a ``wait()``, or None."""
        late = way in ("async_op", "queued")
        if name == "all_gather":
            own = _own(x, comm)
            if way == "functional":
                return functional.all_gather_tensor(own, 0, group)
            return dist.all_gather_into_tensor(x, own, group, late)
        if name == "broadcast":
            if way == "functional":
                return functional.broadcast(x, 0, group)
            return dist.broadcast(x, 0, group, late)
        if way == "functional":
            return functional.all_reduce(x, "sum", group)
        return dist.all_reduce(x, group=group, async_op=late)

    def made(who: str, group: Any, way: str, memory: str = PRIVATE) -> _Candidate:
        queued = min(MOST_QUEUED, max(2, QUEUED_BYTES // nbytes)) if way == "queued" else 1
        if memory == PRIVATE:
            data = torch.zeros(queued, count, device=device)
        else:
            data = mpidist.torch.empty(queued, count)
        tensors = list(data)

        def call() -> Any:
            x = tensors[0].view(-1)
            work = begun(x, group, way)
            return None if work is None else work.wait()

        def call_all() -> None:
            for work in [begun(x.view(-1), group, way) for x in tensors]:
                work.wait()

        called = who if way == "blocking" else f"{who}, {way}"
        act = call if queued == 1 else call_all
        return _Candidate(called, act, warm=0, way=way, data=data, memory=memory)

    found = [_bare(comm, name, count)] if device == HOST else []
    world = dist.group.WORLD
    for way in dict.fromkeys(("blocking", *ways)):
        if device == HOST or way != "functional":
            found.append(made(GLOO, gloo, way))
        found.append(made(MPIDIST, world, way))
    if comm.topology.num_nodes == 1 and device == HOST:
        found.append(made(MPIDIST, world, "blocking", SYMMETRIC))
    return found


def _bare(comm: Communicator, name: str, count: int) -> _Candidate:
    """Return the candidate that calls mpi4py, which takes arrays of the host."""
    from mpi4py import MPI

    mpi = mpi_communicator(comm)
    data = torch.zeros(1, count)
    rows = data[0].numpy()
    act = {
        "all_reduce": lambda: mpi.Allreduce(MPI.IN_PLACE, rows),
        "all_gather": lambda: mpi.Allgather(MPI.IN_PLACE, rows),
        "broadcast": lambda: mpi.Bcast(rows, 0),
    }[name]
    return _Candidate(BARE, act, warm=0, way="blocking", data=data)


def _is_right(comm: Communicator, name: str, candidate: _Candidate) -> bool:
    """Return whether one call of the collective `name` is right on every rank; collective.

    The buffers are zero afterwards, so that sums over many calls stay finite.
    """
    data = candidate.data
    ranks = torch.arange(1.0, comm.size + 1, device=data.device)
    data.fill_(comm.rank + 1)
    returned = candidate.act()
    result = returned if isinstance(returned, torch.Tensor) else data
    wanted = ranks[0]
    if name == "all_reduce":
        wanted = ranks.sum()
    elif name == "all_gather":
        wanted = ranks.repeat_interleave(data.shape[1] // comm.size)
    right = torch.equal(result, wanted.expand_as(result))
    data.zero_()
    return bool(comm.allreduce(np.array([right]), "and")[0])


# -- training steps -------------------------------------------------------------------------------

HEAD = 64  # width of an attention head
WORDS = 32  # of each sample of the transformer
AGREE = 1e-3  # largest error of an update, as a part of it; rounding makes less than 1e-5
_NO_COMMUNICATION = "no communication"


@dataclass(frozen=True)
class Scale:
    """Size of a model and of a batch."""

    width: int = 256  # of the model, a multiple of 64
    layers: int = 4
    # Of a batch: of each rank (FSDP2), or the same on all ranks (tensor parallelism).
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

    def __init__(self, comm: Communicator, scale: Scale, device: str = HOST):
        self.scale, self.rank, self.size = scale, comm.rank, comm.size
        self.device = device

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
        ).to(self.device)
        if mesh is not None:
            for layer in model:
                fully_shard(layer, mesh=mesh)
            fully_shard(model, mesh=mesh)
        return model

    def batch(self, whole: bool) -> torch.Tensor:
        """Return the batch of this rank, or the batches of all ranks."""
        rows = self.scale.samples
        every = torch.randn(rows * self.size, WORDS, self.scale.width).to(self.device)
        return every if whole else every[rows * self.rank : rows * (self.rank + 1)]


class TensorParallel:
    """Pairs of linear layers, divided by columns and by rows; all ranks have the same batch."""

    work = "tensor-parallel MLP"

    def __init__(self, comm: Communicator, scale: Scale, device: str = HOST):
        self.scale, self.device = scale, device

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
        ).to(self.device)
        if mesh is not None:
            for k in range(self.scale.layers):
                plan = {f"{k}.0": ColwiseParallel(), f"{k}.2": RowwiseParallel()}
                parallelize_module(model, mesh, plan)
        return model

    def batch(self, whole: bool) -> torch.Tensor:
        """Return the batch, which is the same on all ranks."""
        return torch.randn(self.scale.samples, self.scale.width).to(self.device)


STEPS: dict[str, Callable[[Communicator, Scale, str], Any]] = {
    "fsdp2": Fsdp2,
    "tensor_parallel": TensorParallel,
}
"""What can be measured, by name."""


def measure_torch_steps(
    comm: Communicator,
    names: Sequence[str],
    scales: Sequence[Scale],
    rounds: int,
    device: str = HOST,
) -> Results:
    """Measure training steps over mpidist, over gloo, and without communication; collective.

    The candidates take turns; the ratio refers to gloo.
    A row is correct if all steps together have changed the parameters as the same steps of a model
    on one rank with the whole batch.  The step without communication is the bound: the whole model
    on each rank with that rank's batch, and for tensor parallelism the whole work, which is more.

    `names` are of :data:`STEPS`, `scales` the sizes of the models; each candidate makes `rounds`
    timed steps, on the `device`, "cpu" or "cuda".
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
    use_device(comm, device, results)
    with threads(comm):
        for name in names:
            for scale in scales:
                _add_steps(comm, STEPS[name](comm, scale, device), rounds, results)
    return results


def _add_steps(comm: Communicator, kind: Any, rounds: int, results: Results) -> None:
    """Add the rows of one kind of step to results, or a refusal of gloo's; collective."""

    def training(mesh: DeviceMesh | None, whole: bool = False) -> Training:
        torch.manual_seed(0)  # the same parameters and batches for all
        return Training(kind.model(mesh), kind.batch(whole))

    made: dict[str, Training] = {}

    def begin(name: str, group: Any) -> None:
        """Make a model, and run its first step."""
        # With names: DTensor remembers results by the mesh, and two meshes of the same ranks
        # without are equal, so that both models would communicate over the group of the first.
        mesh = DeviceMesh.from_group(group, kind.device, mesh_dim_names=(name,))
        model = training(mesh)
        model.step()
        made[name] = model

    with process_groups(comm) as (over_mpidist, over_gloo):
        reason = "" if kind.device == HOST else _GLOO_ENDS
        if not reason:
            begin(GLOO, over_gloo)
        begin(MPIDIST, over_mpidist)
        alone = training(None)
        contenders = [Contender(name, one.step, warm=WARM - 1) for name, one in made.items()]
        contenders.append(Contender(_NO_COMMUNICATION, alone.step))
        count = sum(p.numel() for p in alone.model.parameters())
        work = f"step, {kind.work}, width {kind.scale.width}, {count / 1e6:.1f} M parameters"
        found = rows(comm, work, contenders, rounds, until_idle(kind.device))
        wanted = training(None, whole=True)
        for _ in range(WARM + rounds):
            wanted.step()
        for row in found:
            if row.candidate in made:
                row.correct = agree(comm, made[row.candidate].update(), wanted.update())
            if reason:
                row.ratio = None
        # Before the groups end; the contenders hold the steps, which hold the models.
        made.clear()
        del contenders
    results.rows += found
    if reason:
        results.unsupported.append(Refusal(work, GLOO, None, reason))


def agree(comm: Communicator, update: torch.Tensor, wanted: torch.Tensor) -> bool:
    """Return whether an update of the parameters is the wanted one on every rank; collective."""
    error = float((update - wanted).norm() / wanted.norm())
    return bool(comm.allreduce(np.array([error < AGREE]), "and")[0])
