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

    A message goes as a whole, from the device's memory or through the host's, so that the two ends
    need not take the same path, and one of them may have its array on the host.
    """

    def __init__(self, messages: Messages):
        backend = messages.backend
        self._messages, self._rank = messages, backend.rank
        self.device = find_device(self._rank)
        self._direct = takes_addresses(backend)
        self._landing = InFlight()

    def isend(self, x: Any, peer: Any, tag: Any) -> Work:
        """Begin to send; the host waits until what is queued on the array's stream is done."""
        data = describe(x, self._rank)
        if self._direct:
            memory = _address(data)
        else:
            memory = self.device.pinned(data.nbytes)
            self._copy(_start(memory), data.pointer, data)
        self.device.synchronize(data.stream)
        return self._messages.isend(memory, peer, tag, end=lambda: self._done(x))

    def irecv(self, out: Any, peer: Any, tag: Any) -> Work:
        """Begin to receive; the array's stream has the contents when the work has ended."""
        data = describe(out, self._rank, "out")
        if data.readonly:
            raise self._messages.place.wrong("out is read-only; it must be writable")
        if self._direct:
            self.device.synchronize(data.stream)
            memory = _address(data)
        else:
            memory = self.device.pinned(data.nbytes)

        def end() -> Any:
            if not self._direct:
                self._copy(data.pointer, _start(memory), data)
                copied = self.device.event()
                copied.record(data.stream)
                self._landing.hold(copied, memory)
            return out

        return self._messages.irecv(memory, peer, tag, end=end)

    def _done(self, x: Any) -> None:
        """Hold the user's array until the message has gone."""

    def _copy(self, target: int, source: int, data: DeviceArray) -> None:
        if data.nbytes:
            self.device.copy(target, source, data.nbytes, data.stream)


def _address(data: DeviceArray) -> np.ndarray:
    """Give the address in the form that messages take; only MPI may look there."""
    return view_at(data.pointer, data.nbytes, np.dtype(np.uint8))


def _start(memory: np.ndarray) -> int:
    return memory.__array_interface__["data"][0]
