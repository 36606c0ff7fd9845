"""Python stacks of processes, by py-spy and by the signal."""

import json
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from types import SimpleNamespace

import pytest

from mpidist.launcher import stacks
from mpidist.launcher.processes import stat
from mpidist.launcher.program import RANK_PROGRAM

PROGRAM = """
import time, threading, sys
def inner():
    print("there", flush=True); {}
def other():
    time.sleep(60)
for _ in range(3):
    threading.Thread(target=other, daemon=True).start()
inner()
"""
SLEEPS = {
    "sleep": "time.sleep(60)",
    "python": "[0 for _ in iter(int, 1)]",
    "compiled": "sum(range(10**12))",
    "re": "__import__('re').match('(a+)+b', 'a' * 60)",
    "lock": "one = threading.Lock(); one.acquire(); one.acquire()",
    "pipe": "sys.stdin.read()",
}
PYTHON = sys.executable
here = Path(sys.executable).with_name("py-spy")
needs_spy = pytest.mark.skipif(not here.exists(), reason="needs py-spy")


class Started:
    """A rank's program, which has come to the line that it waits in."""

    def __init__(self, tmp_path, line, *runner):
        (tmp_path / "program.py").write_text(PROGRAM.format(line))
        command = [sys.executable, *runner, str(tmp_path / "program.py")]
        pipe = subprocess.PIPE
        self.process = subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True)
        assert self.process.stdout.readline() == "there\n"

    def __enter__(self):
        return self.process.pid

    def __exit__(self, *_):
        self.process.kill()
        self.process.communicate()


@pytest.fixture
def without_spy(monkeypatch):
    monkeypatch.setattr(sys, "executable", "/nowhere/python")
    monkeypatch.setenv("PATH", "/nowhere")


def check(pid):
    frames = stacks.stacks([pid])[pid].frames
    assert frames[-1] == "program.py:9 <module>" and "program.py:4 inner" in frames[:-1], frames


def stop(pid):
    os.kill(pid, signal.SIGSTOP)
    while stat(pid)[0] != "T":
        time.sleep(0.01)


@pytest.mark.parametrize("line", SLEEPS.values(), ids=SLEEPS.keys())
def test_by_signal(tmp_path, request, monkeypatch, line):
    monkeypatch.setattr(stacks, "WITHIN", 20.0)  # the limit has tests of its own
    with Started(tmp_path, line, RANK_PROGRAM) as pid:
        request.getfixturevalue("without_spy")
        check(pid)
        check(pid)  # the second text, not the first again


@needs_spy
@pytest.mark.parametrize("line", SLEEPS.values(), ids=SLEEPS.keys())
def test_by_py_spy(tmp_path, monkeypatch, line):
    """Also of a stopped process, and of a program that mpidist did not start."""
    monkeypatch.setattr(stacks, "WITHIN", 20.0)
    with Started(tmp_path, line) as pid:
        check(pid)
        stop(pid)
        check(pid)


def test_stopped(tmp_path, request):
    with Started(tmp_path, SLEEPS["sleep"], RANK_PROGRAM) as pid:
        request.getfixturevalue("without_spy")
        stop(pid)
        assert stacks.stacks([pid])[pid].why.startswith("stopped; py-spy can read it")
        pending = Path(f"/proc/{pid}/status").read_text()
        assert "SigPnd:\t0000000000000000" in pending and "ShdPnd:\t0000000000000000" in pending


def test_stopped_beyond_py_spy(tmp_path, request):
    """It is installed, and may not trace the process."""
    (tmp_path / "py-spy").write_text("#!/bin/sh\nexit 1\n")
    (tmp_path / "py-spy").chmod(0o755)
    with Started(tmp_path, SLEEPS["sleep"], RANK_PROGRAM) as pid:
        request.getfixturevalue("without_spy")
        request.getfixturevalue("monkeypatch").setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
        stop(pid)
        assert stacks.stacks([pid])[pid].why.startswith("stopped; py-spy could not read it")


SPY = """#!/bin/sh
cat {0}/torn && rm {0}/torn || cat {0}/whole
"""


def test_torn_stack_is_read_again(tmp_path, without_spy, monkeypatch):
    """Of a process that runs meanwhile; at the end of a program no frame tells that it is whole."""
    monkeypatch.setattr(stacks, "WITHIN", 20.0)
    pid = os.getpid()
    (tmp_path / "py-spy").write_text(SPY.format(tmp_path))
    (tmp_path / "py-spy").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    frames = [{"filename": "/a/b.py", "line": n, "name": name} for n, name in enumerate("xyz")]
    module = {"filename": "/a/b.py", "line": 9, "name": "<module>"}
    for last, whole in (module, "b.py:9 <module>"), (frames[-1], "b.py:2 z"):
        for name, dumped in ("torn", frames[:1]), ("whole", [*frames[:2], last]):
            thread = {"os_thread_id": pid, "thread_name": "MainThread", "frames": dumped}
            (tmp_path / name).write_text(json.dumps([thread]))
        assert stacks.stacks([pid])[pid].frames == ("b.py:0 x", "b.py:1 y", whole)


@pytest.mark.parametrize(
    ("spy", "time_for_it"),
    [("rm {1} && exit 1; cat {0}", True), ("sleep 5; cat {}", False)],
    ids=["fails once", "too slow"],
)
def test_process_that_no_signal_asks(tmp_path, without_spy, monkeypatch, spy, time_for_it):
    if time_for_it:
        monkeypatch.setattr(stacks, "WITHIN", 20.0)
    whole, once = tmp_path / "whole", tmp_path / "once"
    once.touch()
    (tmp_path / "py-spy").write_text("#!/bin/sh\n" + spy.format(whole, once))
    (tmp_path / "py-spy").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.defpath}")
    frames = [{"filename": "/a/b.py", "line": 9, "name": "<module>"}]
    with subprocess.Popen(["sleep", "60"]) as child:
        threads = [{"os_thread_id": child.pid, "thread_name": "MainThread", "frames": frames}]
        whole.write_text(json.dumps(threads))
        try:
            found = stacks.stacks([child.pid])[child.pid]
        finally:
            child.kill()
    assert found.frames == (("b.py:9 <module>",) if time_for_it else ())
    assert found.why == ("" if time_for_it else "not a Python program of mpidist run")


def test_process_that_no_signal_asks_has_all_the_time(tmp_path, monkeypatch):
    """And where a signal can ask, half of it is left for that."""
    left = []

    def dumped(_, pid, until):
        left.append(until - time.monotonic())
        return [("/a/b.py", str(pid), "<module>")]

    monkeypatch.setattr(stacks, "WITHIN", 200.0)
    monkeypatch.setattr(stacks, "_spy", lambda: "py-spy")
    monkeypatch.setattr(stacks, "_dumped", dumped)
    started = Started(tmp_path, SLEEPS["sleep"], RANK_PROGRAM)
    with started as asked, subprocess.Popen(["sleep", "60"]) as child:
        for pid in child.pid, asked:
            assert stacks.stacks([pid])[pid].frames == (f"b.py:{pid} <module>",)
        child.kill()
    assert left[0] > 100.0 >= left[1]


SLOWLY = """
import os, signal, sys, time
from mpidist.communicator import stack_signal
def write(*_):
    for text in sys.argv[2:]:
        os.write(file, text.encode())
        time.sleep(0.1)
    open(sys.argv[1], "w").close()
file = os.memfd_create("mpidist-stacks")
signal.signal(stack_signal.SIGNAL, write)
print(flush=True)
time.sleep(60)
"""


@pytest.mark.parametrize(
    ("rest", "stack"),
    [
        (
            'Thread 0x02:\n  File "/a/b.py", line 7 in <module>\n',
            stacks.Stack(("b.py:7 <module>",)),
        ),
        ("", stacks.Stack(why="the process has not written its main thread's stack in time")),
    ],
)
def test_text_that_comes_in_pieces(tmp_path, without_spy, monkeypatch, rest, stack):
    """The limit is reached once all has been written."""
    written, later = tmp_path / "written", [0.0]

    def sleep(seconds):
        time.sleep(seconds)
        later[0] = 100.0 * written.exists()

    clock = SimpleNamespace(sleep=sleep, monotonic=lambda: time.monotonic() + later[0])
    monkeypatch.setattr(stacks, "time", clock)
    monkeypatch.setattr(stacks, "WITHIN", 20.0)
    thread = (
        'Thread 0x01:\n  File "/a/x.py", line 3 in f\n',
        '  File "t.py", line 2 in _bootstrap\n\n',
    )
    words = [PYTHON, "-c", SLOWLY, str(written), *thread, rest]
    with subprocess.Popen(words, stdout=subprocess.PIPE) as child:
        try:
            child.stdout.readline()
            assert stacks.stacks([child.pid])[child.pid] == stack
        finally:
            child.kill()


def test_process_without_a_handler_gets_no_signal(request):
    child = subprocess.Popen(["sleep", "60"])
    request.getfixturevalue("without_spy")
    try:
        (stack,) = stacks.stacks([child.pid]).values()
        assert stack == stacks.Stack(why="not a Python program of mpidist run")
        assert child.poll() is None
    finally:
        child.kill()
        child.wait()


def test_of_many_processes_at_once(monkeypatch):
    """So that they take the time of one; each is read once."""
    together, limits, begun = threading.Barrier(3), [], time.monotonic()

    def read(pid, until):
        limits.append(until)
        together.wait(50)
        return stacks.Stack((f"a.py:{pid} f",))

    monkeypatch.setattr(stacks, "_read", read)
    found = stacks.stacks([1, 2, 3, 1])
    assert found == {pid: stacks.Stack((f"a.py:{pid} f",)) for pid in (1, 2, 3)}
    assert len(limits) == 3 and len(set(limits)) == 1
    assert begun <= limits[0] - stacks.WITHIN <= time.monotonic()


@pytest.mark.parametrize(
    ("text", "stack"),
    [
        ("", stacks.Stack(why="the process did not answer: it may be inside the kernel")),
        (
            'Thread 0x01 (most recent call first):\n  File "/a/x.py", line 3 in f\n\n'
            'Current thread 0x02 (most recent call first):\n  File "/a/b.py", line 7 in <lambda>\n'
            '  File "<frozen runpy>", line 88 in _run_code\n  File "/a/main.py", line ?? in g h\n',
            stacks.Stack(("b.py:7 <lambda>", "main.py:?? g h")),
        ),
        (
            'Thread 0x01 (most recent call first):\n  File "/a/x.py", line 3 in f\n'
            '  File "/lib/threading.py", line 1002 in _bootstrap\n\n'
            "Thread 0x02 (most recent call first):\n"
            '  File "/lib/threading.py", line 1590 in _shutdown\n',
            stacks.Stack(("x.py:3 f", "threading.py:1590 _shutdown")),
        ),
        (
            'Thread 0x01 (most recent call first):\n  File "/a/x.py", line 3 in f\n...\n',
            stacks.Stack(why="the process has more than 100 threads"),
        ),
        (
            'Thread 0x01 (most recent call first):\n  File "/a/x.py", line 3 in f\n'
            '  File "/lib/threading.py", line 1002 in _bootstrap\n',
            stacks.Stack(why="the process has not written its main thread's stack in time"),
        ),
        (
            'Thread 0x01 (most recent call first):\n  File "/a/x.py", li',
            stacks.Stack(why="the process has not written its main thread's stack in time"),
        ),
    ],
)
def test_parsed(text, stack):
    assert stacks.parsed(text) == stack
