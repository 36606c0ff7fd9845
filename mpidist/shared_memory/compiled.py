"""Sums of several arrays into several places in one pass, and copies round the cache.

Numpy has neither, so they are compiled, when mpidist is installed and where there is a C compiler
for x86-64; so is what runs them one after another (:mod:`.steps`).  Without it there are more
passes, with the same results.
"""

from __future__ import annotations

import ctypes
import importlib
import os
import sys
from collections.abc import Mapping, Sequence
from functools import cache, partial
from typing import Any

import numpy as np

from ..backends.program import Action, store
from ..calls.arrays import address, overlaps
from ..errors import ConfigError, InvalidArgument
from ..measure import format_size, parse_size

COPY, SUM, ARRIVE, MEET, CHECK, CALL = KINDS = range(6)  # enum kind


class Copy(ctypes.Structure):
    """``struct copy``; arguments that are converted at each call would cost a microsecond."""

    _fields_ = (
        ("target", ctypes.c_size_t),
        ("source", ctypes.c_size_t),
        ("count", ctypes.c_size_t),
        ("width", ctypes.c_int),
    )


class Sum(ctypes.Structure):
    """``struct sum``."""

    _fields_ = (
        ("arrays", ctypes.c_void_p),
        ("count", ctypes.c_size_t),
        *((name, ctypes.c_int) for name in ("sources", "targets", "itemsize")),
        *((name, ctypes.c_int) for name in ("divisor", "streamed", "width")),
    )


class Meeting(ctypes.Structure):
    """``struct meeting``."""

    _fields_ = (
        ("mine", ctypes.c_size_t),
        ("others", ctypes.c_void_p),
        *((name, ctypes.c_int) for name in ("count", "looks", "yields", "prints", "history")),
        ("mark", ctypes.c_int64),
    )


class Check(ctypes.Structure):
    """``struct check``."""

    _fields_ = (
        ("words", ctypes.c_void_p),
        ("expected", ctypes.c_void_p),
        ("count", ctypes.c_int),
    )


class Step(ctypes.Structure):
    """``struct step``."""

    _fields_ = (("kind", ctypes.c_int64), ("what", ctypes.c_void_p))


class Program(ctypes.Structure):
    """``struct program``."""

    _fields_ = (("steps", ctypes.c_void_p), ("count", ctypes.c_int))


LAYOUT = (*map(ctypes.sizeof, (Copy, Sum, Meeting, Check, Step, Program)), len(KINDS))
"""What both must agree on: a module may be left over that was compiled of other sources."""


def load() -> tuple[Any, str]:
    """Give the compiled module, or None; and why there is nothing to be called, if so."""
    try:
        found: Any = importlib.import_module(f"{__package__}._compiled")
    except ModuleNotFoundError:
        return None, "nothing: it was installed without a C compiler, or without Python's headers"
    except ImportError as error:
        return None, f"nothing: what was compiled cannot be loaded; install again ({error})"
    if getattr(found, "layout", tuple)() != LAYOUT:
        return None, f"nothing: {found.__file__} is of another version; install again"
    return found, "" if found.width() else "nothing: there is only code for x86-64"


_compiled, WHY_NOT = load()

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
    told = Copy(address(target), address(source), target.nbytes, 0)
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
    told = Copy(address(target), address(source), target.nbytes, width or vector_width())
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
    told = Sum(
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


VARIABLE = "MPIDIST_STREAM_BYTES"
LEAST_BYTES = 4 << 20
"""From here on: an allreduce and the first reading of its result, together, took 1.10 of the time
at 1 MiB, 1.03 at 2 MiB, 0.93 at 4 MiB, 0.82 at 16 MiB (2 ranks, 2 MiB of cache a core; 4 ranks on
these 2 cores 0.90 0.94 0.84 0.86; allgather alike).  A benchmark, which reads nothing, gains from
64 KiB on.
"""


def least_bytes(environ: Mapping[str, str] = os.environ) -> int:
    """Give the bytes of a result from which on it goes round the cache.

    Raises
    ------
    ConfigError
        If ``MPIDIST_STREAM_BYTES`` is neither a size nor ``none``.
    """
    text = environ.get(VARIABLE, "").strip()
    if text.lower() == "none":
        return sys.maxsize
    try:
        return parse_size(text) if text else LEAST_BYTES
    except InvalidArgument as error:
        raise ConfigError(f"{VARIABLE}={text!r}: allowed are none, and a size; {error}") from None


def streams(nbytes: int) -> bool:
    """Tell whether a result of so many bytes goes round the cache."""
    return nbytes >= least_bytes() and vector_width() > 0


def described() -> str:
    """Tell in a line what was compiled, and from where on results go round the cache."""
    if vector_width() == 0:
        return WHY_NOT
    least = least_bytes()
    never = f"no streaming stores: {VARIABLE}=none"
    which = never if least == sys.maxsize else f"streaming stores from {format_size(least)}"
    return f"{8 * vector_width()} bits, {which}"
