"""Which device this process works with; made when the first array on one is met."""

from __future__ import annotations

import os
import threading
from collections.abc import Mapping
from typing import Any

from ..errors import ConfigError, Unsupported
from .base import Device

VARIABLE = "MPIDIST_GPU_DEVICE"


class _Made(threading.local):
    """By thread: ranks may be threads, and each has streams of its own."""

    def __init__(self) -> None:
        self.devices: dict[str, Device] = {}


_made = _Made()


def kind_of_device(environ: Mapping[str, str] = os.environ) -> str:
    """Give "cuda", or "host" where the environment asks for the emulated one, for tests."""
    kind = environ.get(VARIABLE, "").strip().lower() or "cuda"
    if kind not in ("cuda", "host"):
        raise ConfigError(
            f"{VARIABLE}={kind!r}: allowed are cuda, and host: a device emulated in host memory, "
            "for tests"
        )
    return kind


def why_no_device(environ: Mapping[str, str] = os.environ) -> str | None:
    """Say why there is no device to work with, or give None."""
    if kind_of_device(environ) == "host":
        return None
    try:
        from .cuda import why_not
    except ImportError as error:
        return f"cupy cannot be imported ({error}): pip install cupy-cuda12x, or cupy-cuda13x"
    return why_not()


def find_device(rank: int = 0, argument: str = "", x: Any = None) -> Device:
    """Give the device; a thread works with one.

    Raises
    ------
    Unsupported
        If there is none; the message says why.
    """
    kind = kind_of_device()
    found = _made.devices.get(kind)
    if found is None:
        reason = why_no_device()
        if reason is not None:
            name = f"{type(x).__module__}.{type(x).__name__}"
            what = f"{argument} is a GPU array ({name}), but " if argument else ""
            raise Unsupported(f"rank {rank}: {what}{reason}")
        found = _made.devices[kind] = _make(kind)
    return found


def _make(kind: str) -> Device:
    if kind == "host":
        from .emulated import EmulatedDevice

        return EmulatedDevice()
    from .cuda import CudaDevice

    return CudaDevice()
