"""Requests of the MPI backend: single messages, and rounds of persistent requests."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any

import numpy as np
from mpi4py import MPI

from ..errors import wrong_length
from .base import SHORT_BYTES, RoundMessage, pieces
from .waiting import poll

_buffer = MPI.buffer.frombuffer

_kept: dict[int, tuple[MPI.Request, object]] = {}
"""Pending requests whose owners are gone, each with its memory."""
_short_buffers: list[ShortBuffer] = []
_free: list[ShortBuffer] = []  # those of all communicators: one that is freed leaves none behind
# MPI_Finalize may still write into their memory, and runs after Python has cleared all modules.
for _memory in (_kept, _short_buffers):
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(_memory))


def as_bytes(data: np.ndarray) -> list:
    """Return a contiguous array of at most `MAX_MESSAGE_BYTES` as an mpi4py buffer of bytes."""
    nbytes = data.nbytes
    if nbytes == 0:
        return [None, 0, MPI.BYTE]
    try:
        memory = _buffer(data)  # ten times faster than by the address
    except (BufferError, ValueError):  # read-only arrays, and dtypes that buffers do not support
        memory = MPI.buffer.fromaddress(data.__array_interface__["data"][0], nbytes)
    return [memory, nbytes, MPI.BYTE]


# Defaults bind the names, here and below: at exit modules are cleared before the last objects.
def _keep(
    request: MPI.Request,
    memory: object,
    kept: dict[int, tuple[MPI.Request, object]] = _kept,
    finalized: Callable[[], bool] = MPI.Is_finalized,
    error: type[Exception] = MPI.Exception,
) -> None:
    """Keep the memory of a pending request that has no owner, until the request is complete."""
    if finalized():
        return
    for number, (before, _) in tuple(kept.items()):
        with suppress(error):  # nobody waits for its outcome
            if not before.Test():
                continue
        kept.pop(number, None)
    kept[id(request)] = (request, memory)


def drain(comm: MPI.Comm, tag: int) -> None:
    """Receive and drop the messages on a communicator that nobody has received; collective.

    To be called before the communicator is freed, when no rank sends any more: a message that was
    never received outlives it, and MPICH (5.0.2) delivers it on the next communicator, which gets
    the same context id.  No message on `comm` may have had `tag`: each rank sends every other one
    such message last.  A sender's messages are matched in the order sent, so its earlier ones are
    received before.
    """
    rank, size, status = comm.Get_rank(), comm.Get_size(), MPI.Status()
    poll(comm.Ibarrier().Test, None)  # until then a rank may still receive elsewhere
    last = [comm.Isend([None, 0, MPI.BYTE], peer, tag) for peer in range(size) if peer != rank]
    left = len(last)

    def received() -> bool:
        nonlocal left
        # Not Improbe: Open MPI 4 over libfabric (Debian 12) cannot receive what it has matched.
        while left and comm.Iprobe(MPI.ANY_SOURCE, MPI.ANY_TAG, status):
            peer, its_tag = status.Get_source(), status.Get_tag()
            left -= its_tag == tag
            data = np.empty(status.Get_count(MPI.BYTE), np.uint8)
            comm.Recv(as_bytes(data), peer, its_tag)
        return not left

    poll(received, None)
    poll(comm.Ibarrier().Test, None)  # other ranks may need this one's progress to receive
    MPI.Request.Waitall(last)


class MpiRequest:
    """One pending message; keeps its memory alive until the message is complete."""

    __slots__ = ("_request", "_data", "_rank", "_status")

    def __init__(
        self, request: MPI.Request, data: Any, rank: int, status: MPI.Status | None = None
    ):
        self._request, self._data, self._rank, self._status = request, data, rank, status

    def test(self) -> bool:
        """Make progress; return whether the message is complete.

        Raises CollectiveMismatch if it has not the length of the array.
        """
        if not self._request.Test(self._status):
            return False
        status, self._status = self._status, None
        if status is not None and status.Get_count(MPI.BYTE) != self._data.nbytes:
            raise wrong_length(
                self._rank, self._data.nbytes, status.Get_source(), status.Get_count(MPI.BYTE)
            )
        return True

    def cancel(self) -> None:
        """Cancel a receive that is not complete."""
        if not self._request.Test():
            self._request.Cancel()
            self._request.Wait()

    def __del__(self, keep: Callable[[MPI.Request, object], None] = _keep) -> None:
        if self._request:
            keep(self._request, self._data)


class ShortBuffer:
    """Memory for one short message at a time, reused for later messages and never freed."""

    __slots__ = ("memory", "buffer")

    def __init__(self) -> None:
        self.memory = bytearray(SHORT_BYTES)
        self.buffer = [_buffer(self.memory), SHORT_BYTES, MPI.BYTE]
        _short_buffers.append(self)


class MpiShortRequest:
    """The pending receive of a short message."""

    __slots__ = ("content", "test", "_buffer", "_request")

    def __init__(self, comm: MPI.Comm, peer: int, tag: int):
        self._buffer = buffer = _free.pop() if _free else ShortBuffer()
        self._request = request = comm.Irecv(buffer.buffer, peer, tag)
        self.test: Callable[[], bool] = request.Test
        self.content = buffer.memory

    def release(self) -> None:
        """Return the memory of `content` for another message; `content` is invalid afterwards."""
        _free.append(self._buffer)


class MpiAnyShortRequest(MpiShortRequest):
    """The pending receive of a short message from any rank."""

    __slots__ = ("_status",)

    def __init__(self, comm: MPI.Comm, tag: int):
        super().__init__(comm, MPI.ANY_SOURCE, tag)
        request = self._request
        self._status = status = MPI.Status()
        came = False

        def test() -> bool:  # the status of a request that was complete before is empty
            nonlocal came
            came = came or request.Test(status)
            return came

        self.test = test

    @property
    def source(self) -> int:
        """Rank of the sender, once ``test()`` has returned True."""
        return self._status.Get_source()


class MpiTransfer:
    """The messages of a round as persistent requests, which are freed with this object.

    A message of more than `most` bytes is sent and received in several parts.
    """

    __slots__ = ("_requests", "_messages", "_all", "_statuses", "_expected", "_rank")

    def __init__(self, comm: MPI.Comm, messages: Sequence[RoundMessage], most: int):
        self._rank = comm.rank
        self._messages = [  # keeps the memory alive as long as the requests
            RoundMessage(m.incoming, m.peer, piece, m.tag)
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
        """Make progress; return whether all are complete; CollectiveMismatch for a wrong length."""
        if not self._all(self._requests, self._statuses):
            return False
        for status, message in self._expected:
            if status.Get_count(MPI.BYTE) != message.data.nbytes:
                got = status.Get_count(MPI.BYTE)
                raise wrong_length(self._rank, message.data.nbytes, message.peer, got)
        return True

    def __del__(
        self,
        keep: Callable[[MPI.Request, object], None] = _keep,
        finalized: Callable[[], bool] = MPI.Is_finalized,
        error: type[Exception] = MPI.Exception,
        quiet: Callable[[type[Exception]], Any] = suppress,
    ) -> None:
        if finalized():
            return
        for request in self._requests:
            with quiet(error):
                if request and not request.Test():
                    keep(request, self._messages)
                elif request:
                    request.Free()
