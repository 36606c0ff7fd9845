"""Which device this process works with; made when the first array on one is met."""

from __future__ import annotations

import os
import sys
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
_selected: list[int] = []  # the number that was chosen for this process, if one was


def kind_of_device(environ: Mapping[str, str] = os.environ) -> str:
    """Give "cuda", or "host" where the environment asks for the emulated one, for tests."""
    given = environ.get(VARIABLE, "").strip().lower() or "cuda"
    kind, colon, count = given.partition(":")
    if kind not in ("cuda", "host") or (colon and not (kind == "host" and count.isdigit())):
        raise ConfigError(
            f"{VARIABLE}={given!r}: allowed are cuda, and host, or host:4 for four: devices "
            "emulated in host memory, for tests"
        )
    return kind


def visible(environ: Mapping[str, str] = os.environ) -> tuple[str, ...]:
    """Give the UUIDs of the devices that this process may use, by their numbers."""
    if kind_of_device(environ) == "host":
        from .emulated import emulated_devices

        return emulated_devices(environ)
    from .cuda import identities

    return identities()


def taken() -> int | None:
    """Give the number of the device that this process works with; None if it may still choose."""
    if _selected:
        return _selected[0]
    found = _made.devices.get(kind_of_device())
    if found is not None:
        return found.number
    if kind_of_device() == "host":
        return None
    from .cuda import current

    return current() or None  # 0 is what nobody chose


def select(number: int) -> None:
    """Have this process work with a device: this library, cupy, and PyTorch if it is there."""
    kind = kind_of_device()
    _selected[:] = [number]
    found = _made.devices.get(kind)
    if found is None or found.number != number:
        _made.devices[kind] = _make(kind)
    torch = sys.modules.get("torch")
    if kind == "cuda" and torch is not None and torch.cuda.is_available():
        torch.cuda.set_device(number)


def why_no_device(environ: Mapping[str, str] = os.environ) -> str | None:
    """Say why there is no device to work with, or give None."""
    if kind_of_device(environ) == "host":
        shown = bool(visible(environ))
        return None if shown else "there is no emulated device that CUDA_VISIBLE_DEVICES shows"
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

        return EmulatedDevice(_selected[0] if _selected else None)
    from .cuda import CudaDevice

    return CudaDevice(_selected[0] if _selected else None)
