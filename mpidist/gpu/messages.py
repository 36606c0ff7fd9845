"""Messages whose data are on a GPU: sends and receives, and the tensors of pipelines.

A CUDA-aware MPI library gets the address in GPU memory; otherwise the data are copied through
pinned host memory.  Either way it is the same message as one from host memory.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from ..backends.base import Backend
from ..calls.arrays import address, view_at
from ..device.array import DeviceArray
from ..device.base import Device, InFlight
from ..device.find import find_device
from ..device.recognise import as_device_array
from ..engine.messages import PointToPoint
from ..engine.work import Work
from .executors import this_rank, why_not_each


class DeviceMemory(np.ndarray):
    """GPU memory of the array `owner` as bytes, which only the MPI library may access."""

    owner: Any = None


class _Copies:
    """Copies of messages between a GPU and pinned host memory, kept until they are done."""

    def __init__(self, device: Device):
        self.device, self._landing = device, InFlight()

    def fetch(self, data: DeviceArray) -> np.ndarray:
        """Return host memory to which the contents of an array are copied, on its stream."""
        memory = self.device.pinned(data.nbytes)[: data.nbytes]
        self._copy(address(memory), data.pointer, data)
        return memory

    def land(self, memory: np.ndarray, data: DeviceArray) -> None:
        """Queue the copy of a received message to the GPU; keep `memory` until the copy is done."""
        self._copy(data.pointer, address(memory), data)
        copied = self.device.event()
        copied.record(data.stream)
        self._landing.hold(copied, memory)

    def _copy(self, target: int, source: int, data: DeviceArray) -> None:
        if data.nbytes:
            self.device.copy(target, source, data.nbytes, data.stream)


class TensorMessages(_Copies):
    """Memory of messages that carry tensors of a GPU, as the stages of a pipeline exchange them.

    If the MPI library is CUDA-aware (`direct`), messages use the tensors' own memory.
    """

    def __init__(self, direct: bool):
        super().__init__(find_device())
        self.direct = direct

    def outgoing(self, x: Any) -> np.ndarray:
        """Return memory with the contents of a contiguous array `x`, to send from.

        That is the memory of `x` if the MPI library is CUDA-aware, else a copy in host memory.  The
        host waits until the work queued on the stream of `x` is complete.
        """
        data = as_device_array(x, 0)
        memory = _device_memory(data, x) if self.direct else self.fetch(data)
        self.device.synchronize(data.stream)
        return memory

    def receive_memory(self, nbytes: int, make: Callable[[], Any]) -> np.ndarray:
        """Return memory to receive a message of `nbytes` bytes into.

        It is that of an array on the GPU, which ``make()`` returns, if the MPI library is
        CUDA-aware; else host memory.
        """
        if not self.direct:
            return self.device.pinned(nbytes)[:nbytes]
        x = make()
        data = as_device_array(x, 0)
        self.device.synchronize(data.stream)  # earlier work on this memory must be complete
        return _device_memory(data, x)

    def incoming(self, memory: np.ndarray, make: Callable[[], Any]) -> Any:
        """Return the array on the GPU with the message that was received into `memory`.

        Host memory is copied to an array that ``make()`` returns, on the array's stream.
        """
        owner = getattr(memory, "owner", None)
        if owner is not None:
            return owner
        x = make()
        self.land(memory, as_device_array(x, 0))
        return x


def _device_memory(data: DeviceArray, x: Any) -> DeviceMemory:
    memory = _bytes_of(data).view(DeviceMemory)
    memory.owner = x
    return memory


def takes_addresses(backend: Backend) -> bool:
    """Return whether messages use device pointers (CUDA-aware MPI)."""
    native = backend.native is not None
    here = this_rank(native)
    if backend.size > 1 and not here.no_nccl and here.forced in ("", "nccl"):
        return False  # NCCL may serve collectives, and on one GPU the two can deadlock
    return why_not_each([here], native)["mpi"] is None


class GpuMessages(_Copies):
    """Sends and receives of one communicator, of arrays on a GPU.

    The two ends need not use the same memory: one may send from GPU memory, the other receive
    through host memory, or have its array on the host.
    """

    def __init__(self, messages: PointToPoint):
        backend = messages.backend
        super().__init__(find_device(backend.rank))
        self._messages, self._rank = messages, backend.rank
        self.direct = takes_addresses(backend)

    def isend(self, x: Any, peer: Any, tag: Any) -> Work:
        """Begin a send and return its Work.

        The host first waits until all that is queued on the array's stream is complete.
        """
        messages, data = self._messages, as_device_array(x, self._rank)
        peer = messages.peer(peer, allow_self=True)
        memory = _bytes_of(data) if self.direct else self.fetch(data)
        self.device.synchronize(data.stream)
        form, end = messages.form(data.dtype, data.shape), lambda: self._done(x)
        return messages.begin_send(memory, form, peer, tag, end, readable=not self.direct)

    def irecv(self, out: Any, peer: Any, tag: Any) -> Work:
        """Begin a receive and return its Work, whose result is `out`.

        Once the Work is complete, what is queued on the array's stream sees the contents.
        """
        messages, data = self._messages, as_device_array(out, self._rank, "out")
        peer = messages.source(peer, allow_self=True)
        if data.readonly:
            raise messages.place.wrong("out is read-only; it must be writable")
        if self.direct:
            self.device.synchronize(data.stream)
        room = DeviceRoom(self, data)
        form = messages.form(data.dtype, data.shape)
        return messages.begin_receive(room, form, peer, tag, lambda: out)

    def _done(self, x: Any) -> None:
        """Do nothing at the end of a send; until then the callback keeps the user's `x` alive."""


class DeviceRoom:
    """The target of a receive on a GPU: the array's own memory, or host memory to copy from.

    It implements ``engine.messages.Room``.
    """

    def __init__(self, messages: GpuMessages, data: DeviceArray):
        self._messages, self._data, self._direct = messages, data, messages.direct

    def store(self, content: bytes | bytearray, start: int, nbytes: int) -> None:
        """Store a short message in the array: `nbytes` bytes of `content`, from byte `start` on."""
        self._direct = False
        memory = self.memory(nbytes)
        memory[...] = np.frombuffer(content, np.uint8, nbytes, start)
        self.filled()

    def memory(self, nbytes: int) -> np.ndarray:
        """Return the memory to receive into: the array's own, or `nbytes` bytes on the host."""
        if self._direct:
            return _bytes_of(self._data)
        self._memory = self._messages.device.pinned(nbytes)[:nbytes]
        return self._memory

    def filled(self) -> None:
        """Queue the copy from host memory, if used, on the array's stream."""
        if not self._direct:
            self._messages.land(self._memory, self._data)


def _bytes_of(data: DeviceArray) -> np.ndarray:
    """Return GPU memory as an array of bytes, which only the MPI library may access."""
    return view_at(data.pointer, data.nbytes, np.dtype(np.uint8))
