"""Vaults: records of a rank's last steps, read by other processes after its end."""

import errno
import os
import subprocess
import sys

import numpy as np
import pytest

from mpidist.errors import LaunchError
from mpidist.recovery import vault as module
from mpidist.recovery.vault import SLOTS, Reader, Record, Vault


def test_last_steps_are_there_and_no_others():
    vault = Vault()
    reader = vault.reader()
    assert reader.steps() == {}
    for step in range(7):
        vault.write(step, [b"step ", str(step).encode(), memoryview(np.arange(step))])
    assert sorted(reader.steps()) == [4, 5, 6] and len(reader.steps()) == SLOTS
    assert reader.read(5) == b"step 5" + np.arange(5).tobytes()
    for gone in (3, 7, -1):
        with pytest.raises(KeyError):
            reader.read(gone)


def test_shorter_record_in_place_of_a_longer_one():
    vault = Vault()
    vault.write(1, [b"x" * 5000])
    vault.write(1, [b"y"])
    assert vault.reader().read(1) == b"y" and vault.reader().steps() == {1: Record(1, 1)}


def test_oldest_record_is_replaced_and_steps_may_be_any_number_apart():
    vault = Vault()
    for step in (0, 7, 9, 9, 30):
        vault.write(step, [b"%d" % step])
    assert sorted(vault.reader().steps()) == [7, 9, 30]
    assert [vault.reader().read(step) for step in (7, 9, 30)] == [b"7", b"9", b"30"]


def test_empty_record():
    vault = Vault()
    vault.write(0, [])
    assert vault.reader().read(0) == b"" and vault.reader().steps() == {0: Record(0, 0)}


def test_share_is_read_by_itself():
    vault = Vault()
    vault.write(1, [b"head"], [b"of ", b"all"], share=1, shares=2, alone=3)
    (record,) = vault.reader().steps().values()
    assert record == Record(10, 4, 1, 2, 3)
    assert vault.reader().read(1, record.head, record.length) == b"of all"
    assert vault.reader().read(1, 0, record.head) == b"head"


DIES = """
import os, sys
from mpidist.recovery.vault import Vault
vault, writes, before = Vault(), os.pwrite, int(sys.argv[1])
def pwrite(*arguments):
    global before
    before -= 1
    if before < 0:
        sys.stdin.read(1)
        os.kill(os.getpid(), 9)
    return writes(*arguments)
vault.write(1, [b"one"])
vault.write(2, [b"longer"])
vault.write(3, [b"longer"])
print(*vault.names, sep="\\n", flush=True)
sys.stdin.readline()
os.pwrite = pwrite
vault.write(4, [b"two", b"parts"])
sys.stdin.read(1)
os.kill(os.getpid(), 9)
"""


@pytest.mark.parametrize("writes", range(5))
def test_record_is_whole_or_torn_after_a_kill_at_each_write(writes):
    """Its process is gone, and what is left is read by another one."""
    words = [sys.executable, "-c", DIES.replace("\\\\n", "\\n"), str(writes)]
    with subprocess.Popen(words, stdin=-1, stdout=-1, text=True) as process:
        names = [process.stdout.readline().strip() for _ in range(SLOTS)]
        reader = Reader.open(names, 0)
        assert reader.read(1) == b"one"
        process.stdin.write("\ngo")
        process.stdin.close()
        assert process.wait(30) == -9
    whole = {step: record.length for step, record in reader.steps().items() if step not in (2, 3)}
    assert whole == ({1: 3} if writes == 0 else {4: 8} if writes == 4 else {})
    if whole == {4: 8}:
        assert reader.read(4) == b"twoparts"


def test_open_of_a_process_that_is_gone_or_of_another_file(tmp_path):
    vault = Vault()
    with pytest.raises(LaunchError, match="vault of rank 3 cannot be opened"):
        Reader.open([name.replace(str(os.getpid()), "999999") for name in vault.names], 3)
    other = tmp_path / "other"
    other.write_bytes(b"")
    with pytest.raises(LaunchError, match="is another file"):
        Reader.open([str(other)] * SLOTS, 3)


def test_records_are_given_back_but_that_of_a_step():
    vault = Vault()
    for step in (4, 5, 6):
        vault.write(step, [b"%d" % step])
    vault.reader().leave(5)
    reader = vault.reader()
    assert list(reader.steps()) == [5] and reader.read(5) == b"5"
    reader.leave(None)
    assert reader.steps() == {}


def test_no_file_stays_open():
    before = len(os.listdir("/proc/self/fd"))
    for _ in range(20):
        vault = Vault()
        reader, other = vault.reader(), Reader.open(vault.names, 0)
        vault.close()
        reader.close()
        del vault, reader, other
    assert len(os.listdir("/proc/self/fd")) == before


def test_too_little_memory_is_said_with_the_size(monkeypatch):
    monkeypatch.setattr(module, "available", lambda: 1e6)
    vault = Vault()
    vault.write(0, [bytes(1000)])
    with pytest.raises(
        MemoryError, match=r"takes 500000 bytes .* 1500000 for 3 steps; 1000000 are"
    ):
        vault.write(1, [bytes(500_000)])


@pytest.mark.parametrize("steps", [[0], [0, 1], [3, 4, 5], [5, 4, 6]])
def test_record_is_there_while_another_one_of_its_step_is_written(steps, monkeypatch):
    vault = Vault()
    reader, write = vault.reader(), os.pwrite
    for step in steps:
        vault.write(step, [b"own"])
    last, others = steps[0], set(steps[1:])

    def fails(file, data, at):
        if bytes(data) == b"copy":
            assert reader.read(last) == b"own"  # as it is if the rank ends here
            raise OSError(errno.EIO, "of the test")
        return write(file, data, at)

    monkeypatch.setattr(os, "pwrite", fails)
    with pytest.raises(OSError, match="of the test"), vault.replacing(last):
        vault.write(last, [b"copy"])
    assert reader.read(last) == b"own"
    monkeypatch.undo()
    with vault.replacing(last):
        vault.write(last, [b"copy"])
    assert reader.read(last) == b"copy" and set(reader.steps()) - others == {last}
    vault.write(last, [b"again"])
    assert reader.read(last) == b"again"


def test_dropped_record():
    vault = Vault()
    for step in (0, 1):
        vault.write(step, [b"x"])
    vault.drop(1)
    vault.drop(7)
    assert list(vault.reader().steps()) == [0]
    vault.write(2, [b"y"])
    assert sorted(vault.reader().steps()) == [0, 2]
