"""What a backend is: the few things that the engine needs to move bytes between ranks."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

import numpy as np

from .board import Board

SHORT_BYTES = 8704  # of the longest short message: 8 KiB, and what is said about them
MAX_MESSAGE_BYTES = 1 << 30  # of the longest message: MPI before 4.0 counts bytes in 32 bits


class Request(Protocol):
    """One message under way."""

    def test(self) -> bool:
        """Make progress; tell whether the message has moved."""


class ShortRequest(Request, Protocol):
    """A short message to be received."""

    @property
    def content(self) -> bytes | bytearray:
        """What came, once ``test()`` has told so; it may be followed by other bytes.

        Nothing at all from a backend that moves nothing.
        """

    def release(self) -> None:
        """Let the memory of `content` be used for another message."""


class AllOf:
    """Several messages under way, as one request."""

    __slots__ = ("_requests",)

    def __init__(self, requests: Iterable[Request]):
        self._requests = list(requests)

    def test(self) -> bool:
        """Tell whether every message has moved."""
        requests = self._requests
        while requests:
            if not requests[-1].test():
                return False
            requests.pop()
        return True


def pieces(data: np.ndarray, most: int = MAX_MESSAGE_BYTES) -> Iterator[np.ndarray]:
    """Cut a flat array into messages of at most so many bytes; an empty one is one message."""
    if data.nbytes <= most:
        yield data
        return
    memory = data.view(np.uint8)
    for start in range(0, memory.size, most):
        yield memory[start : start + most]


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
    equal keys share a node.  Optional: ``bind(messages) -> Transfer``, persistent requests;
    ``roll_call``, which asks the ranks that are not on the board; ``begin_arrival(sequence)``;
    ``patience``, how long a wait spins; ``threads``, whether it may be called by several.

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

    def isend_short(self, content: bytes, peer: int, tag: int) -> Request:
        """Begin to send at most `SHORT_BYTES` bytes, for :meth:`irecv_short`."""

    def irecv_short(self, peer: int, tag: int) -> ShortRequest:
        """Begin to receive what :meth:`isend_short` sent, of whatever length."""

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


class UnboundTransfer(AllOf):
    """A round without persistent requests: posts its messages anew each time.

    Parameters
    ----------
    slot : list of int
        One number, shared by all rounds of a program: which tags are its own, so that operations
        that are under way at the same time do not mix.
    space : int
        Number of tags of a slot.
    """

    __slots__ = ("_isend", "_irecv", "_messages", "_slot", "_space")

    def __init__(self, backend: Backend, messages: Sequence[Message], slot: list[int], space: int):
        self._isend, self._irecv = backend.isend, backend.irecv
        self._messages, self._slot, self._space = messages, slot, space
        super().__init__(())

    def start(self) -> None:
        """Post every message, receives first."""
        isend, irecv, base = self._isend, self._irecv, self._slot[0] * self._space
        self._requests = [
            (irecv if m.incoming else isend)(m.data, m.peer, m.tag + base) for m in self._messages
        ]
