"""What is queued on a CUDA device besides copies: one pass of arithmetic, and words."""

from __future__ import annotations

import ctypes
from functools import lru_cache
from typing import Any

import cupy

from ..errors import Unsupported
from .cuda_arithmetic import FUNCTIONS, OPTIONS, fold_source

_AT_LEAST = 0  # CU_STREAM_WAIT_VALUE_GEQ
_FLUSH = 1 << 30  # CU_STREAM_WAIT_VALUE_FLUSH


def write_word(pointer: int, value: int, stream: int) -> None:
    """Queue that a word of 32 bits is written."""
    _queue_word("cuStreamWriteValue32_v2", stream, pointer, value, 0)


def wait_word(pointer: int, value: int, stream: int, flush: bool) -> None:
    """Queue a wait for a word; with `flush`, until what other GPUs wrote before it is there too."""
    flags = _AT_LEAST | (_FLUSH if flush else 0)
    _queue_word("cuStreamWaitValue32_v2", stream, pointer, value, flags)


@lru_cache(maxsize=64)
def fold(op: str, sources: int, targets: int, divisor: int) -> Any:
    """Make the kernel that folds s0, s1, … in this order and stores into t0, t1, …."""
    return cupy.ElementwiseKernel(
        ", ".join(f"T s{k}" for k in range(sources)),
        ", ".join(f"T t{k}" for k in range(targets)),
        fold_source(op, sources, divisor, targets),
        f"mpidist_{op}",
        preamble=FUNCTIONS,
        no_return=True,
        options=OPTIONS,
    )


def _queue_word(name: str, stream: int, pointer: int, value: int, flags: int) -> None:
    status = _driver(name)(
        ctypes.c_void_p(stream),
        ctypes.c_uint64(pointer),
        ctypes.c_uint32(value),
        ctypes.c_uint(flags),
    )
    if status:
        raise Unsupported(f"{name}: the driver reports status {status}")


@lru_cache(maxsize=2)
def _driver(name: str) -> Any:
    """Find a function of the driver, once: to look costs more than to call."""
    try:
        return getattr(ctypes.CDLL("libcuda.so.1"), name)
    except (OSError, AttributeError) as error:
        raise Unsupported(f"the CUDA driver has no {name}, it is too old: {error}") from None
