"""The recorder: writes the flight record of this process, from the start of mpidist to its end.

The file is in memory (``/dev/shm``), so that it outlives the process also after ``kill -9``; the
last process of a node to end well removes the records of its job.  Those of jobs that did not are
kept, for ``mpidist flight``: of the newest :data:`JOBS` (8), and at most :data:`MOST_BYTES`.
"""

from __future__ import annotations

import atexit
import ctypes
import errno
import itertools
import logging
import os
import secrets
import socket
import stat
import sys
import time
import weakref
import zlib
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from time import monotonic_ns
from typing import Any

from ..errors import ConfigError
from . import flight, memory_file
from .flight import (
    BEGUN,
    ENTRIES,
    ENTRY,
    HEADER,
    LAST,
    MEMBERS_CRC,
    PLACE,
    RING_AT,
    SERIAL,
    SINCE,
    WAITING,
    stamp_of,
)

log = logging.getLogger("mpidist")
_COUNT = HEADER["count"]
JOBS, MOST_BYTES = 8, 16 << 20  # of the records of jobs that did not end well


def new_job() -> str:
    """Return a name for a job: the time, and what tells it from others of the same second."""
    return f"{time.strftime('%Y%m%d-%H%M%S')}-{secrets.token_hex(2)}"


def both_clocks() -> tuple[int, int]:
    """Return the wall clock and the monotonic one at one moment, in ns.

    Processes are held up between two readings, on a loaded machine for milliseconds: of five the
    closest is taken, else the timelines of ranks would be as far apart.
    """
    readings = [(monotonic_ns(), time.time_ns(), monotonic_ns()) for _ in range(5)]
    before, wall, after = min(readings, key=lambda reading: reading[2] - reading[0])
    return wall, (before + after) // 2


def own_folder(path: Path) -> bool:
    """Create a folder that only this user can enter; return whether it was created.

    Raises OSError if it is there already and is not such a folder.
    """
    try:
        path.mkdir(mode=0o700)
        return True
    except FileExistsError:
        there = path.lstat()
        if not stat.S_ISDIR(there.st_mode) or there.st_uid != os.getuid():
            raise PermissionError(f"{path} is not a folder of this user") from None
        if stat.S_IMODE(there.st_mode) & 0o022:
            raise PermissionError(f"others may write into {path}") from None
        return False


def _folder_of(job: Path) -> bool:
    """Create the folder of a job, in that of all jobs; return whether it was created here."""
    for _ in range(100):
        own_folder(job.parent)
        with suppress(FileNotFoundError):  # the last of other jobs has just removed their folder
            return own_folder(job)
    raise FileNotFoundError(errno.ENOENT, "others remove it all the time", str(job.parent))


class Track:
    """Records the operations of one communicator.

    `state` has the words of its track, such as ``state[ARRIVED]``; `addresses` are those of the
    number of operations, of the ring and of the track, for compiled code.  `waits` is the wait that
    is recorded: the operation before it, and its line; None if there is none.  `awaited` is
    the messages that are waited for, if any: a function, and its argument, that describes them.
    """

    __slots__ = (
        *("state", "serial", "addresses", "waits", "awaited", "begin"),
        *("_recorder", "_bytes", "__weakref__"),
    )

    def __init__(self, recorder: Recorder, slot: int, serial: int):
        at = flight.TRACKS_AT + slot * flight.TRACK_BYTES
        self._recorder, self.serial = recorder, serial % flight.SERIALS
        self.waits: tuple[int, str] | None = None
        self.awaited: tuple[Callable[[Any], str], Any] | None = None
        self._bytes = recorder.memory[at : at + flight.TRACK_BYTES]
        self.state = self._bytes.cast("q")
        start = ctypes.addressof(ctypes.c_char.from_buffer(recorder.memory))
        self.addresses = start + 8 * HEADER["count"], start + flight.RING_AT, start + at
        self.begin = _recording(recorder, self.serial, at)

    def name(self, name: str) -> None:
        """Set the communicator's name."""
        _put(self._bytes, flight.NAME_AT, flight.NAME_BYTES, name)

    def wait(self, site: str) -> None:
        """Record the line of the user's program that has been waiting for some time."""
        state = self.state
        wait, awaited = (state[BEGUN], site), ""
        if self.waits != wait:  # interrupted to look around, a wait goes on: it is the same one
            if self.awaited is not None:
                describe, messages = self.awaited
                with suppress(Exception):  # the user's function
                    awaited = describe(messages)
            state[WAITING] = 0
            _put(self._bytes, flight.SITE_AT, flight.SITE_BYTES, _ending(site, flight.SITE_BYTES))
            _put(self._bytes, flight.AWAITED_AT, flight.AWAITED_BYTES, awaited)
            state[SINCE] = monotonic_ns()
            state[WAITING] = 1 + state[BEGUN]
            self.waits = wait

    def go_on(self) -> None:
        """Record that what the line waits for has come."""
        self.state[WAITING], self.waits = 0, None

    def describe(self, fingerprint: int, operation: str) -> None:
        """Record what a fingerprint stands for."""
        self._recorder.describe(fingerprint, operation)


def _recording(recorder: Recorder, serial: int, at: int) -> Callable[[int, int], None]:
    """Return ``begin(sequence, fingerprint)``, which records that an operation begins.

    It is of the track `serial`, `at` so many bytes; compiled code does the same (steps.c).
    """
    # What does not change has a name here: looked up in each call it took a fourth of the time.
    # Of 525 ns in Python 3.11 the check sum takes 170, the two stores 135, the place and `what` 65,
    # the clock 30; a number, the clock and one store alone would take 165.
    memory, words, store, clock = recorder.memory, recorder.words, ENTRY.pack_into, monotonic_ns
    count, begun, last, size = _COUNT, at // 8 + BEGUN, at + 8 * LAST, ENTRY.size
    ring, entries, stamp_as = RING_AT, ENTRIES, stamp_of

    def begin(sequence: int, fingerprint: int) -> None:
        number, what, now = next(recorder.numbers), sequence << 16 | serial, clock()
        stamp = stamp_as(number, what, now, fingerprint)
        words[count] = number
        store(memory, ring + (number - 1) % entries * size, stamp, what, now, fingerprint)
        store(memory, last, stamp, what, now, fingerprint)
        words[begun] = sequence

    return begin


class Recorder:
    """The flight record of this process.

    Raises OSError if there is no room for it, or the folder is not this user's alone.
    """

    def __init__(self, job: Path, rank: int, size: int):
        self.job, self._own = job, os.getpid()
        if _folder_of(job):
            prune(job.parent)
        self.path = job / f"rank-{rank}.{self._own}"
        flags = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
        handle = os.open(self.path, flags, 0o600)
        try:
            # Reserved: without room, a store into the mapping would end the process by SIGBUS.
            os.posix_fallocate(handle, 0, flight.NBYTES)
            self.memory = memory_file.map_file(handle, flight.NBYTES).data
        except OSError:
            with suppress(OSError):
                self.path.unlink()
            raise
        finally:
            os.close(handle)
        self.words = self.memory.cast("q")
        self.numbers = itertools.count(1)  # atomic; only where no compiled code counts
        self._serials, self._free = itertools.count(1), list(range(flight.TRACKS))
        self._described: dict[int, int] = {}  # number of its description, by fingerprint
        self._made: Counter[tuple[int, ...]] = Counter()
        self._phases: dict[str, Track | None] = {}
        _put(self.memory, flight.HOST_AT, flight.HOST_BYTES, socket.gethostname())
        _put(self.memory, flight.PROGRAM_AT, flight.PROGRAM_BYTES, " ".join(sys.argv))
        facts = {"version": flight.VERSION, "pid": self._own, "rank": rank, "size": size}
        facts |= {"started": flight.process_started(self._own), "state": flight.RUNNING}
        wall, now = both_clocks()
        facts |= {"wall": wall, "clock": now, "magic": flight.MAGIC}
        for name, value in facts.items():
            self.words[HEADER[name]] = value

    def track(self, members: Sequence[int], rank: int) -> Track | None:
        """Return the track of a new communicator; None if as many as there is room for are alive.

        `members` are its ranks in COMM_WORLD, `rank` is that of this process in it.
        """
        members = tuple(members)
        made = self._made[members] = self._made[members] + 1
        try:
            slot = self._free.pop(0)
        except IndexError:
            self.words[HEADER["unrecorded"]] += 1
            return None
        track = Track(self, slot, next(self._serials))
        state = track.state
        state[SERIAL] = 0
        for at in range(1, len(state)):
            state[at] = 0
        state[MEMBERS_CRC] = zlib.crc32(f"{members} {made}".encode())
        state[PLACE] = rank << 32 | len(members)
        track.name("world")
        state[SERIAL] = 1 + track.serial
        weakref.finalize(track, self._free.append, slot).atexit = False
        return track

    def describe(self, fingerprint: int, operation: str) -> None:
        """Record what a fingerprint stands for, in place of the oldest description."""
        words, number = self.words, self.words[HEADER["texts"]]
        if self._described.get(fingerprint, -flight.TEXTS) > number - flight.TEXTS // 2:
            return  # another communicator has the same operation
        self._described = {
            known: at
            for known, at in ((fingerprint, number), *self._described.items())
            if at > number - flight.TEXTS
        }
        words[HEADER["texts"]] = number + 1
        at = flight.TEXTS_AT + number % flight.TEXTS * flight.TEXT_BYTES
        words[at // 8] = 0
        encoded = operation.encode(errors="replace")
        words[at // 8 + 1] = len(encoded) + 1
        _put(self.memory, at + 16, flight.TEXT_BYTES - 16, operation)
        words[at // 8] = fingerprint

    def phase(self, name: str, what: str) -> None:
        """Record that a phase of this process begins, on a track that is no communicator's."""
        track = self._phases.get(name)
        if track is None:
            track = self._phases[name] = self.track((), 0)
            if track is not None:
                track.name(name)
        if track is not None:
            fingerprint = flight.fingerprint_of(what, False)
            track.describe(fingerprint, what)
            self.numbers = itertools.count(self.words[_COUNT] + 1)  # behind those of compiled code
            track.begin(0, fingerprint)

    def end(self, state: int) -> None:
        """Record how this process ends; the last to end well on a node removes the job's records.

        The first state counts: after an exception a process ends in the same way as any other.
        """
        if os.getpid() != self._own or self.words[HEADER["state"]] != flight.RUNNING:
            return
        self.words[HEADER["state"]] = state
        here = self.words[HEADER["here"]]
        if state == flight.ENDED_WELL and here:
            try:
                records = [flight.read(path) for path in flight.records_in(self.job)]
            except (OSError, ValueError):  # another process removes them, or is of another version
                return
            if len(records) >= here and all(r.state == flight.ENDED_WELL for r in records):
                flight.remove(self.job)


def prune(jobs: Path, most: int = JOBS, most_bytes: int = MOST_BYTES) -> None:
    """Remove the oldest records of jobs of which no process runs, beyond a number and a size.

    The newest one is kept whatever its size: that job may just be started again.
    """
    found = []
    for job in jobs.iterdir():
        with suppress(OSError):
            if not job.is_symlink() and job.is_dir():
                records = flight.records_in(job)
                if records and not any(map(_may_run, records)):
                    found.append((job.stat().st_mtime, len(records) * flight.NBYTES, job))
    kept = 0
    for number, (_, nbytes, job) in enumerate(sorted(found, reverse=True)):
        kept += nbytes
        if number >= most or (kept > most_bytes and number):
            flight.remove(job)


def _may_run(path: Path) -> bool:
    """Return whether the process of a record may run; not of one that cannot be read."""
    try:
        record = flight.read(path)
        return record.alive or (record.elsewhere and record.state == flight.RUNNING)
    except ValueError:
        return False


def _put(memory: memoryview, at: int, nbytes: int, text: str) -> None:
    """Store a text and a zero behind it, cut to what fits."""
    encoded = text.encode(errors="replace")[: nbytes - 1]
    memory[at : at + nbytes] = encoded + bytes(nbytes - len(encoded))


def _ending(text: str, nbytes: int) -> str:
    """Return the end of a text, which tells more of a path, of fewer than `nbytes` bytes."""
    encoded = text.encode(errors="replace")
    return text if len(encoded) < nbytes else f"…{encoded[4 - nbytes :].decode(errors='ignore')}"


_recorder: Recorder | None = None


def start(job: str, rank: int, size: int) -> Path | None:
    """Start to record this process, which is `rank` of COMM_WORLD's `size`.

    Return the folder of its job's records; None if it has no record, or had one already.
    """
    global _recorder
    if _recorder is not None:
        return None
    try:
        _recorder = Recorder(flight.folder() / job, rank, size)
    except OSError as error:
        log.warning("rank %d has no flight record: %s", rank, error)
        return None
    atexit.register(_recorder.end, flight.ENDED_WELL)
    return _recorder.job


def check_folder(environ: Mapping[str, str] = os.environ) -> None:
    """Create the folder that ``MPIDIST_FLIGHT`` names; ConfigError if it cannot be used."""
    given = environ.get(flight.VARIABLE, "").strip()
    try:
        if given:
            folder = flight.folder(environ)
            folder.parent.mkdir(parents=True, exist_ok=True)
            own_folder(folder)
    except OSError as error:
        raise ConfigError(
            f"{flight.VARIABLE}={given!r}: expected a folder of this user, into which nobody else "
            f"may write: {error}"
        ) from None


def current() -> Recorder | None:
    """Return the recorder of this process; None if it records nothing."""
    return _recorder


def raised(rank: int) -> bool:
    """Return whether a rank of COMM_WORLD has ended by an exception, as its record here says."""
    if _recorder is None:
        return False
    with suppress(ValueError):
        for path in _recorder.job.glob(f"rank-{rank}.*"):
            return flight.read(path).state == flight.FAILED
    return False


def here(ranks: int) -> None:
    """Record the number of ranks of this node."""
    if _recorder is not None and not _recorder.words[HEADER["here"]]:
        _recorder.words[HEADER["here"]] = ranks


def phase(name: str, what: str) -> None:
    """Record that a phase of this process begins; `name` is that of its track."""
    if _recorder is not None:
        _recorder.phase(name, what)


def end(state: int) -> None:
    """Record how this process ends."""
    if _recorder is not None:
        _recorder.end(state)
