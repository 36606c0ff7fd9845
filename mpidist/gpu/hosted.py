"""The call on the host that does a chunk's work, in the memory of a slot."""

from __future__ import annotations

from typing import Any

import numpy as np

from .. import prepare
from ..call import Call
from ..prepared import Place, Prepared
from .chunks import Chunk, elements

_SHARED = ("allreduce", "reduce", "broadcast")  # result and input have the same length


def bytes_needed(call: Call, chunk: Chunk) -> int:
    """Give how much host memory a chunk takes; the input begins where the result ends."""
    brings, gets = elements(chunk.brings), elements(chunk.gets)
    one = max(brings, gets) if call.collective in _SHARED else brings + gets
    return one * call.dtype.itemsize


def views(call: Call, chunk: Chunk, memory: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Give the input and the result of a chunk, in host memory of :func:`bytes_needed` bytes."""
    size = call.dtype.itemsize
    brings, gets = elements(chunk.brings) * size, elements(chunk.gets) * size
    start = 0 if call.collective in _SHARED else gets
    return memory[start : start + brings].view(call.dtype), memory[:gets].view(call.dtype)


def hosted(call: Call, chunk: Chunk, x: np.ndarray, out: np.ndarray) -> Prepared:
    """Prepare the call of a chunk whose input and result lie in `x` and `out`."""
    place, op, root = Place(call.rank, call.size), call.op, call.root
    target: Any = out if call.out is not None else None
    name = call.collective
    if name in ("allreduce", "reduce"):
        assert op is not None
        return prepare.reducing(name, x, op, target, place, root)
    if name == "broadcast":
        return prepare.broadcast(x if call.x is not None else out, None, place, root)
    if name == "reduce_scatter":
        assert op is not None
        return prepare.reduce_scatter(x, op, out, chunk.counts, place)
    if name in ("allgather", "gather"):
        return prepare.gathering(name, x, target, chunk.counts, place, root)
    if name == "scatter":
        return prepare.scatter(x, out, chunk.counts, place, root, None)
    assert name == "alltoall"
    sends = None if call.even else chunk.counts
    return prepare.alltoall(x, out, sends, None if call.even else chunk.out_counts, place)
