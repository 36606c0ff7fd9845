"""Replicas of a model: whether they are alike, and making them equal."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import zip_longest
from typing import Any

import numpy as np

from ..errors import InvalidArgument
from .framework import Framework
from .pins import choose_algorithms

Named = Sequence[tuple[str, Any]]


def check_alike(comm: Any, what: str, framework: Framework, named: Named, arrays: Named) -> None:
    """Raise InvalidArgument on every rank where parameters or buffers differ between ranks.

    Compared are names, shapes and dtypes, in order; the message says which is the first to differ.
    """
    mine = [(name, tuple(p.data.shape), str(framework.kind(p))) for name, p in named]
    mine += [(name, tuple(array.shape), str(array.dtype)) for name, array in arrays]
    layouts = comm.allgather_object(mine)
    for rank, layout in enumerate(layouts):
        for there, here in zip_longest(layout, layouts[0], fillvalue="nothing"):
            if there != here:
                raise InvalidArgument(
                    f"{what}: rank {rank} has {there} where rank 0 has {here}; the modules must "
                    "have the same parameters on all ranks"
                )


def broadcast(comm: Any, arrays: Sequence[Any], root: int) -> None:
    """Copy the arrays of `root` into those of every rank, in place."""
    for array in arrays:
        comm.broadcast(array, root=root, out=array)


class BufferSync:
    """Buffers of a model (running means, counters) made equal on all ranks after a step.

    Parameters
    ----------
    comm : Communicator
        The ranks.
    arrays : sequence of ndarray
        The buffers, which share memory with the model.
    how : {"broadcast", "average", "keep"}
        Those of one rank for all; the mean of floating ones (others of one rank); as they are.
    """

    HOW = ("broadcast", "average", "keep")

    def __init__(self, comm: Any, arrays: Sequence[np.ndarray], how: str):
        if how not in self.HOW:
            raise InvalidArgument(
                f"rank {comm.rank}: buffers={how!r}: allowed are {', '.join(map(repr, self.HOW))}"
            )
        self._comm = comm
        groups: dict[Any, list[np.ndarray]] = {}
        for array in arrays if how != "keep" else ():
            groups.setdefault(array.dtype, []).append(array)
        self._groups = []
        for dtype, group in groups.items():
            flat, algorithm = np.empty(sum(a.size for a in group), dtype), ""
            if how == "average" and _real(dtype):
                (algorithm,) = choose_algorithms(comm, [flat.nbytes], "auto", False, "allreduce")
            self._groups.append((flat, group, algorithm))

    def run(self, root: int) -> None:
        """Make them equal; `root` is whose are taken."""
        for flat, group, algorithm in self._groups:
            np.concatenate([array.reshape(-1) for array in group], out=flat)
            if algorithm:
                self._comm.allreduce(flat, op="mean", out=flat, algorithm=algorithm)
            else:
                self._comm.broadcast(flat, root=root, out=flat)
            start = 0
            for array in group:
                array[...] = flat[start : start + array.size].reshape(array.shape)
                start += array.size


def _real(dtype: np.dtype) -> bool:
    return dtype.kind in "fc" or dtype.name == "bfloat16"
