"""Exchange of set-up objects between the ranks of a communicator: messages through rank 0."""

from __future__ import annotations

import pickle
from collections.abc import Callable
from typing import Any

import numpy as np

from ..backends.base import Backend, Request

Wait = Callable[[Callable[[], bool]], object]


def everyone(backend: Backend, value: Any, wait: Wait) -> list[Any]:
    """Send this rank's value to all ranks; return the values of all, by rank; collective.

    It depends neither on a choice of algorithms nor on shared memory, because both are set up with
    its help.

    Parameters
    ----------
    backend : Backend
        Backend of the messages.
    value : object
        This rank's value, which pickle must support.
    wait : callable
        ``wait(test)`` waits until ``test()`` is true, and raises past the deadline.
    """
    mine, size = _pickled(value), backend.size
    if size == 1:
        return [pickle.loads(mine.data)]
    tag = min(backend.tag_limit, 2**30) // 4 * 3  # above those of messages
    if backend.rank:
        _finish(_send(backend, mine, 0, tag), wait)
        return pickle.loads(_receive(backend, 0, tag, wait).data)
    parts = [mine, *(_receive(backend, peer, tag, wait) for peer in range(1, size))]
    values = [pickle.loads(part.data) for part in parts]
    reply = _pickled(values)
    for pending in [_send(backend, reply, peer, tag) for peer in range(1, size)]:
        _finish(pending, wait)
    return values


def _pickled(value: Any) -> np.ndarray:
    return np.frombuffer(pickle.dumps(value, protocol=5), np.uint8)


def _send(backend: Backend, data: np.ndarray, peer: int, tag: int) -> list[Request]:
    length = np.array([data.size])
    return [backend.isend(length, peer, tag), backend.isend(data, peer, tag)]


def _finish(pending: list[Request], wait: Wait) -> None:
    for request in pending:
        wait(request.test)


def _receive(backend: Backend, peer: int, tag: int, wait: Wait) -> np.ndarray:
    length = np.empty(1, np.int64)
    wait(backend.irecv(length, peer, tag).test)
    data = np.empty(int(length[0]), np.uint8)
    wait(backend.irecv(data, peer, tag).test)
    return data
