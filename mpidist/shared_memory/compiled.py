"""Compiled functions: sums of several arrays in one pass, and copies with streaming stores.

Streaming (non-temporal) stores bypass the cache.  Numpy has neither function, so they are compiled
when mpidist is installed, where there is a C compiler for x86-64; so is the function that runs the
steps of a kernel (:mod:`.steps`).  Without the compiled module, sums take more passes, with the
same results.

The classes repeat the structures in compiled.h; kernels use `stream`, `streams` and `one_pass`.
"""

from __future__ import annotations

import ctypes
import importlib
import os
import sys
from collections.abc import Mapping, Sequence
from functools import cache, partial
from pathlib import Path
from typing import Any

import numpy as np

from ..backends.program import Action, store
from ..calls.arrays import address, overlaps
from ..errors import ConfigError, InvalidArgument
from ..measure import format_size, parse_size

COPY, SUM, ARRIVE, MEET, CHECK, CALL = KINDS = range(6)  # the C type enum kind
INT8, INT16, INT32, INT64, FLOAT16, BFLOAT16, FLOAT32, FLOAT64 = NUMBERS = range(8)  # enum number
IN_ORDER, AS_TREE, EXACTLY = range(3)  # enum grouping


class Copy(ctypes.Structure):
    """The C type ``struct copy``: the addresses and the length of a copy.

    A structure, because converting separate arguments at each call would take a microsecond.
    """

    _fields_ = (
        ("target", ctypes.c_size_t),
        ("source", ctypes.c_size_t),
        ("count", ctypes.c_size_t),
        ("width", ctypes.c_int),
    )


class Sum(ctypes.Structure):
    """The C type ``struct sum``: the arrays and parameters of a sum."""

    _fields_ = (
        ("arrays", ctypes.c_void_p),
        ("count", ctypes.c_size_t),
        *((name, ctypes.c_int) for name in ("sources", "targets", "number")),
        *((name, ctypes.c_int) for name in ("divisor", "streamed", "width", "grouping")),
    )


class Pace(ctypes.Structure):
    """The C type ``struct pace``: ticks a KiB of stores where others have read."""

    _fields_ = (
        *((name, ctypes.c_uint64) for name in ("ordinary", "streaming")),
        *((name, ctypes.c_int64) for name in ("copies", "left", "slow", "fast", "patience")),
    )


class Meeting(ctypes.Structure):
    """The C type ``struct meeting``: a wait for other ranks, at an operation or in a barrier."""

    _fields_ = (
        ("mine", ctypes.c_size_t),
        ("others", ctypes.c_void_p),
        *((name, ctypes.c_int) for name in ("count", "looks", "yields", "prints", "history")),
        ("mark", ctypes.c_int64),
        ("flight", ctypes.c_void_p),
    )


class Flight(ctypes.Structure):
    """The C type ``struct flight``: where a communicator's operations are recorded."""

    _fields_ = (
        *((name, ctypes.c_size_t) for name in ("count", "ring", "track")),
        ("serial", ctypes.c_int64),
    )


class Check(ctypes.Structure):
    """The C type ``struct check``: words, and the values with which a Python call is skipped."""

    _fields_ = (("words", ctypes.c_void_p), ("expected", ctypes.c_void_p), ("count", ctypes.c_int))


class Step(ctypes.Structure):
    """The C type ``struct step``: the kind of a step, and the structure of its arguments."""

    _fields_ = (("kind", ctypes.c_int64), ("what", ctypes.c_void_p))


class Program(ctypes.Structure):
    """The C type ``struct program``: the steps of a kernel."""

    _fields_ = (("steps", ctypes.c_void_p), ("count", ctypes.c_int), ("flight", ctypes.c_void_p))


_STRUCTURES = Copy, Sum, Meeting, Check, Step, Program, Pace, Flight
LAYOUT = (*map(ctypes.sizeof, _STRUCTURES), len(KINDS), len(NUMBERS))
"""The sizes of the structures, and the numbers of kinds of steps and of types of numbers.

A compiled module with another layout is left over from an older version and is not used.
"""


def load() -> tuple[Any, str]:
    """Return the compiled module or None, and why it cannot be used ("" if it can)."""
    try:
        found: Any = importlib.import_module(f"{__package__}._functions")
    except ModuleNotFoundError:
        if (Path(__file__).parents[2] / "setup.py").exists():
            return None, (
                "none: imported from a checkout in which nothing was compiled: pip install -e . "
                "there, with a C compiler and Python's headers"
            )
        return None, "none: installed without a C compiler, or without Python's headers"
    except ImportError as error:
        return None, f"none: the compiled module cannot be loaded; install again ({error})"
    if getattr(found, "layout", tuple)() != LAYOUT or not hasattr(found, "digest"):
        return None, f"none: {found.__file__} is of another version; install again"
    if not found.runs_steps():
        return found, "none: there is only code for 64-bit processors, by GCC or Clang"
    return found, "" if found.width() else "no vectors: there is only code for x86-64"


_compiled, WHY_NOT = load()

_LINE = 64  # bytes of a cache line
_MEASURED = -1  # the width of a copy that times itself
LEAST_DEPOSIT = 16 << 10  # bytes of the smallest one
_SUMMED = {
    **{"int8": INT8, "int16": INT16, "int32": INT32, "int64": INT64},
    **{"uint8": INT8, "uint16": INT16, "uint32": INT32, "uint64": INT64},
    **{"float16": FLOAT16, "bfloat16": BFLOAT16, "float32": FLOAT32, "float64": FLOAT64},
    **{"complex64": FLOAT32, "complex128": FLOAT64},  # a pair of them
}


@cache
def _number(dtype: np.dtype, terms: int, divided: bool, width: int, grouping: int) -> int | None:
    """Return the type of number as which arrays of a dtype are summed; None if in numpy only."""
    number = _SUMMED.get(dtype.name) if dtype.isnative else None
    if grouping == EXACTLY:
        return number
    if grouping == AS_TREE and number not in (FLOAT32, FLOAT64):
        return None
    if divided and dtype.kind in "iuc":  # numpy divides by a complex number, which rounds otherwise
        return None
    if number in (FLOAT16, BFLOAT16) and terms == 1 and not divided:
        return None  # a signaling NaN, not made quiet by arithmetic, would get other bits
    return None if number == FLOAT16 and width < 32 else number


@cache
def vector_width() -> int:
    """Return the width in bytes of the widest vector; 0 without such code for this processor."""
    return 0 if _compiled is None else _compiled.width()


@cache
def runs_steps() -> bool:
    """Return whether there is compiled code for the steps of kernels on this machine."""
    return _compiled is not None and _compiled.runs_steps()


def _bind(name: str, arguments: Any, *references: Any) -> Action:
    """Return the action that calls compiled function `name` without Python's lock (the GIL).

    `arguments` is the C structure for the function.  The action keeps `references` alive.
    """
    arguments.references = references
    action = partial(function(name), ctypes.addressof(arguments))
    action.structure = arguments  # type: ignore[attr-defined]  # for as long as the action lives
    return action


def function(name: str) -> Any:
    """Return a compiled function by name; valid only if `runs_steps`."""
    return getattr(_compiled, name)


def copy(target: np.ndarray, source: np.ndarray) -> Any:
    """Return the C structure (:class:`Copy`) of an ordinary copy, which goes through the cache."""
    arguments = Copy(address(target), address(source), target.nbytes, 0)
    arguments.references = target, source
    return arguments


def stream(target: np.ndarray, source: np.ndarray, width: int | None = None) -> Action:
    """Return the action that copies an array with streaming stores, which bypass the cache.

    Without compiled code, and for overlapping arrays, it is an ordinary copy.  The arrays are
    contiguous, of one length and dtype; `width` is the bytes of a vector, by default the widest
    that this processor has.
    """
    if not vector_width() or overlaps(target, source) or target.nbytes == 0:
        return store(target, source)
    arguments = Copy(address(target), address(source), target.nbytes, width or vector_width())
    return _bind("copy", arguments, target, source)


def deposit(target: np.ndarray, source: np.ndarray) -> Action:
    """Return the action that copies an array into memory that other ranks have read before.

    Long copies time themselves, and use streaming stores while ordinary ones are slow there, unless
    ``MPIDIST_STREAM_BYTES`` is ``none``.
    """
    short = target.nbytes < LEAST_DEPOSIT or not vector_width()
    if short or overlaps(target, source) or least_bytes() == sys.maxsize:
        return store(target, source)
    arguments = Copy(address(target), address(source), target.nbytes, _MEASURED)
    return _bind("copy", arguments, target, source)


def pace() -> Pace | None:
    """Return what the deposits of this process have cost; None without compiled code for it."""
    return Pace.from_address(_compiled.pace()) if vector_width() else None


def described_pace() -> str:
    """Return a text on the stores of deposits, for the end of a sentence; "" before they matter."""
    found = pace()
    if found is None or not (found.ordinary and found.streaming):
        return ""
    times = found.ordinary / found.streaming
    way = "streaming" if found.left > 0 else "ordinary"
    return f"; by {way} stores (ordinary ones take {times:.1f} times as long as streaming ones)"


def one_pass(
    sources: Sequence[np.ndarray],
    targets: Sequence[np.ndarray],
    divisor: int = 0,
    streamed: bool = False,
    width: int | None = None,
    grouping: int = IN_ORDER,
) -> Action | None:
    """Return the action that sums arrays in one pass and stores the result in several targets.

    Contiguous arrays of one length and dtype are added in the order of `sources`; a target may be
    one of them.  `width` is the bytes of a vector, by default the widest that this processor has.
    The `grouping` is that of a C sum: AS_TREE, for floats of four bytes and more and their complex
    numbers; or EXACTLY, for two or more floats or complex numbers, with one rounding.

    It is None if there is no compiled function for these arrays.  There is one for integers and
    complex numbers (without a divisor), float16 (with vectors of 32 bytes and more), bfloat16,
    float32 and float64 in aligned memory if no target partly overlaps a source; with streaming
    stores, all targets must also begin at the same offset in a cache line.  Half precision is added
    in float32, divided before it is added, and rounded once.
    """
    first, width = targets[0], width or vector_width()
    dtype = first.dtype
    number = _number(dtype, len(sources), divisor > 0, width, grouping)
    if not vector_width() or number is None:
        return None
    nbytes = first.nbytes
    itemsize = first.itemsize >> (first.dtype.kind == "c")  # a complex number is a pair
    starts, bases = [*map(address, sources)], [*map(address, targets)]
    for base in bases:
        if base % itemsize or not nbytes or (streamed and (base - bases[0]) % _LINE):
            return None
        for start in starts:
            if start % itemsize or 0 < abs(start - base) < nbytes:  # partly overlaps
                return None
    starts += bases
    addresses = (ctypes.c_size_t * len(starts))(*starts)
    arguments = Sum(
        arrays=ctypes.addressof(addresses),
        count=nbytes // itemsize,
        sources=len(sources),
        targets=len(targets),
        number=number,
        divisor=divisor,
        streamed=streamed,
        width=width,
        grouping=grouping,
    )
    return _bind("sum", arguments, addresses, *sources, *targets)


VARIABLE = "MPIDIST_STREAM_BYTES"
LEAST_BYTES = 4 << 20
"""The default for the smallest result, in bytes, that is written with streaming stores.

With them, an allreduce and the first reading of its result, together, took 1.10 of the time at
1 MiB, 1.03 at 2 MiB, 0.93 at 4 MiB, 0.82 at 16 MiB (2 ranks, 2 MiB of cache per core; 4 ranks on
these 2 cores 0.90, 0.94, 0.84, 0.86; similar for allgather).  A benchmark, which does not read the
result, gains from 64 KiB on.
"""


def least_bytes(environ: Mapping[str, str] = os.environ) -> int:
    """Return the bytes of the smallest result that is written with streaming stores.

    It is `LEAST_BYTES` (4 MiB) unless ``MPIDIST_STREAM_BYTES``, a size, sets it; ``none`` sets it
    to the largest integer, so that no result is.
    """
    text = environ.get(VARIABLE, "").strip()
    if text.lower() == "none":
        return sys.maxsize
    try:
        return parse_size(text) if text else LEAST_BYTES
    except InvalidArgument as error:
        raise ConfigError(
            f"{VARIABLE}={text!r}: expected a size, or none for no streaming stores; {error}"
        ) from None


def streams(nbytes: int) -> bool:
    """Return whether a result of `nbytes` is written with streaming stores."""
    return nbytes >= least_bytes() and vector_width() > 0


def described() -> str:
    """Return a text on the compiled code: vector width and streaming stores, or why not used."""
    if vector_width() == 0:
        return WHY_NOT
    least = least_bytes()
    never = f"no streaming stores: {VARIABLE}=none"
    which = never if least == sys.maxsize else f"streaming stores from {format_size(least)}"
    return f"{8 * vector_width()} bits, {which}"
