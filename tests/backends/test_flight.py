"""A flight record is read as it lies in the file: torn, overwritten and foreign ones are told."""

import itertools
import os
import random
import struct

import pytest

from mpidist.backends import flight
from mpidist.backends.flight import HEADER, RING_AT, TEXT_BYTES, TEXTS_AT
from mpidist.backends.recorder import Recorder
from mpidist.launcher.flight import Job

LONG = "gather root=0 9 x float64 counts=(" + "1, " * 100


@pytest.fixture
def recorder(tmp_path):
    return Recorder(tmp_path / "flights" / "job", 2, 3)


def begin(recorder, track, sequence, text):
    mark = flight.fingerprint_of(text, True)
    recorder.describe(mark, text)
    track.begin(sequence, mark)
    return mark


def change(recorder, at, content):
    with open(recorder.path, "r+b") as file:
        file.seek(at)
        file.write(content)


def test_read(recorder):
    track = recorder.track([0, 2], 1)
    track.name("world.1:0")
    begin(recorder, track, 1, "allreduce op=sum 8 x float64 by ring")
    begin(recorder, track, 2, "barrier in the background")
    track.state[flight.ARRIVED], track.state[flight.ENDED] = 1, 1
    record = flight.read(recorder.path)
    assert (record.rank, record.size, record.pid) == (2, 3, os.getpid())
    assert record.alive and record.state == flight.RUNNING and record.torn == 0
    first, second = record.operations
    assert str(first) == "#1 allreduce op=sum 8 x float64 by ring (64 B)"
    assert str(second) == "#2 barrier in the background" and second.background
    assert first.background is False and first.time <= second.time
    (seen,) = record.tracks
    assert (seen.name, seen.rank, seen.size) == ("world.1:0", 1, 2)
    assert (seen.begun, seen.arrived, seen.ended, seen.site) == (2, 1, 1, "")
    assert record.of(seen) == {1: first, 2: second}


def test_only_the_last_operations_are_left(recorder):
    track = recorder.track([2], 0)
    for sequence in range(1, 3001):
        begin(recorder, track, sequence, "barrier")
    record = flight.read(recorder.path)
    assert [each.sequence for each in record.operations] == list(range(3001 - 1024, 3001))
    assert record.count == 3000 and record.torn == 0


@pytest.mark.parametrize("torn", ["no stamp", "what", "time", "fingerprint", "older"])
def test_torn_entry_is_left_out(recorder, torn):
    """Half written, with a word of another entry, or that of 1,024 operations before."""
    track = recorder.track([2], 0)
    for sequence in range(1, 6):
        begin(recorder, track, sequence, "barrier")
    at = RING_AT + 4 * 32  # of #5, then of #1029
    with open(recorder.path, "rb") as file:
        file.seek(at)
        older = file.read(32)
    for sequence in range(6, 1030):
        begin(recorder, track, sequence, "split")
    words = {"what": slice(8, 16), "time": slice(16, 24), "fingerprint": slice(24, 32)}
    place = words.get(torn, slice(0, 32))
    change(recorder, at + place.start, bytes(8) if torn == "no stamp" else older[place])
    record = flight.read(recorder.path)
    assert record.torn == 1 and [each.sequence for each in record.operations][-2:] == [1028, 1029]
    track.state[flight.LAST] = 0  # it is in the track too
    record = flight.read(recorder.path)
    assert record.torn == 1 and [each.sequence for each in record.operations][-1] == 1028


def test_the_last_operation_of_each_communicator_is_left(recorder):
    """However many there were on others, and whoever wrote into its place in the ring."""
    track, other = recorder.track([2], 0), recorder.track([2], 0)
    for sequence in (1, 2):
        begin(recorder, track, sequence, "barrier")
    for sequence in range(1, 2000):
        begin(recorder, other, sequence, "split")
    record = flight.read(recorder.path)
    first, *others = record.operations
    assert (str(first), first.serial, record.torn) == ("#2 barrier", track.serial, 0)
    assert [each.sequence for each in others] == list(range(2000 - 1024, 2000))
    for word, value in enumerate((7, 7, 7, 7)):
        recorder.words[RING_AT // 8 + 2000 % 1024 * 4 + word] = value
    record = flight.read(recorder.path)
    assert record.torn == 1 and record.operations[-1].sequence == 1999


def test_a_count_that_was_set_back(recorder, monkeypatch):
    """By a thread that was interrupted as it counted, while others began 2,000 operations."""
    monkeypatch.setattr("mpidist.backends.recorder.monotonic_ns", lambda: 7)  # all in one tick
    track, other = recorder.track([2], 0), recorder.track([2], 0)
    for sequence in range(1, 3001):
        begin(recorder, track, sequence, "barrier")
    recorder.numbers = itertools.count(1001)
    begin(recorder, other, 1, "split")
    record = flight.read(recorder.path)
    assert record.count == 1001 and record.torn == 0
    assert list(record.of(record.tracks[1])) == [1]
    left = list(record.of(record.tracks[0]))
    assert left == sorted(left) and len(left) == 1023 and left[-1] == 3000
    begin(recorder, track, 3001, "barrier")
    record = flight.read(recorder.path)
    assert list(record.of(record.tracks[0]))[-2:] == [3000, 3001] and record.torn == 0


def test_overwritten_description_is_said(recorder):
    track = recorder.track([2], 0)
    mark = begin(recorder, track, 1, "barrier")
    for sequence in range(2, flight.TEXTS + 2):
        begin(recorder, track, sequence, f"allgather {sequence} x int8")
    operations = flight.read(recorder.path).operations
    assert operations[0].described == f"(description overwritten, fingerprint {mark:#x})"
    assert operations[-1].described == f"allgather {sequence} x int8 ({sequence} B)"


def test_a_description_that_is_not_whole(recorder):
    """Of a long one the beginning is kept; one that does not fit its fingerprint is none."""
    track = recorder.track([2], 0)
    begin(recorder, track, 1, LONG)
    begin(recorder, track, 2, "barrier")
    (long, short) = flight.read(recorder.path).operations
    assert long.text.endswith("…") and LONG.startswith(long.text[:-1]) and len(long.text) > 150
    change(recorder, TEXTS_AT + TEXT_BYTES + 16, b"b\x1b[2Jer")
    (long, short) = flight.read(recorder.path).operations
    assert long.text and not short.text


def test_control_characters_are_escaped(recorder):
    recorder.track([2], 0).name("\x1b[2J")
    assert flight.read(recorder.path).tracks[0].name == r"\x1b[2J"


@pytest.mark.parametrize(
    ("at", "content", "said"),
    [
        (
            8 * HEADER["version"],
            struct.pack("<q", 7),
            f"has version 7: this mpidist reads version {flight.VERSION}",
        ),
        (0, bytes(8), "is not a flight record, or was not begun yet"),
        (flight.NBYTES, b"x", "longer than 131072 bytes"),
    ],
)
def test_another_file_is_refused(recorder, at, content, said):
    change(recorder, at, content)
    with pytest.raises(ValueError, match=said):
        flight.read(recorder.path)


@pytest.mark.parametrize(
    ("word", "value"),
    [("size", 1 << 62), ("rank", 3), ("rank", -1), ("state", 0), ("state", 4), ("count", -5)],
)
def test_damaged_header_is_refused(recorder, word, value):
    recorder.words[HEADER[word]] = value
    with pytest.raises(ValueError, match="is damaged: rank "):
        flight.read(recorder.path)


@pytest.mark.parametrize("seed", range(200))
def test_random_damage(recorder, seed):
    """Whatever lies there: a refusal, or lines that can be printed."""
    dice = random.Random(seed)
    track = recorder.track([0, 2], 1)
    for sequence in range(1, 5):
        begin(recorder, track, sequence, "barrier")
    track.wait("/a/train.py:41")
    values = (0, -1, 1, 1 << 62, -1 << 63, (1 << 63) - 1, dice.getrandbits(62))
    for _ in range(dice.randint(1, 4)):
        parts = [(16, 128), (flight.TRACKS_AT, flight.TRACKS_AT + 320), (RING_AT, RING_AT + 128)]
        at = dice.randrange(*dice.choice(parts), 8)
        change(recorder, at, struct.pack("<q", dice.choice(values)))
    job = Job(recorder.path.parent)
    assert len(job.records) + len(job.refused) == 1
    assert all(line.isprintable() for line in job.lines())


def test_short_file_and_link_are_refused(recorder, tmp_path):
    os.truncate(recorder.path, 4096)
    with pytest.raises(ValueError, match="has 4096 bytes: a flight record has 131072"):
        flight.read(recorder.path)
    os.truncate(recorder.path, 3)
    with pytest.raises(ValueError, match="is not a flight record"):
        flight.read(recorder.path)
    (tmp_path / "link").symlink_to(recorder.path)
    with pytest.raises(ValueError, match="cannot be read"):
        flight.read(tmp_path / "link")


def test_record_of_another_user_is_refused(recorder, monkeypatch):
    monkeypatch.setattr(os, "getuid", lambda: os.stat(recorder.path).st_uid + 1)
    real = os.lstat

    class Foreign:
        st_uid = os.stat(recorder.path).st_uid + 2

    monkeypatch.setattr(
        os, "lstat", lambda path: Foreign() if path == recorder.path else real(path)
    )
    with pytest.raises(ValueError, match="belongs to another user"):
        flight.read(recorder.path)


def test_process_that_is_gone():
    child = os.fork()
    if not child:
        os._exit(0)
    os.waitpid(child, 0)
    assert flight.process_started(child) == 0
    assert flight.process_started(os.getpid()) == flight.process_started(os.getpid()) > 0


def test_folder(monkeypatch, tmp_path):
    monkeypatch.delenv("MPIDIST_FLIGHT", raising=False)
    assert flight.folder().name == f"mpidist-flight-{os.getuid()}"
    monkeypatch.setenv("MPIDIST_FLIGHT", str(tmp_path))
    assert flight.folder() == tmp_path
