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
_first: list[int] = []  # that of the first device which a thread of it met


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

    return number_here(kind_of_device()) or current() or None  # 0 is what nobody chose


def number_here(kind: str) -> int | None:
    """Give the number of the device that this thread is to work with, or None if nothing says so.

    The runtime's current device is one for each thread, and that of PyTorch need not be cupy's: its
    backward runs in a thread of its own, in which nobody has chosen.
    """
    if _selected:
        return _selected[0]
    torch = sys.modules.get("torch")
    if kind == "cuda" and torch is not None and torch.cuda.is_initialized():
        number = torch.cuda.current_device()
        if number:  # 0 is what nobody chose
            return number
    return _first[0] if _first and kind == "cuda" else None


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
    number = number_here(kind)
    if kind == "host":
        from .emulated import EmulatedDevice

        return EmulatedDevice(number)
    from .cuda import CudaDevice

    made = CudaDevice(number)
    _first[:] = _first or [made.number]
    return made
