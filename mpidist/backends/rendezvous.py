"""Exchange of set-up objects between the ranks of a communicator, by messages alone."""

from __future__ import annotations

import pickle
from collections.abc import Callable
from typing import Any

import numpy as np

from .base import SHORT_BYTES, Backend, Request
from .tags import tags_of

Wait = Callable[[Callable[[], bool]], object]


def everyone(backend: Backend, value: Any, wait: Wait) -> list[Any]:
    """Send this rank's value to all ranks; return the values of all, by rank; collective.

    ``wait(test)`` waits until ``test()`` is true, and raises past the deadline.

    By Bruck's algorithm: before round k a rank has the values of 2^k ranks from itself on, sends
    them to the rank 2^k below it and receives as many from the rank 2^k above, so that ⌈log₂ size⌉
    rounds are enough.  The values are pickled.

    It depends neither on a choice of algorithms nor on shared memory, because both are set up with
    its help; nor on collectives of the MPI library.  Open MPI (5.0.11) sets up communicators of its
    own at the first one on a communicator that spans several nodes: 35 to 420 ms.
    """
    rank, size = backend.rank, backend.size
    tag = tags_of(backend.tag_limit).exchange
    known = [_pickled(value)]  # of this rank and those above it
    pending: list[Request] = []
    # Known after the round, on 5 ranks:
    #     rank          0        1        2        3        4
    #     distance 1    0 1      1 2      2 3      3 4      4 0
    #     distance 2    0 1 2 3  1 2 3 4  2 3 4 0  3 4 0 1  4 0 1 2
    #     distance 4    all: one value was missing, so `size - distance` = 1 is sent
    while (distance := len(known)) < size:
        pending += _send(backend, known[: size - distance], (rank - distance) % size, tag)
        known += _receive(backend, (rank + distance) % size, tag, wait)
    for request in pending:
        wait(request.test)
    return [pickle.loads(known[(r - rank) % size]) for r in range(size)]


def _pickled(value: Any) -> bytes:
    return pickle.dumps(value, protocol=5)


def _send(backend: Backend, values: list[bytes], peer: int, tag: int) -> list[Request]:
    """Send values in one short message, or their length in one and then the values."""
    data = _pickled(values)
    if len(data) <= SHORT_BYTES:
        return [backend.isend_short(data, peer, tag)]
    length = backend.isend_short(_pickled(len(data)), peer, tag)
    return [length, backend.isend(np.frombuffer(data, np.uint8), peer, tag)]


def _receive(backend: Backend, peer: int, tag: int, wait: Wait) -> list[bytes]:
    request = backend.irecv_short(peer, tag)
    wait(request.test)
    values = pickle.loads(request.content)  # it ignores the undefined bytes behind the message
    request.release()
    if isinstance(values, int):
        data = np.empty(values, np.uint8)
        wait(backend.irecv(data, peer, tag).test)
        values = pickle.loads(data.data)
    return values
