"""Linear sketches and fingerprints: a tensor as 31 numbers, and its bytes as one."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import Any
from zlib import crc32

import numpy as np

SUMS = 31
"""Number of sums of a sketch: a prime, so that no length of a row puts a column into one sum."""

ERROR = 1 / (2 * SUMS) ** 0.5
"""Relative standard deviation of a norm that is estimated from a sketch: 13 %."""

_PERIOD = SUMS * 2048  # elements at a time: as float64 they stay in the cache
_WORDS = 8192


SINGLE = ("float16", "bfloat16", "float32")


@cache
def _pattern(dtype: Any = np.float64) -> np.ndarray:
    """Return random signs, twice the same ones: a name's begin somewhere in the first half."""
    random = np.random.default_rng(7)
    return np.tile(random.choice([-1.0, 1.0], _PERIOD), 2).astype(dtype)


@cache
def _coefficients() -> np.ndarray:
    return np.random.default_rng(11).integers(1, 1 << 63, _WORDS, dtype=np.uint64) * 2 + 1


def _mixed(words: np.ndarray | int) -> np.ndarray:
    """Return 64-bit words, mixed so that each bit depends on all (the finaliser of splitmix64)."""
    x = np.atleast_1d(np.asarray(words, np.uint64)).copy()
    for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB)):
        x ^= x >> np.uint64(shift)
        x *= np.uint64(factor)
    return x ^ (x >> np.uint64(31))


def _sign(key: int, block: int) -> float:
    """Return the sign of a block of elements of a name."""
    return 1.0 if crc32(block.to_bytes(8, "little"), key) & 1 else -1.0


def signs(name: str, start: int, stop: int) -> np.ndarray:
    """Return the signs of elements `start` to `stop` of a tensor with this name, as float64."""
    key = crc32(name.encode())
    shift, found = key % _PERIOD, []
    while start < stop:
        block, offset = divmod(start, _PERIOD)
        end = min(stop, (block + 1) * _PERIOD)
        part = _pattern()[shift + offset : shift + offset + end - start]
        found.append(part * _sign(key, block))
        start = end
    return np.concatenate(found) if len(found) != 1 else found[0]


def sketch(name: str, values: np.ndarray, start: int = 0) -> tuple[np.ndarray, float]:
    """Return the sketch of a range of a tensor's elements, and the sum of their squares.

    `values` are consecutive elements of the flat tensor `name`, from element `start` on; complex
    numbers count as two.  Sum k, of 31 in float64, has the elements whose index is k modulo 31,
    each with its sign.

    The sketch is linear: those of the parts of a tensor, at their places, add up to that of the
    whole, and the difference of two sketches is the sketch of the difference.  The sum of its
    squares estimates the squared norm (Alon, Matias and Szegedy, 1996; Thorup and Zhang, 2004).
    """
    flat = np.ascontiguousarray(values).reshape(-1)
    if flat.dtype.kind == "c":
        flat, start = flat.view(flat.real.dtype), 2 * start
    # In float32 only the sums of 32 elements are rounded, by about one unit in the last place.
    work: Any = np.float32 if flat.dtype.name in SINGLE else np.float64
    key, signs_of = crc32(name.encode()), _pattern(work)
    shift, sums, squares, done = key % _PERIOD, np.zeros(SUMS), 0.0, 0
    # The same for all blocks: it stays in the cache.
    buffer = np.empty(min(_PERIOD, flat.size + 2 * SUMS), work)
    while done < flat.size:
        block, offset = divmod(start + done, _PERIOD)
        count = min(flat.size - done, _PERIOD - offset)
        lead = offset % SUMS  # so that the buffer's rows are the sums
        rows = -(-(lead + count) // SUMS)
        part, values = buffer[lead : lead + count], flat[done : done + count]
        buffer[:lead] = buffer[lead + count : rows * SUMS] = 0
        if values.dtype != work:
            values = values.astype(work)
        np.multiply(values, signs_of[shift + offset : shift + offset + count], out=part)
        sums += _sign(key, block) * _added(buffer[: rows * SUMS])
        # Without BLAS, whose threads would wait for each other on cores that ranks share.
        np.multiply(part, part, out=part)
        squares += float(part.sum())
        done += count
    return sums, squares


def _added(values: np.ndarray) -> np.ndarray:
    """Return the 31 sums of a flat array; long rows first, which are added fast."""
    wide = 32 * SUMS
    cut = values.size // wide * wide
    long = values[:cut].reshape(-1, wide).sum(axis=0).reshape(-1, SUMS)
    rest = values[cut:].reshape(-1, SUMS)
    return long.sum(axis=0, dtype=np.float64) + rest.sum(axis=0, dtype=np.float64)


def sketch_rows(name: str, rows: np.ndarray, ids: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return the sketch and the squared norm of each row of a batch, whatever their order.

    `rows` has shape (n, count), and `ids` are results of :func:`row_ids`.  The sketches have shape
    (n, 31), the squared norms (n,), both in float64.  The place and the signs of a row come from
    its sample's id, so that the rows of several ranks add up to the sketch of a batch that has the
    same samples in any order.
    """
    rows = np.ascontiguousarray(rows)
    if rows.dtype.kind == "c":
        rows = rows.view(rows.real.dtype)
    work: Any = np.float32 if rows.dtype.name in SINGLE else np.float64
    count, wide = rows.shape[1], 4 * SUMS
    buffer = np.empty((len(rows), -(-count // wide) * wide), work)
    buffer[:, count:] = 0
    values = rows if rows.dtype == work else rows.astype(work)
    np.multiply(values, signs(name, 0, count).astype(work), out=buffer[:, :count])
    squares = np.einsum("ij,ij->i", buffer, buffer).astype(np.float64)
    long = buffer.reshape(len(rows), -1, wide).sum(axis=1)
    sums = long.reshape(len(rows), 4, SUMS).sum(axis=1, dtype=np.float64)
    mixed = _mixed(ids)
    places = (np.arange(SUMS) + (mixed >> np.uint64(1)).astype(np.int64)[:, None] % SUMS) % SUMS
    turned = np.take_along_axis(sums, places, axis=1)
    return turned * np.where(mixed & np.uint64(1), 1.0, -1.0)[:, None], squares


def _words(rows: np.ndarray) -> np.ndarray:
    """Return the bytes of each row as words of 64 bits, filled up with zeros."""
    rows = np.ascontiguousarray(rows)
    width = rows.shape[1] * rows.dtype.itemsize
    if width % 8 == 0 and width:
        return rows.view(np.uint64)
    padded = np.zeros((len(rows), width + -width % 8), np.uint8)
    if width:
        padded[:, :width] = rows.view(np.uint8)
    return padded.view(np.uint64)


def row_ids(arrays: Sequence[np.ndarray]) -> np.ndarray:
    """Return an id of each sample of a batch, by the bytes of its rows in all arrays.

    `arrays` have the samples in their first dimension.  The result has dtype uint64; unequal
    samples have equal ids with a probability of about 2^-63.
    """
    ids = np.zeros(len(arrays[0]), np.uint64)
    for array in arrays:
        words = _words(array.reshape(len(array), -1))
        found = np.zeros(len(array), np.uint64)
        for k, start in enumerate(range(0, words.shape[1], _WORDS)):
            part = words[:, start : start + _WORDS]
            found += (part @ _coefficients()[: part.shape[1]]) * np.uint64(2 * k + 1)
        ids = _mixed(ids + found + np.uint64(1))
    return ids


def fingerprint(values: np.ndarray) -> int:
    """Return a hash of the bytes of an array in 64 bits."""
    flat = np.ascontiguousarray(values).reshape(1, -1)
    whole = flat.view(np.uint8)[0]
    cut = whole.size // 8 * 8
    words, tail = whole[:cut].view(np.uint64), bytes(whole[cut:])
    found = np.full(1, crc32(tail) + whole.size, np.uint64)
    for k, start in enumerate(range(0, words.size, _WORDS)):
        part = words[start : start + _WORDS]
        found = _mixed(found + part @ _coefficients()[: part.size] + np.uint64(k))
    return int(found[0])
