"""Collectives of torch.distributed: the backend "mpidist" beside gloo and the bare mpi4py call."""

from __future__ import annotations

import gc
import os
import statistics
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from time import perf_counter
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

import mpidist.torch

from ..communicator.communicator import Communicator
from ..errors import InvalidArgument
from ..measure import busbw
from ..selection.tuning import PRIVATE, SYMMETRIC
from .candidates import mpi_communicator
from .cases import BARE
from .results import Results, Row, make_header

COLLECTIVES = {"all_reduce": "allreduce", "all_gather": "allgather", "broadcast": "broadcast"}
GLOO, OURS, QUEUED = "gloo", "mpidist", "mpidist, async_op"
BLOCK_SECONDS, MOST_CALLS = 4e-3, 100  # of a block of calls that is timed at once


def measure_torch(
    comm: Communicator, collectives: Sequence[str], sizes: Sequence[int], rounds: int
) -> Results:
    """Measure collectives of float32 tensors; the candidates take turns in blocks of calls.

    Each call passes a new tensor on the same memory, as PyTorch's own users do.  A time is the
    median over the blocks of the slowest rank's mean; the ratio refers to gloo.

    Parameters
    ----------
    collectives : sequence of str
        Keys of :data:`COLLECTIVES`; empty for all.
    sizes : sequence of int
        Bytes of the whole buffer.
    rounds : int
        Number of blocks.
    """
    for name in collectives:
        if name not in COLLECTIVES:
            raise InvalidArgument(f"collective {name!r}: allowed are {', '.join(COLLECTIVES)}")
    with process_groups(comm) as (_, gloo):
        results = Results(make_header(comm, "torch"), benchmark="torch", reference=GLOO)
        for name in collectives or COLLECTIVES:
            for nbytes in sizes:
                results.rows += _rows(comm, name, nbytes, gloo, rounds)
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


@dataclass(frozen=True)
class _Candidate:
    """A candidate of a collective, with its own buffer.

    Attributes
    ----------
    name, memory : str
        As in :class:`~mpidist.bench.results.Row`: name of the candidate, and kind of memory.
    data : torch.Tensor
        The whole buffer.
    call : callable
        Performs the collective.
    """

    name: str
    memory: str
    data: torch.Tensor
    call: Callable[[], object]


def _rows(comm: Communicator, name: str, nbytes: int, beside: Any, rounds: int) -> list[Row]:
    candidates = _candidates(comm, name, nbytes, beside)
    right = [_is_right(comm, name, candidate) for candidate in candidates]
    seconds = [min(_block(comm, c.call, 1) for _ in range(3)) for c in candidates]
    counts = comm.broadcast_object([_count(each) for each in seconds])
    times = np.empty((rounds, len(candidates)))
    draw = np.random.default_rng(0)  # the same order on every rank
    for taken in times:
        for k in draw.permutation(len(candidates)):
            taken[k] = _block(comm, candidates[k].call, counts[k])
    medians = [statistics.median(column) for column in comm.allreduce(times, "max").T.tolist()]
    reference = next(m for m, c in zip(medians, candidates) if c.name == GLOO)
    rows = []
    for candidate, median, correct in zip(candidates, medians, right):
        row = Row(name, candidate.name, comm.size, 1e6 * median, reference / median, correct)
        row.bytes, row.dtype, row.memory = nbytes, "float32", candidate.memory
        row.busbw_gbs = busbw(COLLECTIVES[name], nbytes, median, comm.size)
        rows.append(row)
    return rows


def _count(seconds: float) -> int:
    """Return how many calls of about `seconds` each make up one block, at least 1."""
    return max(1, min(MOST_CALLS, round(BLOCK_SECONDS / max(seconds, 1e-7))))


def _block(comm: Communicator, call: Callable[[], object], count: int) -> float:
    """Perform a block of `count` calls, after a barrier; return this rank's mean seconds."""
    comm.barrier()
    begun = perf_counter()
    for _ in range(count):
        call()
    return (perf_counter() - begun) / count


def _own(data: torch.Tensor, comm: Communicator) -> torch.Tensor:
    """Return the part of the tensor `data` that this rank contributes to an allgather, a view."""
    return data.chunk(comm.size)[comm.rank]


def _candidates(comm: Communicator, name: str, nbytes: int, beside: Any) -> list[_Candidate]:
    from mpi4py import MPI

    mpi = mpi_communicator(comm)
    count = max(1, nbytes // 4)
    if name == "all_gather":
        count = max(1, count // comm.size) * comm.size

    def made(who: str, group: Any, queued: bool = False, memory: str = PRIVATE) -> _Candidate:
        data = torch.zeros(count) if memory == PRIVATE else mpidist.torch.empty(count)

        def call() -> None:
            x = data.view(-1)
            if name == "all_gather":
                work = dist.all_gather_into_tensor(x, _own(x, comm), group, queued)
            elif name == "broadcast":
                work = dist.broadcast(x, 0, group, queued)
            else:
                work = dist.all_reduce(x, group=group, async_op=queued)
            if queued:
                work.wait()

        return _Candidate(who, memory, data, call)

    data = torch.zeros(count)
    rows = data.numpy()
    bare = {
        "all_reduce": lambda: mpi.Allreduce(MPI.IN_PLACE, rows),
        "all_gather": lambda: mpi.Allgather(MPI.IN_PLACE, rows),
        "broadcast": lambda: mpi.Bcast(rows, 0),
    }[name]
    found = [
        _Candidate(BARE, PRIVATE, data, bare),
        made(GLOO, beside),
        made(OURS, None),
        made(QUEUED, None, True),
    ]
    if comm.topology.num_nodes == 1:
        found.append(made(OURS, None, memory=SYMMETRIC))
    return found


def _is_right(comm: Communicator, name: str, candidate: _Candidate) -> bool:
    """Return whether one call of the collective `name` is right on every rank; collective.

    The buffer is zero afterwards, so that sums over many calls stay finite.
    """
    data, ranks = candidate.data, torch.arange(1.0, comm.size + 1)
    data.fill_(comm.rank + 1)
    candidate.call()
    wanted = ranks[0].expand_as(data)
    if name == "all_reduce":
        wanted = ranks.sum().expand_as(data)
    elif name == "all_gather":
        wanted = ranks.repeat_interleave(len(data) // comm.size)
    right = torch.equal(data, wanted)
    data.zero_()
    return bool(comm.allreduce(np.array([right]), "and")[0])
