"""The null backend, which moves no data: it measures the overhead of mpidist itself."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from .base import Backend, RoundMessage
from .board import Board, private_words
from .waiting import Condition, Progress, poll


class NullRequest:
    """A message without content, or a round, that is complete as soon as it is posted."""

    content, source = b"", 0

    def start(self) -> None:
        """Post nothing."""

    def test(self) -> bool:
        """Return True."""
        return True

    def release(self) -> None:
        """Do nothing: there is no memory to release."""


_DONE = NullRequest()


class NullBackend(Backend):
    """One rank without any peers: sends and receives are complete at once and move nothing.

    A received array keeps its contents.
    """

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

    def irecv_short_any(self, tag: int) -> NullRequest:
        """Receive nothing."""
        return _DONE

    def iprobe(self, peer: int | None, tag: int) -> int | None:
        """Return None: no message arrives."""
        return None

    def subgroup(self, ranks: Sequence[int], tag: int) -> NullBackend:
        """Return a null backend with as many ranks as `ranks`."""
        return NullBackend(len(ranks), list(ranks).index(self.rank))

    def bind(self, messages: Sequence[RoundMessage]) -> NullRequest:
        """Return a transfer that is complete as soon as it is started."""
        return _DONE

    def wait(self, test: Condition, deadline: float | None, progress: Progress = None) -> bool:
        """Wait until ``test()`` is true; return False if `deadline` passed first."""
        return poll(test, deadline, progress)

    def split(self, color: int | None, key: int) -> NullBackend | None:
        """Return a null backend of one rank, as no peer can tell its color; None for color None."""
        return None if color is None else NullBackend(1)

    def abort(self, code: int) -> None:
        """End the process."""
        raise SystemExit(code)
