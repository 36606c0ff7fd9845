"""The null backend moves nothing: it measures our own overhead."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from .base import Backend, Message
from .board import Board, private_words
from .waiting import poll


class NullRequest:
    """A message that has moved as soon as it is posted; nothing is in it."""

    content = b""

    def test(self) -> bool:
        """Tell that it has moved."""
        return True

    def release(self) -> None:
        """Do nothing: there is no memory."""


_DONE = NullRequest()


class NullTransfer:
    """A round that is over as soon as it is started."""

    def start(self) -> None:
        """Post nothing."""

    def test(self) -> bool:
        """Tell that it is over."""
        return True


class NullBackend(Backend):
    """Rank `rank` of `size` ranks that do not exist; received data are whatever the memory held."""

    name = library = "null"
    tag_limit = 2**31
    threads = True

    def __init__(self, size: int, rank: int = 0):
        self.rank, self.size = rank, size
        self.hosts: Sequence[object] = (0,) * size
        self.board = Board(private_words(size), rank, (rank,))

    def isend(self, data: np.ndarray, peer: int, tag: int) -> NullRequest:
        """Send nothing."""
        return _DONE

    def irecv(self, data: np.ndarray, peer: int, tag: int) -> NullRequest:
        """Receive nothing."""
        return _DONE

    def isend_short(self, content: bytes, peer: int, tag: int) -> NullRequest:
        """Send nothing."""
        return _DONE

    def irecv_short(self, peer: int, tag: int) -> NullRequest:
        """Receive nothing."""
        return _DONE

    def bind(self, messages: Sequence[Message]) -> NullTransfer:
        """Give a transfer that is over at once."""
        return NullTransfer()

    def wait(
        self,
        test: Callable[[], bool],
        deadline: float | None,
        progress: Callable[[], object] | None = None,
    ) -> bool:
        """Wait as every backend does."""
        return poll(test, deadline, progress)

    def split(self, color: int | None, key: int) -> NullBackend | None:
        """Give a null backend of one rank, for nobody answers."""
        return None if color is None else NullBackend(1)

    def abort(self, code: int) -> None:
        """End the process."""
        raise SystemExit(code)
