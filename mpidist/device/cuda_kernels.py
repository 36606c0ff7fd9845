"""What is queued on a CUDA device besides copies: one pass of arithmetic, and words."""

from __future__ import annotations

import ctypes
from functools import lru_cache
from typing import Any

import cupy

from ..errors import Unsupported

_AT_LEAST = 0  # CU_STREAM_WAIT_VALUE_GEQ
_COMBINES = {
    "sum": "a + b",
    "mean": "a + b",
    "prod": "a * b",
    "max": "(a != a || a >= b) ? a : b",  # as numpy: of NaN and of zeros, the first
    "min": "(a != a || a <= b) ? a : b",
    "and": "a & b",
    "or": "a | b",
    "xor": "a ^ b",
}


def write_word(pointer: int, value: int, stream: int) -> None:
    """Queue that a word of 32 bits is written."""
    _driver("cuStreamWriteValue32_v2", stream, pointer, value, 0)


def wait_word(pointer: int, value: int, stream: int) -> None:
    """Queue a wait for a word."""
    _driver("cuStreamWaitValue32_v2", stream, pointer, value, _AT_LEAST)


@lru_cache(maxsize=64)
def fold(op: str, sources: int, targets: int, divisor: int) -> Any:
    """Make the kernel that folds s0, s1, … in this order and stores into t0, t1, …."""
    lines = ["T a = s0;"]
    for k in range(1, sources):
        lines.append(f"{{ T b = s{k}; a = {_COMBINES[op]}; }}")
    lines += [f"a = a / T({divisor});"] * (divisor > 1)
    lines += [f"t{k} = a;" for k in range(targets)]
    incoming = ", ".join(f"T s{k}" for k in range(sources))
    outgoing = ", ".join(f"T t{k}" for k in range(targets))
    return cupy.ElementwiseKernel(incoming, outgoing, " ".join(lines), f"mpidist_{op}")


def _driver(name: str, stream: int, pointer: int, value: int, flags: int) -> None:
    function = getattr(ctypes.CDLL("libcuda.so.1"), name)
    status = function(
        ctypes.c_void_p(stream),
        ctypes.c_uint64(pointer),
        ctypes.c_uint32(value),
        ctypes.c_uint(flags),
    )
    if status:
        raise Unsupported(f"{name}: the driver reports status {status}")
