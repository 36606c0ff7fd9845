"""Messages from and to arrays on a GPU: one message each, as for host memory."""

from __future__ import annotations

from typing import Any

import numpy as np

from ..backends.base import Backend
from ..device.array import DeviceArray
from ..device.find import find_device
from ..device.recognise import describe
from ..messages import Messages
from ..storage import view_at
from ..work import Work
from .here import this_rank
from .in_flight import InFlight
from .paths import table, taken


def takes_addresses(backend: Backend) -> bool:
    """Tell whether messages of this rank go from and to the memory of its GPU by the library."""
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
        """Begin to send; the host waits until what is queued on the array's stream is done."""
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
        """Copy to the device what came to the host, and hold the memory until that is done."""
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
        """Give the address, or memory of the host."""
        if self._direct:
            return _address(self._data)
        self._memory = self._messages.device.pinned(nbytes)[:nbytes]
        return self._memory

    def filled(self) -> None:
        """Queue the copy from the host's memory on the array's stream."""
        if not self._direct:
            self._messages.land(self._memory, self._data)


def _address(data: DeviceArray) -> np.ndarray:
    """Give the address in the form that messages take; only MPI may look there."""
    return view_at(data.pointer, data.nbytes, np.dtype(np.uint8))


def _start(memory: np.ndarray) -> int:
    return memory.__array_interface__["data"][0]
