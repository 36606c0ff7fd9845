"""What a stage on a GPU sends and receives, as flat arrays that messages take.

Staged, a tensor goes through pinned host memory, and the two ends of a message may differ.  Where
the MPI library takes the addresses, it gets them.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from ..device.array import DeviceArray
from ..device.base import Device
from ..device.find import find_device
from ..device.recognise import describe
from ..storage import view_at
from .in_flight import InFlight


class Address(np.ndarray):
    """Memory of a GPU, where nobody but MPI may look.

    Attributes
    ----------
    owner : object
        The array that it belongs to.
    """

    owner: Any = None


class Parcels:
    """Moves tensors between a GPU and messages.

    Parameters
    ----------
    direct : bool
        Whether the MPI library gets the addresses.
    device : Device, optional
        By default the one of this thread.
    """

    def __init__(self, direct: bool = False, device: Device | None = None):
        self.direct, self.device = direct, device or find_device()
        self._landing = InFlight()

    def leave(self, x: Any) -> np.ndarray:
        """Give the elements of a contiguous array to be sent; the host waits for them, once."""
        data = describe(x, 0)
        memory: np.ndarray
        if self.direct:
            memory = _address(data, x)
        else:
            memory = self.device.pinned(data.nbytes)[: data.nbytes]
            self._copy(memory.__array_interface__["data"][0], data.pointer, data)
        self.device.synchronize(data.stream)
        return memory

    def room(self, nbytes: int, make: Callable[[], Any]) -> np.ndarray:
        """Give what a message can be received into; ``make()`` makes an array on the GPU."""
        if not self.direct:
            return self.device.pinned(nbytes)[:nbytes]
        x = make()
        data = describe(x, 0)
        self.device.synchronize(data.stream)  # what used this memory before is over by then
        return _address(data, x)

    def arrive(self, memory: np.ndarray, make: Callable[[], Any]) -> Any:
        """Give an array on the GPU with what was received; its stream has it in time."""
        owner = getattr(memory, "owner", None)
        if owner is not None:
            return owner
        x = make()
        data = describe(x, 0)
        self._copy(data.pointer, memory.__array_interface__["data"][0], data)
        copied = self.device.event()
        copied.record(data.stream)
        self._landing.hold(copied, memory)
        return x

    def _copy(self, target: int, source: int, data: DeviceArray) -> None:
        if data.nbytes:
            self.device.copy(target, source, data.nbytes, data.stream)


def _address(data: DeviceArray, x: Any) -> Address:
    made = view_at(data.pointer, data.nbytes, np.dtype(np.uint8)).view(Address)
    made.owner = x
    return made
