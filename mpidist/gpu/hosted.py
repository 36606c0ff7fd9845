"""The call on the host that does a chunk's work, in the memory of a slot."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from ..call import Call
from ..prepared import Prepared
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
    """Return the call of a chunk; its arguments were checked as those of the whole call."""
    source = None if call.x is None else x
    target = None if call.out is None else out
    in_place = call.collective in _SHARED and source is not None and target is not None
    part = replace(
        call,
        x=source,
        out=source if in_place else target,
        counts=chunk.counts,
        out_counts=chunk.out_counts,
        in_place=in_place,
        even=call.even if call.collective == "alltoall" else len(set(chunk.counts)) <= 1,
    )
    return Prepared(part, None)
