"""The flight record of a process: its last operations, in a file that outlives it.

::

    header    1 KiB    process, rank and host; clocks; number of operations so far; how it ended
    tracks   20 KiB    64 communicators: name and members; last operation begun, arrived, ended;
                       the line of the program that waits, and for what
    ring     32 KiB    the last 1,024 operations: number and check sum, number on which track, time,
                       fingerprint
    texts    75 KiB    descriptions of operations, by fingerprint

:mod:`.recorder` and steps.c write it.  Standard library only: ``mpidist run`` reads it.
"""

from __future__ import annotations

import os
import re
import socket
import struct
import tempfile
import zlib
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from ..foreign import read_file, shown

MAGIC, VERSION = int.from_bytes(b"mpi\0rec1", "little"), 2
HEADER_BYTES, TRACK_BYTES, TRACKS, TEXT_BYTES = 1024, 320, 64, 192
ENTRIES, ENTRY_WORDS = 1024, 4  # as in compiled.h
NBYTES = 128 << 10
TRACKS_AT = HEADER_BYTES
RING_AT = TRACKS_AT + TRACKS * TRACK_BYTES
TEXTS_AT = RING_AT + ENTRIES * ENTRY_WORDS * 8
TEXTS = (NBYTES - TEXTS_AT) // TEXT_BYTES

# Words of the header; MAGIC is written last, and words that are not there yet are 0.
_WORDS = "magic version pid started rank size here wall clock count state unrecorded texts"
HEADER = {name: at for at, name in enumerate(_WORDS.split())}
HOST_AT, HOST_BYTES, PROGRAM_AT, PROGRAM_BYTES = 128, 64, 256, 512
RUNNING, ENDED_WELL, FAILED = 1, 2, 3  # states of a process
# Words of a track, the first as in compiled.h; `serial` is 0 in one that is free.  LAST begins the
# entry of the last operation once more: that in the ring is overwritten 1,024 operations later, or
# by another thread at the same time.
SERIAL, BEGUN, ARRIVED, ENDED, LAST, _, _, _, WAITING, SINCE, MEMBERS_CRC, PLACE = range(12)
NAME_AT, NAME_BYTES, SITE_AT, SITE_BYTES, AWAITED_AT, AWAITED_BYTES = 96, 56, 152, 88, 240, 80
SERIALS = 1 << 16
VARIABLE = "MPIDIST_FLIGHT"
_WHAT, _TIME = 0x9E3779B97F4A7C15, 0x6A09E667F3BCC909  # factors of the check sum, as in compiled.h
_FINGERPRINT = 0xBB67AE8584CAA73B
ENTRY, _TRACK, _TEXT = struct.Struct("<4Q"), struct.Struct("<12q"), struct.Struct("<qq")
_BACKGROUND, _MOST_RANKS = " in the background", 1 << 20
_NAME = re.compile(r"rank-\d+\.\d+")
_AMOUNT = re.compile(r" (\d+) x (?:[a-z]+?)(\d+)\b")


@dataclass(frozen=True)
class Operation:
    """An operation that a process has begun."""

    number: int  # among all operations of the process
    serial: int  # of its track
    sequence: int  # its number on the communicator; 0 for what no other rank has to match
    time: int  # in ns, by the clock of the node since its start
    fingerprint: int
    text: str  # what the ranks compare; empty if other descriptions have replaced it

    @property
    def background(self) -> bool:
        """Whether it runs in the background: its end is not recorded."""
        return self.text.endswith(_BACKGROUND)

    def __str__(self) -> str:
        return f"#{self.sequence} {self.described}" if self.sequence else self.described

    @property
    def described(self) -> str:
        """The description with the bytes of the whole array, where its dtype has a width."""
        if not self.text:
            return f"(description overwritten, fingerprint {self.fingerprint:#x})"
        found = _AMOUNT.search(self.text)
        nbytes = int(found[1]) * int(found[2]) // 8 if found else 0
        return f"{self.text} ({nbytes:,} B)" if nbytes else self.text


@dataclass(frozen=True)
class Track:
    """What a process has done on one communicator."""

    serial: int
    name: str
    members_crc: int  # of all members, and how many communicators of theirs and this name there are
    rank: int
    size: int
    begun: int  # numbers of the last operations; 0 for none
    arrived: int
    ended: int
    site: str  # FILE:LINE of the user's line that waits; empty if none does
    awaited: str  # the messages that it waits for, by their ranks here; empty for an operation
    since: int  # time of the beginning of that wait, in ns as that of an operation

    @property
    def key(self) -> tuple[str, int, int]:
        """What is equal on all members of a communicator."""
        return self.name, self.members_crc, self.size


@dataclass(frozen=True)
class FlightRecord:
    """The record of one process, as it was when it was read."""

    path: Path
    pid: int
    started: int  # of the process, in ticks since the start of the machine
    rank: int  # in COMM_WORLD
    size: int
    here: int  # number of ranks of this node
    host: str
    program: str
    wall: int  # both clocks at the start of the record, in ns
    clock: int
    count: int  # operations that the process has begun
    state: int
    unrecorded: int  # communicators for which there was no track
    torn: int  # entries of the ring that were being written, or do not belong there
    operations: tuple[Operation, ...] = field(repr=False)  # oldest first
    tracks: tuple[Track, ...] = field(repr=False)

    @property
    def elsewhere(self) -> bool:
        """Whether the process is, or was, on another machine, with which this one shares a disk."""
        return self.host != shown(socket.gethostname())

    @property
    def alive(self) -> bool:
        """Whether the process still runs, on this machine."""
        return not self.elsewhere and process_started(self.pid) == self.started

    @property
    def crashed(self) -> bool:
        """Whether the process is gone, from this machine, without an end as of a Python program."""
        return self.state == RUNNING and not self.elsewhere and not self.alive

    def of(self, track: Track) -> dict[int, Operation]:
        """Return the operations on a communicator that are left in the ring, by their number."""
        return {each.sequence: each for each in self.operations if each.serial == track.serial}


def folder(environ: Mapping[str, str] = os.environ) -> Path:
    """Return the folder of the flight records of this user's jobs: ``MPIDIST_FLIGHT`` sets it."""
    given = environ.get(VARIABLE, "").strip()
    if given:
        return Path(given).absolute()
    memory = "/dev/shm" if os.access("/dev/shm", os.W_OK) else tempfile.gettempdir()
    return Path(memory) / f"mpidist-flight-{os.getuid()}"


def records_in(job: Path) -> list[Path]:
    """Return the files of the flight records in the folder of a job; OSError if it is none."""
    return sorted(path for path in job.iterdir() if _NAME.fullmatch(path.name))


def remove(job: Path) -> None:
    """Remove the records of a job, its folder, and that of all jobs, unless others are there."""
    with suppress(OSError):
        for path in records_in(job):
            path.unlink(missing_ok=True)
        job.rmdir()
        job.parent.rmdir()


def process_started(pid: int) -> int:
    """Return when a process was started, in ticks since the machine's start; 0 if it is gone."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text(encoding="ascii", errors="replace")
        state, *facts = text.rpartition(")")[2].split()
        return 0 if state in "ZX" else int(facts[18])
    except (OSError, ValueError, IndexError):
        return 0


def stamp_of(number: int, what: int, time: int, fingerprint: int) -> int:
    """Return the first word of an entry: its number, and a check sum of all, 32 bits each."""
    sums = (number ^ what) * _WHAT ^ time * _TIME ^ fingerprint * _FINGERPRINT
    return number & 0xFFFFFFFF | sums & 0xFFFFFFFF_00000000


def fingerprint_of(operation: str, meets: bool) -> int:
    """Return the number that identifies an operation; odd if all ranks arrive before any work."""
    return zlib.crc32(operation.encode()) * 2 + meets


def read(path: str | os.PathLike) -> FlightRecord:
    """Return a flight record; ValueError if the file is none, or is of another version.

    Only files of this user (or of anybody, for root) are read: others could invent what they say.
    """
    path = Path(path)
    try:
        if os.lstat(path).st_uid not in (os.getuid(), 0) and os.getuid():
            raise ValueError(f"{path} belongs to another user")
        content = read_file(path, follow=False, longest=NBYTES)
    except OSError as error:
        raise ValueError(f"{path} cannot be read: {error.strerror or error}") from None
    words = memoryview(content[: len(content) // 8 * 8]).cast("q")
    if len(words) < len(HEADER) or words[HEADER["magic"]] != MAGIC:
        raise ValueError(f"{path} is not a flight record, or was not begun yet")
    if words[HEADER["version"]] != VERSION:
        raise ValueError(
            f"{path} has version {words[HEADER['version']]}: this mpidist reads version {VERSION}"
        )
    if len(content) != NBYTES:
        raise ValueError(f"{path} has {len(content)} bytes: a flight record has {NBYTES}")
    facts = {name: words[at] for name, at in HEADER.items()}
    rank, size, state = facts["rank"], facts["size"], facts["state"]
    known = state in (RUNNING, ENDED_WELL, FAILED)
    if not (known and 0 <= rank < size <= _MOST_RANKS and min(facts.values()) >= 0):
        raise ValueError(f"{path} is damaged: rank {rank} of {size} in state {state}")
    del facts["magic"], facts["version"], facts["texts"]
    operations, torn = _operations(content, facts["count"])
    return FlightRecord(
        path=path,
        host=_string(content, HOST_AT, HOST_BYTES),
        program=_string(content, PROGRAM_AT, PROGRAM_BYTES),
        operations=operations,
        torn=torn,
        tracks=tuple(_tracks(content)),
        **facts,
    )


def _string(content: bytes, at: int, nbytes: int) -> str:
    return shown(content[at : at + nbytes].partition(b"\0")[0].decode(errors="replace"))


def _operations(content: bytes, count: int) -> tuple[tuple[Operation, ...], int]:
    """Return the operations of the ring, oldest first, and how many entries are torn."""
    texts, found, torn = _texts(content), set(), 0

    def entry(at: int) -> Operation | None:
        stamp, what, time, fingerprint = ENTRY.unpack_from(content, at)
        number = count + (stamp - count + (1 << 31)) % (1 << 32) - (1 << 31)  # the nearest
        if number < 1 or stamp != stamp_of(number, what, time, fingerprint):
            return None
        text = texts.get(fingerprint, "")
        return Operation(number, what % SERIALS, what // SERIALS, time, fingerprint, text)

    for slot in range(ENTRIES):
        at = RING_AT + slot * ENTRY.size
        last = count - (count - 1 - slot) % ENTRIES  # the last number that belongs here
        operation = entry(at)
        # Or a later one: the process may have gone on while this one read, and a thread that was
        # interrupted as it counted has set the count back to where it was then.
        if operation and operation.number >= last and (operation.number - last) % ENTRIES == 0:
            found.add(operation)
        else:
            torn += slot < count or any(content[at : at + ENTRY.size])  # else: never written
    for at in range(TRACKS_AT, RING_AT, TRACK_BYTES):
        operation = entry(at + 8 * LAST)
        if operation is not None:
            found.add(operation)
    # By time first, and those of a track in their own order: where threads count at the same
    # moment, numbers are used twice, or the count is set back.
    order = sorted(found, key=lambda each: (each.time, each.number))
    mine: dict[int, list[Operation]] = {}
    for each in sorted(found, key=lambda each: (-each.sequence, -each.number)):
        mine.setdefault(each.serial, []).append(each)
    return tuple(mine[each.serial].pop() for each in order), torn


def _texts(content: bytes) -> dict[int, str]:
    found = {}
    for slot in range(TEXTS):
        at = TEXTS_AT + slot * TEXT_BYTES
        fingerprint, length = _TEXT.unpack_from(content, at)
        text = _string(content, at + _TEXT.size, TEXT_BYTES - _TEXT.size)
        whole = length <= TEXT_BYTES - _TEXT.size
        # A text that was being replaced has another fingerprint; of a long one only the beginning
        # is there.
        if fingerprint and (not whole or fingerprint // 2 == fingerprint_of(text, False) // 2):
            found[fingerprint] = text if whole else f"{text}…"
    return found


def _tracks(content: bytes) -> list[Track]:
    found = []
    for at in range(TRACKS_AT, RING_AT, TRACK_BYTES):
        serial, begun, arrived, ended, *_, waiting, since, crc, place = _TRACK.unpack_from(
            content, at
        )
        waits = waiting == 1 + begun
        if serial:
            found.append(
                Track(
                    serial=(serial - 1) % SERIALS,
                    name=_string(content, at + NAME_AT, NAME_BYTES),
                    members_crc=crc,
                    rank=place >> 32,
                    size=place & 0xFFFFFFFF,
                    begun=begun,
                    arrived=arrived,
                    ended=ended,
                    site=_string(content, at + SITE_AT, SITE_BYTES) if waits else "",
                    awaited=_string(content, at + AWAITED_AT, AWAITED_BYTES) if waits else "",
                    since=since,
                )
            )
    return found
