"""Messages of the MPI backend under way: one, and a round of them that is sent again and again."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any

import numpy as np
from mpi4py import MPI

from ..errors import CollectiveMismatch
from .base import SHORT_BYTES, Message, pieces

_buffer = MPI.buffer.frombuffer

_kept: dict[int, tuple[MPI.Request, object]] = {}
"""Requests under way that their holders have dropped, each with its memory."""
_rooms: list[ShortRoom] = []
# MPI_Finalize, too, lets messages come, and runs after Python has let go of every module.
for _memory in (_kept, _rooms):
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(_memory))


def as_bytes(data: np.ndarray) -> list:
    """Give a contiguous array as an mpi4py buffer of bytes, of at most `MAX_MESSAGE_BYTES`."""
    nbytes = data.nbytes
    if nbytes == 0:
        return [None, 0, MPI.BYTE]
    try:
        memory = _buffer(data)  # a tenth of the time that asking for the address takes
    except (BufferError, ValueError):  # read-only arrays, and dtypes that buffers do not know
        memory = MPI.buffer.fromaddress(data.__array_interface__["data"][0], nbytes)
    return [memory, nbytes, MPI.BYTE]


# The names are bound here, and below, because modules are emptied before the last objects at exit.
def _keep(
    request: MPI.Request,
    memory: object,
    kept: dict[int, tuple[MPI.Request, object]] = _kept,
    finalized: Callable[[], bool] = MPI.Is_finalized,
    error: type[Exception] = MPI.Exception,
) -> None:
    """Keep the memory of a request that was dropped until it has ended, for ever if need be."""
    if finalized():
        return
    for number, (before, _) in tuple(kept.items()):
        with suppress(error):  # nobody waits for what it has to say
            if not before.Test():
                continue
        kept.pop(number, None)
    kept[id(request)] = (request, memory)


class Gone:
    """A message that was sent and has gone at once."""

    def test(self) -> bool:
        """Tell that it has gone."""
        return True


GONE = Gone()


class MpiRequest:
    """One message under way; its memory stays until it has moved, whoever drops this."""

    __slots__ = ("_request", "_data", "_rank", "_status")

    def __init__(
        self, request: MPI.Request, data: Any, rank: int, status: MPI.Status | None = None
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

    def cancel(self) -> None:
        """Give up on a message that is to be received."""
        if not self._request.Test():
            self._request.Cancel()
            self._request.Wait()

    def __del__(self, keep: Callable[[MPI.Request, object], None] = _keep) -> None:
        if self._request:
            keep(self._request, self._data)


class ShortRoom:
    """Memory for a short message, and for another one when that was read; it is never freed."""

    __slots__ = ("memory", "buffer")

    def __init__(self) -> None:
        self.memory = bytearray(SHORT_BYTES)
        self.buffer = [_buffer(self.memory), SHORT_BYTES, MPI.BYTE]
        _rooms.append(self)


class MpiShortRequest:
    """A short message to be received."""

    __slots__ = ("content", "test", "_room", "_free")

    def __init__(self, request: MPI.Request, room: ShortRoom, free: list[ShortRoom]):
        self.test: Callable[[], bool] = request.Test
        self.content, self._room, self._free = room.memory, room, free

    def release(self) -> None:
        """Let the memory be used for another message."""
        self._free.append(self._room)


class MpiTransfer:
    """A round as persistent requests, freed with the transfer."""

    __slots__ = ("_requests", "_messages", "_all", "_statuses", "_expected")

    def __init__(self, comm: MPI.Comm, messages: Sequence[Message], most: int):
        self._messages = [  # keeps scratch memory alive as long as the requests
            Message(m.incoming, m.peer, piece, m.tag)
            for m in messages
            for piece in pieces(m.data, most)
        ]
        self._requests = [
            (comm.Recv_init if m.incoming else comm.Send_init)(as_bytes(m.data), m.peer, m.tag)
            for m in self._messages
        ]
        self._all = MPI.Prequest.Testall
        self._statuses = [MPI.Status() for _ in self._messages]
        pairs = zip(self._statuses, self._messages)
        self._expected = [(status, m) for status, m in pairs if m.incoming]

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

    def __del__(
        self,
        keep: Callable[[MPI.Request, object], None] = _keep,
        finalized: Callable[[], bool] = MPI.Is_finalized,
        error: type[Exception] = MPI.Exception,
    ) -> None:
        if finalized():
            return
        for request in self._requests:
            with suppress(error):
                if request and not request.Test():
                    keep(request, self._messages)
                elif request:
                    request.Free()
