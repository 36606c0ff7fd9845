"""The device of this process, created when the first array on a GPU is passed."""

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
    """The devices of a thread: ranks may be threads, and each has streams of its own."""

    def __init__(self) -> None:
        self.devices: dict[str, Device] = {}


_made = _Made()
_selected: list[int] = []  # the device number chosen for this process, if any
_first: list[int] = []  # the device number of the first thread that used one


def kind_of_device(environ: Mapping[str, str] = os.environ) -> str:
    """Return "cuda", or "host" if the environment selects the emulated device, for tests."""
    given = environ.get(VARIABLE, "").strip().lower() or "cuda"
    kind, colon, count = given.partition(":")
    if kind not in ("cuda", "host") or (colon and not (kind == "host" and count.isdigit())):
        raise ConfigError(
            f"{VARIABLE}={given!r}: allowed are cuda, and host, or host:4 for four: devices "
            "emulated in host memory, for tests"
        )
    return kind


def visible(environ: Mapping[str, str] = os.environ) -> tuple[str, ...]:
    """Return the UUIDs of the devices that this process may use, by their numbers."""
    if kind_of_device(environ) == "host":
        from .emulated import emulated_devices

        return emulated_devices(environ)
    from .cuda import identities

    return identities()


def taken() -> int | None:
    """Return the number of this process's device; None if it can still be chosen."""
    if _selected:
        return _selected[0]
    found = _made.devices.get(kind_of_device())
    if found is not None:
        return found.number
    if kind_of_device() == "host":
        return None
    from .cuda import current

    return number_here(kind_of_device()) or current() or None  # 0 may be just the default


def number_here(kind: str) -> int | None:
    """Return the number of the device that this thread should use, or None if none was chosen.

    Each thread has its own current device in the CUDA runtime, and PyTorch runs backward in a
    thread in which no device was chosen for cupy.
    """
    if _selected:
        return _selected[0]
    torch = sys.modules.get("torch")
    if kind == "cuda" and torch is not None and torch.cuda.is_initialized():
        number = torch.cuda.current_device()
        if number:  # 0 may be just the default
            return number
    return _first[0] if _first and kind == "cuda" else None


def select(number: int) -> None:
    """Select the device of this process, for this library, cupy, and PyTorch if it is imported."""
    kind = kind_of_device()
    _selected[:] = [number]
    found = _made.devices.get(kind)
    if found is None or found.number != number:
        _made.devices[kind] = _make(kind)
    torch = sys.modules.get("torch")
    if kind == "cuda" and torch is not None and torch.cuda.is_available():
        torch.cuda.set_device(number)


def why_no_device(environ: Mapping[str, str] = os.environ) -> str | None:
    """Return why this process can use no device, or None if it can."""
    if kind_of_device(environ) == "host":
        shown = bool(visible(environ))
        return None if shown else "CUDA_VISIBLE_DEVICES shows no emulated device"
    try:
        from .cuda import why_not
    except ImportError as error:
        return f"cupy cannot be imported ({error}): pip install cupy-cuda12x, or cupy-cuda13x"
    return why_not()


def find_device(rank: int = 0, argument: str = "", x: Any = None) -> Device:
    """Return the device of this thread, created at the first call.

    Raises
    ------
    Unsupported
        If there is no device, with the reason.
    """
    kind = kind_of_device()
    found = _made.devices.get(kind)
    if found is None:
        reason = why_no_device()
        if reason is not None:
            name = f"{type(x).__module__}.{type(x).__name__}"
            given = f"{argument} is a GPU array ({name}), but " if argument else ""
            raise Unsupported(f"rank {rank}: {given}{reason}")
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
