"""Sends and receives of a process group, and its monitored barrier, which is made of them."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ..communicator.communicator import Communicator
from ..communicator.layers import max_tag
from ..engine.work import UNSET
from ..errors import CommunicatorInUse, MpidistError
from ..measure import plural
from .memory import TensorMemory, readable
from .work import THREADS, Act, Member, Work, backend_error, milliseconds, recorded, uncompiled

_MOST_PENDING = 64
_LOOK_SECONDS = 2e-4  # of a monitored barrier


class Message(Work):
    """The Work of a send or receive, over a communicator's `work`; `back` copies the result."""

    def __init__(
        self, comm: Communicator, what: str, x: Tensor, work: Any, back: Act | None = None
    ):
        super().__init__([x])
        self._comm, self._what, self._work, self._back = comm, what, work, back

    def _end(self, error: BaseException | None = None) -> None:
        # In another thread, as callbacks may wait for what this thread is to do.
        THREADS.complete_elsewhere(self.record(error))

    @uncompiled
    def wait(self, timeout: timedelta = timedelta(0)) -> bool:
        if not self.ended:
            seconds = timeout.total_seconds()
            limit = seconds if seconds > 0 else self._comm.timeout
            try:
                self._work.wait(seconds if seconds > 0 else UNSET)
                with self._lock:  # of two threads that wait, one copies, before either returns
                    if self._back is not None and not self.ended:
                        self._back()
                    self._end()
            except CommunicatorInUse:  # the message is still to come
                raise
            except MpidistError as error:
                self._end(backend_error(error, self._what, limit))
        return super().wait()

    @uncompiled
    def is_completed(self) -> bool:
        """Make progress; return whether the send or receive is complete."""
        if not self.ended:
            try:
                moved = self._work.test()
            except CommunicatorInUse:  # another thread makes progress
                return False
            except MpidistError:
                moved = True
            if moved:
                with contextlib.suppress(Exception):  # wait() and exception() have it
                    self.wait()
        return self.ended

    @uncompiled
    def get_future(self) -> Any:
        with contextlib.suppress(Exception):  # the future has it
            self.wait()  # nobody else makes progress
        return super().get_future()

    def _source_rank(self) -> int:
        """Wait for the message, and return the sender's rank in the group."""
        self.wait()
        return self._work.source

    source_rank = _source_rank


class Messages:
    """Sends and receives on a communicator of their own, which threads share."""

    def __init__(self, comm: Communicator, member: Member, memory: TensorMemory):
        self.comm, self._member, self._memory = comm, member, memory
        # That have not ended, as far as is known; by several threads: changed in place only.
        self.pending: set[Message] = set()
        self._monitored = 0

    def send(self, x: Tensor, peer: int, tag: int) -> Message:
        """Begin to send a tensor."""
        given = readable(x)
        call = f"send to rank {peer}", tag
        return self._post(
            *call, given, lambda: self.comm.isend(self._memory.flat(given), peer, tag)
        )

    def recv(self, x: Tensor, peer: int | None, tag: int) -> Message:
        """Begin to receive a tensor; from any rank if `peer` is None."""
        out, back = self._memory.writable("recv: tensor", x)
        call = f"recv from {'any rank' if peer is None else f'rank {peer}'}", tag
        begin = lambda: self.comm.irecv(self._memory.flat(out), peer, tag)  # noqa: E731
        return self._post(*call, x, begin, back)

    def _post(
        self, call: str, tag: int, x: Tensor, begin: Callable[[], Any], back: Act | None = None
    ) -> Message:
        what = f"{self._member.what(call)}, tag {tag}"
        if torch.autograd._profiler_enabled():
            recorded(call[:4], begin, True)
        try:
            work = begin()
        except MpidistError as error:
            raise backend_error(error, what, self.comm.timeout) from error
        message = Message(self.comm, what, x, work, back)
        self.pending -= {m for m in tuple(self.pending) if m.ended}
        if len(self.pending) > _MOST_PENDING:  # nobody waits for them
            self.advance()
        self.pending.add(message)
        return message

    def advance(self) -> None:
        """Let sends and receives make progress, and forget those that have ended."""
        self.pending -= {m for m in tuple(self.pending) if m.is_completed()}

    def meet(self, seconds: float | None, wait_all_ranks: bool) -> None:
        """Wait until all members have called this, as :meth:`ProcessGroup.monitored_barrier`.

        Rank 0 hears of all others, and then answers them.
        """
        # A tag for each barrier: who comes late to one would pass for early at the next.
        self._monitored += 1
        comm, tag = self.comm, self._monitored % (max_tag(self.comm) + 1)
        until, length = time.monotonic() + (seconds or 0), f"{milliseconds(seconds)} ms"

        def came(peer: int) -> bool:
            while comm.iprobe(peer, tag, "object") is None:
                if seconds is not None and time.monotonic() >= until:
                    return False
                time.sleep(_LOOK_SECONDS)
            comm.recv_object(peer, tag)
            return True

        if self._member.rank:
            comm.send_object("here", 0, tag)
            if not came(0):
                raise dist.DistBackendError(
                    f"Rank {self._member.rank} successfully reached monitoredBarrier, but received "
                    f"errors while waiting for send/recv from rank 0 for {length}: its error names "
                    "the missing ranks"
                )
            return
        if seconds == 0:
            raise dist.DistBackendError(f"Rank 0 timed out in monitoredBarrier after {length}")
        missing = []
        for peer in range(1, self._member.size):
            if not came(peer):
                missing.append(peer)
                if not wait_all_ranks:
                    break
        if missing:
            which = f"{plural(len(missing), 'Rank')} {', '.join(map(str, missing))}"
            raise dist.DistBackendError(f"{which} failed to pass monitoredBarrier in {length}")
        # Only now: an answer says that all have come.
        for peer in range(1, self._member.size):
            comm.send_object("all are here", peer, tag)
