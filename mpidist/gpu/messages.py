"""Messages between arrays on GPUs: one message each, as for host memory."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from ..backends.base import Backend
from ..calls.arrays import view_at
from ..device.array import DeviceArray
from ..device.base import Device, InFlight
from ..device.find import find_device
from ..device.recognise import describe
from ..engine.messages import Messages
from ..engine.work import Work
from .paths import table, taken, this_rank


class Address(np.ndarray):
    """Memory of a GPU, which only MPI may access.

    Attributes
    ----------
    owner : object
        The array that owns the memory.
    """

    owner: Any = None


class Parcels:
    """Moves tensors between a GPU and messages.

    Parameters
    ----------
    direct : bool
        Whether the MPI library takes addresses on the device.
    device : Device, optional
        The device; by default that of this thread.
    """

    def __init__(self, direct: bool = False, device: Device | None = None):
        self.direct, self.device = direct, device or find_device()
        self._landing = InFlight()

    def leave(self, x: Any) -> np.ndarray:
        """Return the elements of a contiguous array to send; the host waits for its stream."""
        data = describe(x, 0)
        memory: np.ndarray
        if self.direct:
            memory = _addressed(data, x)
        else:
            memory = self.device.pinned(data.nbytes)[: data.nbytes]
            self._copy(memory.__array_interface__["data"][0], data.pointer, data)
        self.device.synchronize(data.stream)
        return memory

    def room(self, nbytes: int, make: Callable[[], Any]) -> np.ndarray:
        """Return memory to receive a message into; ``make()`` returns an array on the GPU."""
        if not self.direct:
            return self.device.pinned(nbytes)[:nbytes]
        x = make()
        data = describe(x, 0)
        self.device.synchronize(data.stream)  # earlier uses of this memory are over then
        return _addressed(data, x)

    def arrive(self, memory: np.ndarray, make: Callable[[], Any]) -> Any:
        """Return an array on the GPU with the message; its stream waits for the contents."""
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


def _addressed(data: DeviceArray, x: Any) -> Address:
    made = view_at(data.pointer, data.nbytes, np.dtype(np.uint8)).view(Address)
    made.owner = x
    return made


def takes_addresses(backend: Backend) -> bool:
    """Return whether the library sends and receives this rank's messages in GPU memory."""
    native = backend.native is not None
    here = this_rank(native)
    if backend.size > 1 and not here.no_nccl and here.forced in ("", "nccl"):
        return False  # collectives may go by NCCL, and on one GPU the two can wait for each other
    return taken(table([here], native))["send"] == "mpi"


class GpuMessages:
    """Sends and receives of one communicator.

    The elements go from the device's memory or through the host's.  The two ends need not take the
    same path, and one of them may have its array on the host.
    """

    def __init__(self, messages: Messages):
        backend = messages.backend
        self._messages, self._rank = messages, backend.rank
        self.device = find_device(self._rank)
        self.direct = takes_addresses(backend)
        self._landing = InFlight()

    def isend(self, x: Any, peer: Any, tag: Any) -> Work:
        """Begin to send; the host waits for the work queued on the array's stream."""
        messages, data = self._messages, describe(x, self._rank)
        peer = messages.peer(peer)
        if self.direct:
            memory = _address(data)
        else:
            memory = self.device.pinned(data.nbytes)
            self._copy(_start(memory), data.pointer, data)
        self.device.synchronize(data.stream)
        form, end = messages.form(data.dtype, data.shape), lambda: self._done(x)
        return messages.begin_send(memory, form, peer, tag, end, readable=not self.direct)

    def irecv(self, out: Any, peer: Any, tag: Any) -> Work:
        """Begin to receive; the array's stream has the contents when the work has ended."""
        messages, data = self._messages, describe(out, self._rank, "out")
        peer = messages.peer(peer)
        if data.readonly:
            raise messages.place.wrong("out is read-only; it must be writable")
        if self.direct:
            self.device.synchronize(data.stream)
        room = DeviceRoom(self, data)
        form = messages.form(data.dtype, data.shape)
        return messages.begin_receive(room, form, peer, tag, lambda: out)

    def _done(self, x: Any) -> None:
        """Hold the user's array until the message has gone."""

    def land(self, memory: np.ndarray, data: DeviceArray) -> None:
        """Copy a received message to the device, and keep the host's memory until then."""
        self._copy(data.pointer, _start(memory), data)
        copied = self.device.event()
        copied.record(data.stream)
        self._landing.hold(copied, memory)

    def _copy(self, target: int, source: int, data: DeviceArray) -> None:
        if data.nbytes:
            self.device.copy(target, source, data.nbytes, data.stream)


class DeviceRoom:
    """An array on a GPU, which a message reaches by its address or through memory of the host."""

    def __init__(self, messages: GpuMessages, data: DeviceArray):
        self._messages, self._data, self._direct = messages, data, messages.direct

    def store(self, content: bytes | bytearray, start: int, nbytes: int) -> None:
        """Store a short message."""
        self._direct = False
        memory = self.memory(nbytes)
        memory[...] = np.frombuffer(content, np.uint8, nbytes, start)
        self.filled()

    def memory(self, nbytes: int) -> np.ndarray:
        """Return the device's memory, or memory of the host."""
        if self._direct:
            return _address(self._data)
        self._memory = self._messages.device.pinned(nbytes)[:nbytes]
        return self._memory

    def filled(self) -> None:
        """Queue the copy from the host's memory on the array's stream."""
        if not self._direct:
            self._messages.land(self._memory, self._data)


def _address(data: DeviceArray) -> np.ndarray:
    """Return the device's memory as an array for messages; only MPI may access it."""
    return view_at(data.pointer, data.nbytes, np.dtype(np.uint8))


def _start(memory: np.ndarray) -> int:
    return memory.__array_interface__["data"][0]
