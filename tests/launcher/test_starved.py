"""The count of what the kernel has killed for want of memory, in control groups of v1 and v2."""

import os

import pytest

from mpidist.launcher import starved
from mpidist.launcher.starved import Starved


@pytest.fixture(params=["0::/job/step\n", "9:name=systemd:/\n4:cpu,memory:/job/step\n0::/\n"])
def group(request, tmp_path, monkeypatch):
    """Return a process, and the file with the count of its group."""
    folder, real = tmp_path / "proc", starved.Path
    folder.mkdir()
    (folder / "cgroup").write_text(request.param)
    monkeypatch.setattr(starved, "ROOT", tmp_path)
    name = f"/proc/{os.getpid()}/cgroup"
    monkeypatch.setattr(starved, "Path", lambda p: real(folder / "cgroup" if p == name else p))
    old = "memory" in request.param
    where = tmp_path / ("memory/job/step" if old else "job/step")
    where.mkdir(parents=True)
    return where / ("memory.oom_control" if old else "memory.events.local")


def test_more_than_before(group):
    group.write_text("oom 3\noom_kill 2\n")
    rank = Starved()
    rank.see(os.getpid())
    assert not rank.now()
    group.write_text("oom 4\noom_kill 3\n")
    rank.see(os.getpid())
    assert rank.now()


def test_group_of_a_container_is_the_root(group):
    inside = group.parents[2] / group.name
    inside.write_text("oom_kill 0\n")
    rank = Starved()
    rank.see(os.getpid())
    inside.write_text("oom_kill 1\n")
    assert rank.now()


def test_nothing_is_known_without_a_count(group):
    rank = Starved()
    for text in ("", "oom_kill", "oom_kill many"):
        group.write_text(text)
        rank.see(os.getpid())
    rank.see(2**30)  # there is no such process
    group.write_text("oom_kill 5")
    assert not rank.now()
