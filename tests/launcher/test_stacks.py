"""Python stacks of processes, by py-spy and by the signal."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from mpidist.launcher import stacks
from mpidist.launcher.program import RANK_PROGRAM

PROGRAM = """
import time, threading, sys
def inner():
    print("there", flush=True)
    {}
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
    """A rank's program, which has come to what it waits in."""

    def __init__(self, tmp_path, line, *runner):
        (tmp_path / "program.py").write_text(PROGRAM.format(line))
        command = [sys.executable, *runner, str(tmp_path / "program.py")]
        pipe = subprocess.PIPE
        self.process = subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True)
        assert self.process.stdout.readline() == "there\n"
        time.sleep(0.05)

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
    assert frames[-1] == "program.py:10 <module>" and "program.py:5 inner" in frames[:-1], frames


@pytest.mark.parametrize("line", SLEEPS.values(), ids=SLEEPS.keys())
def test_by_signal(tmp_path, request, line):
    with Started(tmp_path, line, RANK_PROGRAM) as pid:
        request.getfixturevalue("without_spy")
        check(pid)
        check(pid)  # the second text, not the first again


@needs_spy
@pytest.mark.parametrize("line", SLEEPS.values(), ids=SLEEPS.keys())
def test_by_py_spy(tmp_path, monkeypatch, line):
    """Also of a stopped process, and of a program that mpidist did not start."""
    monkeypatch.setattr(stacks, "WITHIN", 20.0)  # the limit has tests of its own
    with Started(tmp_path, line) as pid:
        check(pid)
        os.kill(pid, signal.SIGSTOP)
        check(pid)


def test_stopped(tmp_path, request):
    with Started(tmp_path, SLEEPS["sleep"], RANK_PROGRAM) as pid:
        request.getfixturevalue("without_spy")
        os.kill(pid, signal.SIGSTOP)
        time.sleep(0.05)
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
        os.kill(pid, signal.SIGSTOP)
        time.sleep(0.05)
        assert stacks.stacks([pid])[pid].why.startswith("stopped; py-spy could not read it")


SPY = """#!/bin/sh
cat {0}/torn && rm {0}/torn || cat {0}/whole
"""


def test_torn_stack_is_read_again(tmp_path, without_spy, monkeypatch):
    """Of a process that runs meanwhile; at the end of a program no frame tells that it is whole."""
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
    [("sleep 0.4; cat {}", True), ("rm {1} && exit 1; cat {0}", True), ("sleep 5; cat {}", False)],
    ids=["slow", "fails once", "too slow"],
)
def test_process_that_no_signal_asks_has_all_the_time(
    tmp_path, without_spy, monkeypatch, spy, time_for_it
):
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


SLOWLY = """
import os, signal, sys, time
from mpidist.communicator import stack_signal
def write(*_):
    for text in sys.argv[1:]:
        os.write(file, text.encode())
        time.sleep(0.1)
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
def test_text_that_comes_in_pieces(without_spy, rest, stack):
    thread = (
        'Thread 0x01:\n  File "/a/x.py", line 3 in f\n',
        '  File "t.py", line 2 in _bootstrap\n\n',
    )
    words = [PYTHON, "-c", SLOWLY, *thread, rest]
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


def test_of_many_processes_in_time(tmp_path, without_spy):
    own = [os.getpid()]
    begun = time.monotonic()
    assert stacks.stacks(own * 3).keys() == set(own)
    assert time.monotonic() - begun < 2 * stacks.WITHIN


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
