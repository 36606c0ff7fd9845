"""Memory of a rank that outlives it: the other ranks of its node read its last records there."""

from __future__ import annotations

import errno
import math
import os
import socket
import struct
import weakref
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

from ..backends.memory_file import available
from ..communicator.launcher_notes import launched_rank
from ..errors import LaunchError

SLOTS = 3  # a rank may write step k + 2 while another needs k: nobody commits a step ahead of k + 1
UNCHECKED_BYTES = 64 << 10  # by which a record may grow without a look at the free memory
_HEAD = struct.Struct("<8sq6Q")  # mark, step, and what a Record says of the bytes that follow
_MARK, _TORN = b"mpidist1", b"\0" * 8


class Record(NamedTuple):
    """What is known of a record before it is read."""

    length: int  # bytes
    head: int  # bytes before the share
    share: int = 0  # the number of its share of what all ranks have alike,
    shares: int = 0  # of how many; 0 if it has none
    alone: int = 0  # objects that are another one on each rank
    guest: int = 0  # whether a rank of another node keeps it: it has no share


class Vault:
    """The records of a rank, one of each of its last steps.

    Each slot is an anonymous file in memory: nothing is left behind however the job ends, and the
    kernel keeps it while another rank of the node has it open.  Or it is one of `files`, which are
    open for writing: see records.py.  A record is written between two marks, so that one which a
    kill has cut off is recognised.
    """

    def __init__(self, files: Sequence[int] = ()) -> None:
        self._named = bool(files)
        self._steps: list[float] = [-1] * SLOTS  # of the records in the slots
        self._files = list(files) or [
            os.memfd_create(f"mpidist-vault-{slot}") for slot in range(SLOTS)
        ]
        self._longest = 0
        self.soon_free = 0  # bytes of older records, which go before these fill their slots
        self._end = weakref.finalize(self, _close, self._files)

    @property
    def names(self) -> list[str]:
        """The paths under which other processes of the node open the slots."""
        return [f"/proc/{os.getpid()}/fd/{file}" for file in self._files]

    def write(
        self,
        step: int,
        parts: Sequence[bytes | memoryview],
        shared: Sequence[Any] = (),
        **about: int,
    ) -> None:
        """Write the record of a step, in place of its last one, else of the oldest.

        The bytes of `shared` come last; `about` are other fields of its :class:`Record`.
        MemoryError, with the size, if there is not enough memory for it.
        """
        head = sum(memoryview(part).nbytes for part in parts)
        length = head + sum(memoryview(part).nbytes for part in shared)
        record = Record(length, head, **about)
        ranks = max(record.shares, 1) if self._named else 1  # of this node
        if length > self._longest:
            more = SLOTS * (length - self._longest)
            if self._named:
                # All ranks of the node need as much, and the others may have a record already.
                more = ranks * more - (ranks - 1) * more // SLOTS
            free = self._free()
            if more > UNCHECKED_BYTES and more > free + self.soon_free:
                raise no_room(length, ranks, free, self._folder)
            self._longest = length
        there = step if step in self._steps else min(self._steps)
        slot = self._steps.index(there)
        self._steps[slot], file = step, self._files[slot]
        os.pwrite(file, _HEAD.pack(_TORN, step, *record), 0)
        at = _HEAD.size
        for part in (*parts, *shared):
            left = memoryview(part).cast("B")
            while len(left):  # Linux writes 2 GiB at most
                try:
                    done = os.pwrite(file, left, at)
                except OSError as error:
                    if error.errno != errno.ENOSPC:
                        raise
                    # Another rank, or another program, has been faster than the look at it.
                    raise no_room(length, ranks, self._free(), self._folder) from None
                left, at = left[done:], at + done
        os.pwrite(file, _HEAD.pack(_MARK, step, *record), 0)

    def drop(self, step: int) -> None:
        """Leave no record of a step."""
        if step in self._steps:
            self._tear(self._steps.index(step))

    def _tear(self, slot: int) -> None:
        os.pwrite(self._files[slot], _HEAD.pack(_TORN, -1, *Record(0, 0)), 0)
        self._steps[slot] = -1

    @contextmanager
    def replacing(self, step: int) -> Iterator[None]:
        """Have the record of a step written beside its last one, which goes afterwards.

        So there is one of them if this rank is lost while it writes.
        """
        if step not in self._steps:
            yield
            return
        old = self._steps.index(step)
        self._steps[old] = math.inf  # neither of this step, nor the oldest
        try:
            yield
        except BaseException:
            self._steps[old] = step
            raise
        self._tear(old)

    @property
    def _folder(self) -> str:
        """The folder of the job's folder, which is made anew each time; "" of no files."""
        name = os.readlink(f"/proc/self/fd/{self._files[0]}")
        return os.path.dirname(os.path.dirname(name)) if self._named else ""

    def _free(self) -> float:
        return room(self._files[0]) if self._named else available()

    def reader(self) -> Reader:
        """Return a reader of this vault, in the same process."""
        return Reader([os.dup(file) for file in self._files])

    def close(self) -> None:
        """Give the memory back, unless others have it open."""
        self._end()


class Reader:
    """The vault of a rank of this node, of this one or another; open after that rank's end, too."""

    def __init__(self, files: list[int]):
        self._files = files
        self._end = weakref.finalize(self, _close, files)

    @classmethod
    def open(cls, names: Sequence[str], rank: int) -> Reader:
        """Open the vault of another rank by its :attr:`Vault.names`."""
        files: list[int] = []
        try:
            for slot, name in enumerate(names):
                files.append(os.open(name, os.O_RDONLY))
                if f"mpidist-vault-{slot}" not in os.readlink(f"/proc/self/fd/{files[-1]}"):
                    raise OSError(f"{name} is another file")
        except OSError as error:
            _close(files)
            raise LaunchError(
                f"md.elastic: the vault of rank {rank} cannot be opened ({error}): expected the "
                "ranks of a node to see the same /proc, as they do outside of containers of their "
                "own"
            ) from None
        return cls(files)

    def steps(self) -> dict[int, Record]:
        """Return what is known of each complete record, by step."""
        found: dict[int, Record] = {}
        for file in self._files:
            mark, step, *record = _head(file)
            if mark == _MARK:
                found.setdefault(step, Record(*record))  # as `read`
        return found

    def read(self, step: int, start: int = 0, stop: int | None = None) -> bytes:
        """Return bytes `start` to `stop` of the record of a step; KeyError if it is incomplete."""
        heads = ((file, *_head(file)[:3]) for file in self._files)
        found = ((file, size) for file, mark, s, size in heads if (mark, s) == (_MARK, step))
        file, length = next(found, (-1, 0))
        if file < 0:
            raise KeyError(step)
        at, end = _HEAD.size + start, _HEAD.size + (length if stop is None else stop)
        parts = []
        while at < end:
            parts.append(os.pread(file, end - at, at))
            if not parts[-1]:
                raise KeyError(step)
            at += len(parts[-1])
        return b"".join(parts)

    def leave(self, step: int | None) -> None:
        """Give back the memory of all records but that of a step."""
        for file in self._files:
            if _head(file)[1] != step:
                os.truncate(f"/proc/self/fd/{file}", 0)

    def close(self) -> None:
        """Close the files."""
        self._end()


def room(place: int | str | os.PathLike[str]) -> float:
    """Return the bytes that this process may still write to an open file, or into a folder."""
    there = os.fstatvfs(place) if isinstance(place, int) else os.statvfs(place)
    return min(available(), there.f_bavail * there.f_frsize)


def no_room(length: int, ranks: int, free: float, folder: str) -> MemoryError:
    """Return the error for records of `length` bytes; `folder` is "" for anonymous memory.

    `ranks` of this node need as much each; 0: all of them together.
    """
    rank, total = launched_rank(), SLOTS * length * max(ranks, 1)
    of = "this rank's vault" if ranks else "the vaults of this node"
    fix = "use more nodes, or fewer ranks on each"
    if folder:
        fix = (
            f"make it larger (mount -o remount,size=…, docker run --shm-size=…) than the "
            f"{(total >> 20) + 1} MiB of this node's ranks, or start without --max-restarts"
        )
    return MemoryError(
        f"{f'rank {rank}: ' * (rank is not None)}the state of a step takes {length} bytes of {of}, "
        f"{SLOTS * length} for {SLOTS} steps{f' and each of {ranks} ranks' * (ranks > 1)}; "
        f"{int(free)} are free{f' in {folder}' * bool(folder)} on {socket.gethostname()}: {fix}"
    )


def _head(file: int) -> tuple[Any, ...]:
    head = os.pread(file, _HEAD.size, 0)
    return _HEAD.unpack(head.ljust(_HEAD.size, b"\0"))


def _close(files: list[int]) -> None:
    while files:
        os.close(files.pop())
