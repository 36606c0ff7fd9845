"""Sums of several arrays into several places in one pass, and copies round the cache.

Numpy has neither, so they are compiled, when mpidist is installed and where there is a C compiler
for x86-64; so is what runs them one after another (:mod:`.steps`).  Without it there are more
passes, with the same results.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from functools import cache, partial
from typing import Any

import numpy as np

from ..arrays import address, overlaps
from ..storage import Action, store
from . import structures

_compiled, WHY_NOT = structures.load()

_LINE = 64  # bytes
_SUMMED = (np.dtype(np.float32), np.dtype(np.float64))


@cache
def vector_width() -> int:
    """Give the bytes of the widest vector; 0 if nothing was compiled for this machine."""
    return 0 if _compiled is None else _compiled.width()


def _bind(name: str, told: Any, *kept: Any) -> Action:
    """Give the action that calls a function, without Python's lock; `kept` lives as long."""
    told.kept = kept
    return partial(function(name), told)


def function(name: str) -> Any:
    """Give a compiled function; there are some where there is a width of vectors."""
    return getattr(_compiled, name)


def copy(target: np.ndarray, source: np.ndarray) -> Any:
    """Give the structure of a copy through the cache, of arrays that do not overlap."""
    told = structures.Copy(address(target), address(source), target.nbytes, 0)
    told.kept = target, source
    return told


def stream(target: np.ndarray, source: np.ndarray, width: int | None = None) -> Action:
    """Give the action that copies an array into another of its length and dtype, round the cache.

    Parameters
    ----------
    target, source : ndarray
        Contiguous, of the same length and dtype.
    width : int, optional
        Bytes of a vector; by default the widest that this processor has.
    """
    if not vector_width() or overlaps(target, source) or target.nbytes == 0:
        return store(target, source)
    told = structures.Copy(address(target), address(source), target.nbytes, width or vector_width())
    return _bind("copy", told, target, source)


def one_pass(
    sources: Sequence[np.ndarray],
    targets: Sequence[np.ndarray],
    divisor: int = 0,
    streamed: bool = False,
    width: int | None = None,
) -> Action | None:
    """Give the action that sums arrays and stores the result in several places.

    Parameters
    ----------
    sources, targets : sequence of ndarray
        Contiguous, of the same length and dtype.  The sum is taken in the order of `sources`, of
        which a target may be one.
    divisor : int, optional
        What the sum is divided by; 0 for nothing.
    streamed : bool, optional
        Store round the cache.
    width : int, optional
        Bytes of a vector; by default the widest that this processor has.

    Returns
    -------
    callable or None
        None where this cannot be done so: it can for float32 and float64 in memory as it has to be
        aligned, where no target overlaps a source in part; and if it is streamed, where all targets
        begin at the same place of a line of the cache.
    """
    first = targets[0]
    if not vector_width() or first.dtype not in _SUMMED:
        return None
    whole, itemsize = [address(x) for x in (*sources, *targets)], first.itemsize
    apart = not any(
        overlaps(target, source) and address(target) != address(source)
        for target in targets
        for source in sources
    )
    alike = len({start % _LINE for start in whole[len(sources) :]}) == 1 or not streamed
    if not (apart and alike and first.size) or any(start % itemsize for start in whole):
        return None
    addresses = (ctypes.c_size_t * len(whole))(*whole)
    told = structures.Sum(
        arrays=ctypes.addressof(addresses),
        count=first.size,
        sources=len(sources),
        targets=len(targets),
        itemsize=itemsize,
        divisor=divisor,
        streamed=streamed,
        width=width or vector_width(),
    )
    return _bind("sum", told, addresses, *sources, *targets)
