"""Messages of the MPI backend under way: one, and a round of them that is sent again and again."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
from mpi4py import MPI

from ..errors import CollectiveMismatch
from .base import Message

_buffer = MPI.buffer.frombuffer


def as_bytes(data: np.ndarray) -> list:
    """Give a contiguous array as an mpi4py buffer of bytes, of any length."""
    nbytes = data.nbytes
    if nbytes == 0:
        return [None, 0, MPI.BYTE]
    try:
        memory = _buffer(data)  # a tenth of the time that asking for the address takes
    except (BufferError, ValueError):  # read-only arrays, and dtypes that buffers do not know
        memory = MPI.buffer.fromaddress(data.__array_interface__["data"][0], nbytes)
    return [memory, nbytes, MPI.BYTE]


class MpiRequest:
    """One message under way; keeps its memory alive."""

    __slots__ = ("_request", "_data", "_rank", "_status")

    def __init__(
        self, request: MPI.Request, data: np.ndarray, rank: int, status: MPI.Status | None = None
    ):
        self._request, self._data, self._rank, self._status = request, data, rank, status

    def test(self) -> bool:
        """Make progress; tell whether the message has moved, and see that it has its length."""
        if not self._request.Test(self._status):
            return False
        status, self._status = self._status, None
        if status is not None and status.Get_count(MPI.BYTE) != self._data.nbytes:
            raise CollectiveMismatch(
                f"rank {self._rank}: expected {self._data.nbytes} bytes from rank "
                f"{status.Get_source()}, which sent {status.Get_count(MPI.BYTE)}: the ranks "
                "disagree on the array's length"
            )
        return True


class MpiTransfer:
    """A round as persistent requests, freed with the transfer."""

    __slots__ = ("_requests", "_messages", "_all", "_statuses", "_expected")

    def __init__(self, comm: MPI.Comm, messages: Sequence[Message]):
        self._messages = messages  # keeps scratch memory alive as long as the requests
        self._requests = [
            (comm.Recv_init if m.incoming else comm.Send_init)(as_bytes(m.data), m.peer, m.tag)
            for m in messages
        ]
        self._all = MPI.Prequest.Testall
        self._statuses = [MPI.Status() for _ in messages]
        self._expected = [(status, m) for status, m in zip(self._statuses, messages) if m.incoming]

    def start(self) -> None:
        """Post every message."""
        MPI.Prequest.Startall(self._requests)

    def test(self) -> bool:
        """Tell whether every message has moved."""
        if not self._all(self._requests, self._statuses):
            return False
        for status, message in self._expected:
            if status.Get_count(MPI.BYTE) != message.data.nbytes:
                raise CollectiveMismatch(
                    f"expected {message.data.nbytes} bytes from rank {message.peer}, which sent "
                    f"{status.Get_count(MPI.BYTE)}: the ranks disagree on the array's length"
                )
        return True

    # The names are bound here because modules are emptied before the last objects at exit.
    def __del__(
        self,
        finalized: Callable[[], bool] = MPI.Is_finalized,
        nothing: MPI.Request = MPI.REQUEST_NULL,
    ) -> None:
        if not finalized():
            for request in self._requests:
                if request != nothing:
                    request.Free()
