"""Bare messages on a communicator that its holder has for itself, with its deadline."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from .work import UNSET


class Posting:
    """Sends and receives without the costs of a Work; the holder keeps their memory.

    Parameters
    ----------
    comm : Communicator
        Nobody else sends arrays on it.

    Attributes
    ----------
    tags : int
        How many tags there are, from 0.
    """

    def __init__(self, comm: Any):
        self._service = comm._service
        self.comm, backend = comm, self._service.backend
        self._isend, self._irecv = backend.isend, backend.irecv
        self._base, self.tags = comm._messages.arrays

    def send(self, data: np.ndarray, peer: int, tag: int) -> Any:
        """Begin to send a flat array; gives what has ``test()``."""
        return self._isend(data, peer, self._base + tag)

    def receive(self, data: np.ndarray, peer: int, tag: int) -> Any:
        """Begin to receive into a flat array.

        Its ``test()`` raises :class:`~mpidist.CollectiveMismatch` once if the message was shorter.
        """
        return self._irecv(data, peer, self._base + tag)

    def check_usable(self) -> None:
        """Raise CommunicatorBroken if something before was left unfinished."""
        self._service.check_usable()

    def wait(self, test: Callable[[], bool], what: Callable[[], str]) -> None:
        """Wait for ``test()`` while all that is under way goes on.

        Raises
        ------
        CollectiveTimeout
            With ``what()``, past the communicator's deadline.
        """
        service = self._service
        if not service.engine.wait(test, service.deadline(UNSET)):
            raise service.timed_out(what(), None, "")

    def broke(self, error: BaseException, what: str, *memory: object) -> BaseException:
        """Note that `what` was left unfinished, and give the error to be raised.

        `memory` is what messages may still come to.
        """
        return self._service.broke(error, what, self._service.sequence, *memory)
