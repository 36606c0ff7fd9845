"""Liveness: which ranks of this node are dead, told by the operating system, whatever ended them.

The kernel has a file descriptor for each process (pidfd) that becomes readable when it ends.  All
those that this process watches are polled at once, in its waits, at most every half a millisecond;
communicators with members in common share them.  Before that the kernel frees the memory of the
process, which takes 0.1 to 0.5 ms for each MB.  So in waits that last, the processes are asked,
one after another, whether they have begun to end.
"""

from __future__ import annotations

import fcntl
import os
import select
import signal
import socket
import struct
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from weakref import WeakValueDictionary

from ..errors import RankFailed

FAULT_TOLERANT = "OMPI_MCA_mpi_ft_enable"  # set by Open MPI's mpirun --with-ft ulfm
INTERVAL = 0.5e-3  # seconds between two polls: one takes about 0.5 µs, however many processes
_INFO = struct.Struct("QQ11Ii")  # pidfd_info of Linux 6.13, whose exit code is known from 6.15 on
_GET_INFO, _EXIT_CODE = 0xC040FF0B, 1 << 3  # PIDFD_GET_INFO, PIDFD_INFO_EXIT
_FLAGS_FIELD, _EXIT_CODE_FIELD = 6, 49  # in /proc/PID/stat, behind the name of the program
_EXITING = 4  # PF_EXITING, of the flags
_LASTS = 20e-3  # seconds between two looks at most, for a wait that lasts on a shared core, too


class Process:
    """A process of this node, watched until it ends.

    `status` is its wait status once it has `ended`, None if that is unknown.
    """

    __slots__ = ("pid", "ended", "status", "_handle", "_watch", "__weakref__")

    def __init__(self, pid: int, watch: _Watch):
        self.pid, self.ended, self._watch = pid, False, watch
        self.status: int | None = None
        self._handle = -1
        try:
            self._handle = os.pidfd_open(pid)
            watch.poller.register(self._handle, select.EPOLLIN)
        except ProcessLookupError:
            self.ended = True
        # No such call in this Python or kernel, not allowed, or too many open files.
        except (OSError, AttributeError):
            self._close()

    @property
    def handle(self) -> int:
        """File descriptor of the process; -1 if it is not watched any more, or never was."""
        return self._handle

    def end(self) -> None:
        """Record that the process has ended."""
        self.status, self.ended = self._find_status(), True
        self._close()

    def failure(self) -> int:
        """Return the wait status of a process that has begun to end by a signal or an error.

        It is 0 for all others, and for one of another user, whose status /proc does not tell.
        """
        fields = self._stat()
        exits = fields and int(fields[_FLAGS_FIELD]) & _EXITING
        return int(fields[_EXIT_CODE_FIELD]) if exits else 0

    def _find_status(self) -> int | None:
        """Return how the process ended: of one that is not gone from /proc, else its descriptor."""
        if status := self.failure():
            return status
        with suppress(OSError):
            info = bytearray(_INFO.size)
            struct.pack_into("Q", info, 0, _EXIT_CODE)
            fcntl.ioctl(self._handle, _GET_INFO, info)
            mask, *_, status = _INFO.unpack(info)
            if mask & _EXIT_CODE:
                return status
        return None

    def _stat(self) -> list[bytes]:
        """Return the fields of /proc/PID/stat behind the program's name; [] if it is not there."""
        try:
            file = os.open(f"/proc/{self.pid}/stat", os.O_RDONLY | os.O_CLOEXEC)
        except OSError:
            return []
        try:
            return os.read(file, 4096).rpartition(b")")[2].split()
        except OSError:  # it is gone by now
            return []
        finally:
            os.close(file)

    def _close(self) -> None:
        handle, self._handle = self._handle, -1
        if handle < 0:
            return
        # In a forked child the poller is the parent's.
        if self._watch.own == os.getpid():
            with suppress(OSError, ValueError):
                self._watch.poller.unregister(handle)
        with suppress(OSError):
            os.close(handle)

    def __del__(self) -> None:
        self._close()


class _Watch:
    """All processes that this one watches; `ends` counts those that have ended."""

    def __init__(self) -> None:
        self.poller, self.own = select.epoll(), os.getpid()
        self._lock = threading.Lock()  # a watchdog looks too, and threads of their own
        self.ends, self.next = 0, 0.0
        self._last, self._asks, self._turn = 0.0, 0.0, 0  # look, next question, who was asked
        self._known: WeakValueDictionary[int, Process] = WeakValueDictionary()

    def process(self, pid: int) -> Process:
        """Return the process with this number."""
        with self._lock:
            process = self._known.get(pid)
            if process is None or process.ended:  # the number may belong to another one by now
                process = self._known[pid] = Process(pid, self)
            return process

    def look(self, now: float, closely: bool = False) -> None:
        """Find out which processes have ended; `closely` asks all whether they begin to end."""
        lasts, self._last = now - self._last < _LASTS, now
        self.next = now + INTERVAL
        with self._lock:
            handles = {handle for handle, _ in self.poller.poll(0)}
            asks = (closely or lasts) and now >= self._asks
            if not (handles or asks):
                return
            alive = [process for process in list(self._known.values()) if process.handle >= 0]
            ended = [process for process in alive if process.handle in handles]
            if asks and alive and not ended:
                # To ask one takes 10 µs: so one is asked in 0.5 ms, or as many at once in the mean.
                self._turn = (self._turn + 1) % len(alive)
                asked = alive if closely else [alive[self._turn]]
                self._asks = now + INTERVAL * len(asked)
                ended = [process for process in asked if process.failure()]
            for process in ended:
                process.end()
                self.ends += 1


_watches: list[_Watch] = []  # the one of this process, from its first communicator on


def _watch() -> _Watch:
    if not _watches or _watches[0].own != os.getpid():
        _watches[:] = [_Watch()]
    return _watches[0]


class Liveness:
    """Tells `rank` of a communicator which other ranks of its node are dead.

    `pids` are the process numbers of the ranks of the node, as this process sees them, by rank.
    ``has_left(rank)`` returns whether a rank has said that it leaves: then an end with exit code 0,
    or one of which nobody knows the exit code, is none of a lost rank.

    `lost` has the dead ranks that are known so far, and how each ended: "on node3 was killed by
    signal 9 (SIGKILL)".
    """

    def __init__(self, rank: int, pids: Mapping[int, int], has_left: Callable[[int], bool]):
        self.lost: dict[int, str] = {}
        self._rank, self._has_left, self._watch = rank, has_left, _watch()
        self._processes = {
            r: self._watch.process(pid) for r, pid in pids.items() if pid != os.getpid()
        }
        self._seen = -1  # of the watch's ends

    def check(self) -> None:
        """Raise RankFailed if a rank of this node is dead; looked for every half a millisecond."""
        watch, now = self._watch, time.monotonic()
        if now >= watch.next:
            watch.look(now)
        self._take()
        if self.lost:
            raise failed(self._rank, self.lost)

    def look(self) -> Mapping[int, str]:
        """Return `lost`, after a look at all processes, which is a close one now and then."""
        self._watch.look(time.monotonic(), closely=True)
        self._take()
        return self.lost

    def _take(self) -> None:
        """Add the processes that have ended to `lost`."""
        if self._watch.ends == self._seen:
            return
        self._seen = self._watch.ends
        for rank, process in tuple(self._processes.items()):
            if not process.ended or self._processes.pop(rank, None) is None:
                continue  # or another thread has taken it
            if process.status or not self._has_left(rank):
                self.lost[rank] = f"on {socket.gethostname()} {how_ended(process.status)}"


def how_ended(status: int | None) -> str:
    """Return a wait status as text, such as "was killed by signal 9 (SIGKILL)"."""
    if status is None:
        return "has ended"
    if not os.WIFSIGNALED(status):
        return f"has ended with exit code {os.WEXITSTATUS(status)}"
    number = os.WTERMSIG(status)
    try:
        return f"was killed by signal {number} ({signal.Signals(number).name})"
    except ValueError:
        return f"was killed by signal {number}"


def failed(rank: int, reasons: Mapping[int, str], what: str = "") -> RankFailed:
    """Return the error that `rank` raises because other ranks are lost.

    `reasons` says of each how it ended, `what` names the operation that it leaves.
    """
    texts = "; ".join(f"rank {r} {reason}" for r, reason in sorted(reasons.items()))
    text = f"{what} cannot complete: {texts}" if what else texts
    return RankFailed(f"rank {rank}: {text}", ranks=tuple(reasons), reasons=reasons)
