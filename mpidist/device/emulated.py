"""A device emulated in host memory, by which the code for GPUs runs where there is none.

It is for tests, and never chosen unless ``MPIDIST_GPU_DEVICE=host`` asks for it.  Its streams are
lazy: what is queued is done when someone waits for it, and no sooner.  So whoever relies on a copy
for which nobody waited sees it missing, every time, where on a GPU that would be luck.
"""

from __future__ import annotations

import ctypes
import os
import weakref
from collections.abc import Iterable, Mapping
from itertools import takewhile
from typing import Any

import numpy as np

from ..errors import InvalidArgument
from .emulated_array import EmulatedArray
from .emulated_shared import Shared
from .emulated_stream import Action, EmulatedEvent, Stream

VARIABLE = "MPIDIST_GPU_DEVICE"


def emulated_devices(environ: Mapping[str, str] = os.environ) -> tuple[str, ...]:
    """Give the UUIDs of the devices that ``host:4`` asks for, as CUDA_VISIBLE_DEVICES leaves them.

    Without a number there is one for each process.
    """
    count = environ.get(VARIABLE, "").partition(":")[2]
    if not count:
        return (f"emulated-{os.getpid()}",)
    numbers = shown(environ)
    every = [str(k) for k in range(int(count))] if numbers is None else numbers.split(",")
    known = takewhile(lambda k: k.strip().isdigit() and int(k) < int(count), every)
    return tuple(f"emulated-{int(k)}" for k in known)


def shown(environ: Mapping[str, str]) -> str | None:
    """Give the numbers of the devices that are shown to this process; None for all.

    As for CUDA, the first that there is not ends the list.
    """
    return environ.get("CUDA_VISIBLE_DEVICES")


class EmulatedDevice(Shared):
    """See :class:`~mpidist.device.base.Device`.

    Attributes
    ----------
    copied : int
        Bytes whose copying was queued: for tests of what goes where.
    """

    name, emulated = "host", True

    def __init__(self, number: int | None = None) -> None:
        self.number = number or 0
        self._several = emulated_devices() if ":" in os.environ.get(VARIABLE, "") else None
        self._streams: dict[int, Stream] = {0: Stream()}
        super().__init__()
        self._current = 0
        self._extents: dict[int, int] = {}
        self._memories: weakref.WeakValueDictionary[int, np.ndarray] = weakref.WeakValueDictionary()
        self.copied = 0

    def describe(self) -> str:
        """Say that it is none."""
        return "the device emulated in host memory"

    def identity(self) -> str:
        """Give every process a device of its own, unless there is to be a number of them."""
        return self._several[self.number] if self._several else f"emulated-{os.getpid()}"

    def enter(self) -> None:
        """Do nothing: a thread has no other."""

    def is_current(self) -> bool:
        """Say so."""
        return True

    def owns(self, pointer: int) -> bool:
        """Tell whether it gave this memory out."""
        known = (*self._extents.items(), *self.shared_extents())
        return any(start <= pointer < start + n for start, n in known)

    def adopt(self, memory: np.ndarray) -> None:
        """Count memory as the device's own for as long as the array lives."""
        start = memory.__array_interface__["data"][0]
        self._extents[start] = memory.nbytes
        self._memories[start] = memory
        weakref.finalize(memory, self._extents.pop, start, None).atexit = False

    def empty(self, shape: tuple[int, ...], dtype: np.dtype) -> EmulatedArray:
        """Make an array whose bytes are 0xA5: nobody takes them for a result."""
        dtype = np.dtype(dtype)
        count = int(np.prod(shape, dtype=np.int64)) * dtype.itemsize
        memory = np.full(max(count, 1), 0xA5, np.uint8)
        self.adopt(memory)
        return EmulatedArray(memory[:count].view(dtype).reshape(shape), self)

    def array(self, values: Any) -> EmulatedArray:
        """Make an array of these values."""
        values = np.asarray(values)
        made = self.empty(values.shape, values.dtype)
        made._memory[...] = values
        return made

    def wrap(self, pointer: int, shape: tuple[int, ...], dtype: np.dtype) -> EmulatedArray:
        """Make an array of shared memory."""
        memory = self.view(pointer, int(np.prod(shape, dtype=np.int64)), dtype)
        return EmulatedArray(memory.reshape(shape), self)

    def finish(self) -> None:
        """Do all that is queued anywhere."""
        for stream in list(self._streams):
            self.synchronize(stream)

    def pinned(self, nbytes: int) -> np.ndarray:
        """Give plain memory: there is nothing to pin it for."""
        return np.full(nbytes, 0x5A, np.uint8)

    def current_stream(self) -> int:
        """Give the stream that :meth:`use` chose."""
        return self._current

    def use(self, stream: int) -> None:
        """Make a stream the current one."""
        self._find(stream)
        self._current = stream

    def new_stream(self) -> int:
        """Make a stream."""
        number = len(self._streams)
        self._streams[number] = Stream()
        return number

    def event(self) -> EmulatedEvent:
        """Make an event."""
        return EmulatedEvent(self._streams)

    def copy(self, target: int, source: int, nbytes: int, stream: int) -> None:
        """Queue a copy; host memory must live until it is done, as on a GPU."""
        self.copied += nbytes
        held = self.holders((target, source))
        self.launch(lambda: (ctypes.memmove(target, source, nbytes), held), stream)

    def holders(self, pointers: Iterable[int]) -> list[np.ndarray]:
        """Give what keeps the device's own memory: a pool reuses it in the order of streams."""
        found = []
        for start, memory in list(self._memories.items()):
            if any(start <= pointer < start + memory.nbytes for pointer in pointers):
                found.append(memory)
        return found

    def launch(self, kernel: Action, stream: int) -> None:
        """Queue any work."""
        self._find(stream).put(kernel)

    def synchronize(self, stream: int) -> None:
        """Do all that is queued."""
        found = self._find(stream)
        found.run(found.queued)

    def _find(self, stream: int) -> Stream:
        found = self._streams.get(stream)
        if found is None:
            raise InvalidArgument(f"stream {stream} is none of {self.describe()}")
        return found
