"""The compiled module, and what is passed to it: ``compiled.h`` once more, for Python."""

from __future__ import annotations

import ctypes
import importlib
from typing import Any

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
