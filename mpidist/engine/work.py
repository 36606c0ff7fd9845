"""Work: the handle of an operation in the background."""

from __future__ import annotations

import ctypes
import logging
from collections.abc import Callable
from time import perf_counter
from typing import Any

from .door import Door

log = logging.getLogger("mpidist")


class _Unset:
    """The type of UNSET, an argument that was not given: the communicator's setting holds."""

    def __repr__(self) -> str:
        return "<as configured>"


UNSET: Any = _Unset()
_pending: set[Work] = set()
"""Pending operations: MPI may still write to their memory, even if the handle is dropped."""
_lost: list[object] = []
# Kept beyond the end of Python: MPI_Finalize runs after it, and may still receive messages.
for _memory in (_pending, _lost):
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(_memory))


def keep(memory: object) -> None:
    """Keep the memory of a failed operation that cannot be cancelled, for the rest of the job."""
    _lost.append(memory)


class Work:
    """Handle of an operation that runs in the background.

    Attributes
    ----------
    result : object
        The result that the blocking call would return; available once `done`.
    """

    def __init__(
        self,
        test: Callable[[], bool],
        wait: Callable[[Callable[[], bool], Any], None],
        give: Callable[[], Any],
        pending: set[Work] | None = None,
        sender: Callable[[], int | None] | None = None,
        *,
        door: Door,
    ):
        self._door = door
        self._test, self._wait, self._give, self._sender = test, wait, give, sender
        self._result: Any = None
        self._done = False
        self._error: Exception | None = None
        self._pending = pending if pending is not None else set()
        self._pending.add(self)
        _pending.add(self)

    def observe(self, ended: Callable[[], object], waited: Callable[[float], object]) -> None:
        """Register callbacks: ``ended()`` on completion, ``waited(begin)`` after each wait.

        The ``test()`` or ``wait()`` that finds the operation complete calls ``ended``; nothing does
        if it fails.  `begin` is the start of the wait, in seconds of ``time.perf_counter``; a wait
        that fails counts too.
        """
        give, wait = self._give, self._wait

        def ending() -> Any:
            ended()
            return give()

        def waiting(test: Callable[[], bool], timeout: Any) -> None:
            begin = perf_counter()
            try:
                wait(test, timeout)
            finally:
                waited(begin)

        self._give, self._wait = ending, waiting

    @property
    def done(self) -> bool:
        """Whether the operation has ended; reading it polls."""
        return self.test()

    @property
    def result(self) -> Any:
        """The result; raises RuntimeError while the operation is pending."""
        if not self._done:
            raise RuntimeError("the operation is still pending: call wait() first")
        return self._result

    @property
    def source(self) -> int | None:
        """Rank that sent the received message; None for other operations.

        Raises RuntimeError while the operation is pending.
        """
        if not self._done:
            raise RuntimeError("the operation is still pending: call wait() first")
        return None if self._sender is None else self._sender()

    def test(self) -> bool:
        """Poll; return whether the operation has ended."""
        if self._done:
            return True
        token = self._door.enter_pending()
        try:
            return self.poll()
        finally:
            self._door.leave(token)

    def poll(self) -> bool:
        """Poll, as :meth:`test` does, for a caller that is inside the communicator's door."""
        if not self._done and self._poll():
            self._end()
        return self._done

    def _poll(self) -> bool:
        if self._error is not None:
            raise self._error
        try:
            return self._test()
        except Exception as error:
            self._error = error
            if getattr(error, "harmless", False):  # nothing of it is pending any more
                self._forget()
            raise

    def wait(self, timeout: float | None = UNSET) -> Any:
        """Wait until the operation has ended, and return its result.

        Parameters
        ----------
        timeout : float or None, optional
            Seconds; None waits forever; by default the communicator's.

        Raises
        ------
        CollectiveTimeout
            If the deadline passed; the communicator is broken then.
        """
        if not self._done:
            door = self._door
            held = [door.enter_pending()]

            def poll() -> bool:
                if self._done or self._poll():
                    return True
                door.give_way(held)
                return False

            try:
                self.complete(timeout, poll)
            finally:
                if held:
                    door.leave(held[0])
        return self._result

    def complete(
        self, timeout: float | None = UNSET, poll: Callable[[], bool] | None = None
    ) -> None:
        """Wait, as :meth:`wait` does, for a caller that is inside the communicator's door."""
        if not self._done:
            self._wait(poll or self._poll, timeout)
            self._end()

    def _end(self) -> None:
        if not self._done:
            self._done = True
            self._forget()
            self._result = self._give()

    def _forget(self) -> None:
        self._pending.discard(self)
        _pending.discard(self)


def sweep(works: set[Work]) -> None:
    """Poll begun operations, so that the references to those that have ended are dropped."""
    for work in list(works):
        try:
            work.poll()
        except Exception:  # raised again in wait() of that operation
            log.debug("an operation in the background failed", exc_info=True)
