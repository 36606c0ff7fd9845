"""What the limits of control groups leave, read from files like the kernel's."""

import os

import pytest

from mpidist.backends import memory_file

ROOM = 100_000


def files(folder, texts):
    folder.mkdir(parents=True, exist_ok=True)
    for name, text in texts.items():
        (folder / name).write_text(text)


def limited(limit, use=1000, spare=0, version=2):
    if version == 2:
        names, stat = ("memory.max", "memory.current"), f"anon 3\ninactive_file {spare}\n"
    else:
        names = ("memory.limit_in_bytes", "memory.usage_in_bytes")
        stat = f"cache 3\ntotal_inactive_file {spare}\n"
    return {names[0]: f"{limit}\n", names[1]: f"{use}\n", "memory.stat": stat}


def test_version_2_of_the_outer_group(tmp_path):
    """The inner one has none; what can be given up is not counted as used."""
    files(tmp_path, {"me": "0::/job/step\n"})
    files(tmp_path / "fs/job", limited(ROOM, 1000, spare=300))
    files(tmp_path / "fs/job/step", limited("max"))
    assert memory_file.cgroup_free(tmp_path / "fs", tmp_path / "me") == ROOM - 1000 + 300


def test_version_1_of_the_inner_group(tmp_path):
    files(tmp_path, {"me": "5:cpu,cpuacct:/job\n4:memory:/job/step\n"})
    files(tmp_path / "fs/memory/job", limited(10 * ROOM, version=1))
    files(tmp_path / "fs/memory/job/step", limited(ROOM, 1000, 200, version=1))
    assert memory_file.cgroup_free(tmp_path / "fs", tmp_path / "me") == ROOM - 1000 + 200


@pytest.mark.parametrize("me", ["", "0::/\n", "0::/not/seen/from/here\n", "4:cpu:/job\n"])
def test_no_limit(tmp_path, me):
    files(tmp_path, {"me": me})
    files(tmp_path / "fs/job", limited(ROOM))
    assert memory_file.cgroup_free(tmp_path / "fs", tmp_path / "me") == float("inf")
    assert memory_file.cgroup_free(tmp_path / "fs", tmp_path / "missing") == float("inf")


@pytest.mark.parametrize("kind", memory_file.KINDS)
def test_what_is_beyond_the_limit_is_refused(monkeypatch, kind):
    monkeypatch.setattr(memory_file, "cgroup_free", lambda: ROOM)
    made = memory_file.create(ROOM, "test", kind)
    memory_file.remove(made)
    before = set(os.listdir("/proc/self/fd"))
    with pytest.raises(MemoryError, match="memory limit of this job"):
        memory_file.create(ROOM + 1, "test", kind)
    assert set(os.listdir("/proc/self/fd")) == before


@pytest.mark.parametrize("kind", memory_file.KINDS)
@pytest.mark.parametrize("error", [OSError(27, "File too large"), OverflowError("too long")])
def test_a_file_that_cannot_be_made_as_long_leaves_nothing(monkeypatch, tmp_path, kind, error):
    """As under ulimit -f."""

    def fails(handle, nbytes):
        raise error

    monkeypatch.setattr(os, "ftruncate", fails)
    before = set(os.listdir("/proc/self/fd"))
    with pytest.raises(MemoryError, match=f"{ROOM} bytes of shared memory: .*too l"):
        memory_file.create(ROOM, "left", kind)
    assert set(os.listdir("/proc/self/fd")) == before
    assert not [name for name in os.listdir("/dev/shm") if name.startswith("mpidist-left-")]
