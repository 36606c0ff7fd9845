"""The digest of an array, by which ranks compare their values: four sums over its words."""

from __future__ import annotations

import numpy as np

from ..calls.arrays import address
from . import compiled

SUMS = 4
_WORDS = 1 << 14  # of a piece in numpy, which stays in the cache
_MODULUS = 1 << 64


def digest(x: np.ndarray) -> tuple[int, ...]:
    """Return the digest of the bytes of an array, read at the speed of the memory.

    The array has any dtype but that of Python objects; one that is not contiguous is copied.  Equal
    bytes have equal digests, so -0.0 differs from 0.0, and NaNs differ by their payload.

    A digest has four sums modulo 2⁶⁴ over the 64-bit words, the last one filled up with zeros: of
    their low halves, of their high halves, and of both times the position of the word, from 1 on.
    Up to 2³² words (32 GiB) any change of one or two words is found, also their exchange.  For let
    a half of the words at i and j change by d and e: if d + e and i d + j e are 0, so is (i - j) d,
    and that is less than 2⁶⁴.  It is no protection against changes that somebody has made up.

    Source: J. G. Fletcher, "An Arithmetic Checksum for Serial Transmissions", IEEE Transactions on
    Communications 30 (1982).
    """
    data = np.ascontiguousarray(x).reshape(-1).view(np.uint8)
    if compiled.runs_steps():
        return compiled.function("digest")(address(data), data.nbytes)
    return by_numpy(data)


def by_numpy(data: np.ndarray) -> tuple[int, ...]:
    """Return the digest of contiguous bytes, without compiled code."""
    whole = data.size // 8
    last = np.zeros(8, np.uint8)
    last[: data.size % 8] = data[8 * whole :]
    words, positions = data[: 8 * whole].view(np.uint64), np.arange(1, _WORDS + 1, dtype=np.uint64)
    sums = [0] * SUMS
    for start in (*range(0, whole, _WORDS), whole):
        part = words[start : start + _WORDS] if start < whole else last.view(np.uint64)
        for k, half in enumerate((part & np.uint64(0xFFFFFFFF), part >> np.uint64(32))):
            total = int(half.sum())
            sums[k] += total
            sums[k + 2] += start * total + int((half * positions[: half.size]).sum())
    return tuple(total % _MODULUS for total in sums)
