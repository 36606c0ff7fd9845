"""Sparse tensors: each rank's elements are gathered on all ranks; equal indices are added up."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from ..communicator.communicator import Communicator
from ..device import tensors

NONE, DENSE = -1, -2  # in place of a number of rows


def add_up(comm: Communicator, x: torch.Tensor, counts: Sequence[int] | None = None) -> Any:
    """Return the sum over the ranks of a sparse COO tensor, coalesced; collective.

    `x` is coalesced, with the same shape, number of sparse dimensions and dtype on all ranks;
    `counts` has the number of stored elements (rows) on each rank, which by default the ranks
    exchange.
    """
    indices, values = x.indices().t().contiguous(), x.values().contiguous()
    if counts is None:
        counts = comm.allgather(np.array([len(indices)])).tolist()
    joined = [_gathered(comm, mine, counts) for mine in (indices, values)]
    return _sparse(joined[0].t(), joined[1], x.shape).coalesce()


def _sparse(indices: torch.Tensor, values: torch.Tensor, shape: torch.Size) -> torch.Tensor:
    # Without check_invariants PyTorch warns that it does not check.
    return torch.sparse_coo_tensor(indices, values, shape, check_invariants=False)


def _gathered(comm: Communicator, rows: torch.Tensor, counts: Sequence[int]) -> torch.Tensor:
    """Return the rows of all ranks, joined in rank order; rank r has ``counts[r]`` rows."""
    joined = rows.new_empty((sum(counts), *rows.shape[1:]))
    if joined.numel():
        each = joined[0].numel() * joined.element_size()
        out = _bytes(joined)
        comm.allgather(_bytes(rows), out=out, counts=[count * each for count in counts])
    return joined


def _bytes(x: torch.Tensor) -> Any:
    """Return the memory of a contiguous tensor as bytes: an array, or a tensor on a GPU."""
    flat = x.detach().reshape(-1).view(torch.uint8)
    return flat if flat.is_cuda else tensors.as_array(flat)


def average(comm: Communicator, parameters: Sequence[Any], zeros: bool) -> None:
    """Replace the sparse gradients of parameters by their means over the ranks; collective.

    A gradient that is None on some ranks counts as zero there.  One that is None on all ranks stays
    None, or becomes an empty sparse tensor if `zeros`.  One that is dense on a rank, where a layer
    that is not sparse has used the parameter too, becomes dense on all.
    """
    found = [_coalesced(p.grad) for p in parameters]
    kinds = np.array([_rows(gradient) for gradient in found])
    every = comm.allgather(kinds[None]).T.tolist()
    for p, own, column in zip(parameters, found, every, strict=True):
        if max(column) == min(column) == NONE and not zeros:
            continue
        if DENSE in column:
            mean = torch.zeros_like(p) if own is None else own.to_dense().contiguous()
            flat = tensors.as_array(mean) if not mean.is_cuda else mean
            comm.allreduce(flat, op="mean", out=flat)
        else:
            if own is None:
                nowhere = torch.empty(1, 0, dtype=torch.int64, device=p.device)
                own = _sparse(nowhere, p.new_empty(0, *p.shape[1:]), p.shape).coalesce()
            mean = add_up(comm, own, [max(rows, 0) for rows in column])
            mean.div_(comm.size)
        p.grad = mean


def _coalesced(gradient: Any) -> Any:
    """Return a gradient detached, a sparse one with each index once; None for None."""
    if gradient is None:
        return None
    own = gradient.detach()
    return own.coalesce() if own.is_sparse else own


def _rows(gradient: Any) -> int:
    """Return the number of rows that a coalesced gradient with one sparse dimension stores.

    NONE (-1) for None; DENSE (-2) for any other tensor, which is averaged as a dense one.
    """
    if gradient is None:
        return NONE
    if not gradient.is_sparse or gradient.sparse_dim() != 1:
        return DENSE
    return len(gradient.values())
