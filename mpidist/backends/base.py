"""What a backend is: the few things that the engine needs to move bytes between ranks."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

import numpy as np

from .board import Board


class Request(Protocol):
    """One message under way."""

    def test(self) -> bool:
        """Make progress; tell whether the message has moved."""


@dataclass(slots=True)
class Message:
    """One message of a round: a contiguous piece of memory, sent or received."""

    incoming: bool
    peer: int
    data: np.ndarray  # 1-D, contiguous, any dtype; moved as bytes
    tag: int


class Transfer(Protocol):
    """The messages of one round, bound to their memory; started and waited for again and again."""

    def start(self) -> None:
        """Post every message."""

    def test(self) -> bool:
        """Make progress; tell whether every message has moved."""


@runtime_checkable
class Backend(Protocol):
    """Moves bytes between `size` ranks.

    A backend is used by one thread at a time.  Messages between two ranks with one tag keep their
    order.  ``native`` holds the backend's own collectives, or None; ``hosts`` a key per rank, and
    equal keys share a node.  Optional: ``bind(messages) -> Transfer``, persistent requests.

    The shipped rules depend on ``vendor``, the name of the MPI library without its version (for
    example "MPICH"; empty without MPI), and on ``crowded``, whether more ranks than cores share a
    node.  A tuning table is for one ``library``: vendor and version, or the backend's name.
    """

    name: str
    vendor: str
    library: str
    crowded: bool
    rank: int
    size: int
    tag_limit: int
    board: Board
    native: Any
    hosts: Sequence[object]

    def isend(self, data: np.ndarray, peer: int, tag: int) -> Request:
        """Begin to send a contiguous array."""

    def irecv(self, data: np.ndarray, peer: int, tag: int) -> Request:
        """Begin to receive into a contiguous array; the message must have its length."""

    def wait(
        self,
        test: Callable[[], bool],
        deadline: float | None,
        progress: Callable[[], object] | None = None,
    ) -> bool:
        """Wait for ``test()``; False if `deadline` (of ``time.monotonic``) passed first.

        `progress` is called now and then: what else is under way must go on meanwhile.
        """

    def arrive(
        self,
        sequence: int,
        deadline: float | None,
        progress: Callable[[], object] | None = None,
    ) -> bool:
        """Wait until every rank has announced `sequence`; False if the deadline passed.

        `progress` is called now and then, as in `wait`.
        """

    def missing(self, sequence: int) -> tuple[int, ...]:
        """Give the ranks that are known not to have announced operation `sequence`."""

    def split(self, color: int | None, key: int) -> Backend | None:
        """Give a backend over the ranks of one color, ordered by key, or None for color None."""

    def translate(self, error: BaseException) -> BaseException:
        """Give an error of the library underneath as one of :mod:`mpidist.errors`."""

    def close(self) -> None:
        """Give back what the backend holds; collective."""

    def abort(self, code: int) -> None:
        """End the job on all ranks."""


class UnboundTransfer:
    """A round without persistent requests: posts its messages anew each time.

    Parameters
    ----------
    base : list of int
        One number, shared by all rounds of a program: it is added to every tag, so that operations
        that are under way at the same time do not mix.
    """

    __slots__ = ("_isend", "_irecv", "_messages", "_requests", "_base")

    def __init__(self, backend: Backend, messages: Sequence[Message], base: list[int]):
        self._isend, self._irecv = backend.isend, backend.irecv
        self._messages, self._base = messages, base
        self._requests: list[Request] = []

    def start(self) -> None:
        """Post every message, receives first."""
        isend, irecv, base = self._isend, self._irecv, self._base[0]
        self._requests = [
            (irecv if m.incoming else isend)(m.data, m.peer, m.tag + base) for m in self._messages
        ]

    def test(self) -> bool:
        """Tell whether every message has moved."""
        requests = self._requests
        while requests:
            if not requests[-1].test():
                return False
            requests.pop()
        return True
