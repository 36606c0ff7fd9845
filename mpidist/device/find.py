"""The device of this process, created when the first array on a GPU is passed."""

from __future__ import annotations

import sys
import threading
from typing import Any

from ..errors import Unsupported
from .base import Device, DeviceClass


class _Made(threading.local):
    """The devices of one thread: ranks may be threads, and each has its own streams."""

    def __init__(self) -> None:
        self.devices: dict[DeviceClass | None, Device] = {}  # None: CUDA's


_made = _Made()
_selected: list[int] = []  # the device number chosen for this process, if any
_first: list[int] = []  # the device number of the first thread that used one
_installed: list[DeviceClass] = []  # the class in place of CUDA's, if any


def install_device(device_class: DeviceClass | None) -> None:
    """Use devices of another class than CUDA's in this process, or CUDA's again for None.

    For tests of code for GPUs on machines without one, and for accelerators of another kind.
    """
    _installed[:] = [] if device_class is None else [device_class]


def installed_device() -> DeviceClass | None:
    """Return the class that :func:`install_device` installed; None if devices are CUDA's."""
    return _installed[0] if _installed else None


def _device_class() -> DeviceClass:
    if _installed:
        return _installed[0]
    from .cuda import CudaDevice

    return CudaDevice


def visible() -> tuple[str, ...]:
    """Return the identity (such as a UUID) of each device visible to this process, by number."""
    return _device_class().identities()


def taken() -> int | None:
    """Return the number of the device that this process already uses, or None.

    None means that the device can still be chosen; a current device 0 may be just the default.
    """
    if _selected:
        return _selected[0]
    found = _made.devices.get(installed_device())
    if found is not None:
        return found.number
    return number_here() or _device_class().current() or None  # 0 may be just the default


def number_here() -> int | None:
    """Return the number of the device that this thread should use, or None for its current one.

    Each thread has its own current device in the CUDA runtime, and PyTorch runs backward in a
    thread in which no device was chosen for cupy.
    """
    if _selected:
        return _selected[0]
    if _installed:
        return None
    torch = sys.modules.get("torch")
    if torch is not None and torch.cuda.is_initialized():
        number = torch.cuda.current_device()
        if number:  # 0 may be just the default
            return number
    return _first[0] if _first else None


def select(number: int) -> None:
    """Make a device that of this process, for mpidist, cupy, and PyTorch if it is imported."""
    _selected[:] = [number]
    found = _made.devices.get(installed_device())
    if found is None or found.number != number:
        _make()
    torch = sys.modules.get("torch")
    if not _installed and torch is not None and torch.cuda.is_available():
        torch.cuda.set_device(number)


def why_no_device() -> str | None:
    """Return why this process cannot use a device, or None if it can."""
    try:
        return _device_class().why_not()
    except ImportError as error:
        return f"cupy cannot be imported ({error}): pip install cupy-cuda12x, or cupy-cuda13x"


def find_device(rank: int = 0, argument: str = "", x: Any = None) -> Device:
    """Return the device of this thread, created at the first call.

    Raises Unsupported if there is none, naming `rank`, and the array `x` passed as `argument`.
    """
    found = _made.devices.get(installed_device())
    if found is None:
        reason = why_no_device()
        if reason is not None:
            name = f"{type(x).__module__}.{type(x).__name__}"
            given = f"{argument} is a GPU array ({name}), but " if argument else ""
            raise Unsupported(f"rank {rank}: {given}{reason}")
        found = _make()
    return found


def _make() -> Device:
    made = _made.devices[installed_device()] = _device_class()(number_here())
    if not _installed:
        _first[:] = _first or [made.number]
    return made


def list_gpus() -> list[str]:
    """Return each GPU of this host as "NAME, MEMORY MiB"; an empty list without nvidia-smi."""
    import shutil
    import subprocess

    command = shutil.which("nvidia-smi")
    if command is None:
        return []
    query = [command, "--query-gpu=name,memory.total", "--format=csv,noheader"]
    try:
        done = subprocess.run(query, capture_output=True, text=True, timeout=10, check=True)
    except (OSError, subprocess.SubprocessError):
        return []
    return [line.strip() for line in done.stdout.splitlines() if line.strip()]
