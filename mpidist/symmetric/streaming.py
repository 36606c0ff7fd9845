"""Copies that go round the cache, for results that are too long to stay in it.

Numpy has none, so this is the one thing that is compiled, when mpidist is installed and where there
is a C compiler for x86-64; without it all goes through the cache, with the same results.
"""

from __future__ import annotations

import ctypes
import os
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from importlib.util import find_spec

import numpy as np

from ..arrays import address, overlaps
from ..errors import ConfigError, InvalidArgument
from ..measure import format_size, parse_size
from ..storage import Action, store

VARIABLE = "MPIDIST_STREAM_BYTES"
LEAST_BYTES = 8 << 20
"""From here on; where the result is read next, 1 MiB took 1.3 times as long (2 ranks, 2 MiB of
cache a core), 4 MiB as long, 16 MiB 0.86 of the time and 64 MiB 0.8; allreduce 1.4 1.2 0.94 0.88.
"""


def least_bytes(environ: Mapping[str, str] = os.environ) -> int:
    """Give the bytes of a result from which on copies go round the cache.

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


@cache
def _library() -> ctypes.CDLL | None:
    spec = find_spec(f"{__package__}._streaming")
    if spec is None or spec.origin is None:
        return None
    try:
        library = ctypes.CDLL(spec.origin)
    except OSError:  # compiled for another machine
        return None
    library.mpidist_stream.argtypes = (
        ctypes.c_size_t,
        ctypes.c_size_t,
        ctypes.c_size_t,
        ctypes.c_int,
    )
    library.mpidist_stream.restype = None
    return library


@cache
def store_width() -> int:
    """Give the bytes of one streaming store; 0 where there are none, or nothing was compiled."""
    library = _library()
    return 0 if library is None else library.mpidist_stream_width()


def described() -> str:
    """Tell in a line whether, and from where on, copies go round the cache."""
    if store_width() == 0:
        return "none: mpidist was installed without a C compiler for x86-64"
    least = least_bytes()
    off = least == sys.maxsize
    which = f"turned off by {VARIABLE}" if off else f"for results from {format_size(least)}"
    return f"{8 * store_width()} bits, {which}"


def streams(nbytes: int) -> bool:
    """Tell whether the copies that make a result of so many bytes go round the cache."""
    return nbytes >= least_bytes() and store_width() > 0


@dataclass(frozen=True, slots=True)
class _Streamed:
    """The action of a copy; it has the arrays for them to live as long."""

    target: np.ndarray
    source: np.ndarray
    arguments: tuple[int, int, int, int]

    def __call__(self) -> None:
        library = _library()
        assert library is not None
        library.mpidist_stream(*self.arguments)


def stream(target: np.ndarray, source: np.ndarray, width: int | None = None) -> Action:
    """Give the action that copies an array into another of its length and dtype, round the cache.

    Parameters
    ----------
    target, source : ndarray
        Contiguous, of the same length and dtype.
    width : int, optional
        Bytes of one store; by default the widest that this processor has.
    """
    if overlaps(target, source) or target.nbytes == 0:
        return store(target, source)
    arguments = address(target), address(source), target.nbytes, width or store_width()
    return _Streamed(target, source, arguments)
