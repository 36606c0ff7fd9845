"""Python stacks of running processes: by py-spy if it is installed, else by a signal to them."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from ..communicator.launcher_notes import handles
from ..communicator.stack_signal import SIGNAL, stack_file
from .processes import stat, working_folder

WITHIN = 0.6  # seconds for the stacks of all processes, half of them by py-spy where both ways are
_SETTLED = 0.03  # seconds without more text, for a frame inside may look like the outermost one
_OUTERMOST = "<module>", "_run_module_as_main", "_run_code"  # functions of a main thread
_FRAME = re.compile(r'^  File "(.*)", line (\d+|\?+) in (.*)', re.MULTILINE)
_PACKAGE = str(Path(__file__).parents[1]) + os.sep
_BESIDE = ("/runpy.py", "/mpi4py/run.py", "/mpi4py/__main__.py")
# What starts a program, and what hands over the exception that ended it.
_OWN = ("launcher/rank_program.py", "communicator/launch.py", "communicator/launcher_notes.py")
_AROUND = (*_BESIDE, *(_PACKAGE + name for name in _OWN))
_THREADS, _END = "/threading.py", "_shutdown"  # where a program that has left waits for threads
_TRIES = 3  # of py-spy, for stacks of processes that run
_Frame = tuple[str, str, str]  # file, line, function


class Stack(NamedTuple):
    """The stack of a process's main thread, as texts ``FILE:LINE FUNCTION``, innermost first."""

    frames: tuple[str, ...] = ()  # those of the program: not of mpidist, mpi4py, importlib
    why: str = ""  # there are none


def stacks(pids: Sequence[int]) -> dict[int, Stack]:
    """Return the stacks of Python processes, within 0.6 s."""
    # At the same time: one that does not answer takes no time from the others.
    until = time.monotonic() + WITHIN
    found: dict[int, Stack] = {}
    readers = [
        threading.Thread(target=lambda pid: found.update({pid: _read(pid, until)}), args=(pid,))
        for pid in set(pids)
    ]
    for reader in readers:
        reader.start()
    for reader in readers:
        reader.join()
    return found


def _read(pid: int, until: float) -> Stack:
    # py-spy disturbs nothing, and reads a stopped process too.  The signal interrupts a C function
    # that sleeps, so it is the second choice, and has time left where it is one.
    refused = _refused(pid)
    by_spy = _by_spy(pid, until if refused else until - WITHIN / 2)
    return by_spy or (Stack(why=refused) if refused else _by_signal(pid, until))


def _by_spy(pid: int, until: float) -> Stack | None:
    """Return the stack that py-spy reads; of another user's process it cannot."""
    spy = _spy()
    if spy is None:
        return None
    found: list[_Frame] = []
    for _ in range(_TRIES):
        # The process runs meanwhile: of a generator that just ends the callers are not seen.
        found = max(found, _dumped(spy, pid, until), key=len)
        if (found and found[-1][2] in _OUTERMOST) or time.monotonic() > until:
            break
    return _stack(found) if found else None


def _dumped(spy: str, pid: int, until: float) -> list[_Frame]:
    """Return the frames of the main thread that py-spy reads until then; none if it cannot."""
    command = [spy, "dump", "--nonblocking", "--json", "--pid", str(pid)]
    left = max(0.0, until - time.monotonic())
    try:
        done = subprocess.run(
            command, stdin=subprocess.DEVNULL, capture_output=True, timeout=left, check=True
        )
        threads = json.loads(done.stdout)
        main = _main_thread(threads, pid)
        others = (each for each in threads if each is not main)
        return _with_left(*map(_frames, (main, *others)))
    except (OSError, subprocess.SubprocessError, ValueError, KeyError, TypeError):
        return []


def _frames(thread: dict[str, Any]) -> list[_Frame]:
    return [(each["filename"], str(each["line"]), each["name"]) for each in thread["frames"]]


def _with_left(main: list[_Frame], *others: list[_Frame]) -> list[_Frame]:
    """Return the frames of a main thread; at its end, those of the threads left come before."""
    if not main or main[-1][2] != _END or not main[-1][0].endswith(_THREADS):
        return main
    known = (frame for each in others for frame in each if not frame[0].endswith(_THREADS))
    return [*known, main[-1]]


def _spy() -> str | None:
    """Return the path of py-spy."""
    beside = Path(sys.executable).with_name("py-spy")
    return str(beside) if beside.exists() else shutil.which("py-spy")


def _main_thread(threads: Sequence[dict[str, Any]], pid: int) -> dict[str, Any]:
    """Return the main thread; of Python 3.10 without blocking it py-spy knows names alone."""
    known = [each for each in threads if each["os_thread_id"] == pid]
    named = [each for each in threads if each["thread_name"] == "MainThread"]
    (main,) = known or named or threads  # ValueError: it cannot be told from the others
    return main


def _refused(pid: int) -> str:
    """Return why a process is not asked for its stack by a signal; empty if it can be."""
    if stat(pid)[:1] in (["T"], ["t"]):
        could = "py-spy can read it: pip install py-spy"
        if _spy() is not None:
            could = "py-spy could not read it in time, or may not trace it"
        return f"stopped; {could}"
    if stack_file(pid) is None or not handles(pid, SIGNAL):
        return "not a Python program of mpidist run"
    return ""


def _by_signal(pid: int, until: float) -> Stack:
    """Return the stack that the process writes itself, if it is running."""
    text, grown = b"", time.monotonic()
    try:
        with open(stack_file(pid) or "", "rb") as file:
            file.seek(0, os.SEEK_END)
            os.kill(pid, SIGNAL)
            while time.monotonic() < (min(until, grown + _SETTLED) if _ends(text) else until):
                time.sleep(0.002)
                if more := file.read():
                    text, grown = text + more, time.monotonic()
    except OSError:
        return Stack(why="it has ended, or belongs to another user")
    return parsed(text.decode(errors="replace"))


def _ends(text: bytes) -> bool:
    """Return whether a text of faulthandler, which does not mark its end, may be complete."""
    # Frames or threads beyond the first 100 are cut, and "..." is in their place.
    return text.endswith((*(f" in {name}\n".encode() for name in _OUTERMOST), b"...\n"))


def parsed(text: str) -> Stack:
    """Return the main thread's stack from the text of faulthandler, which has it last."""
    if not text:
        return Stack(why="the process did not answer: it may be inside the kernel")
    threads = re.split(r"^(?:Current thread|Thread) .*\n", text, flags=re.MULTILINE)
    if re.search(r"^\.\.\.$", threads[-1], re.MULTILINE):
        return Stack(why="the process has more than 100 threads")
    *others, main = (_FRAME.findall(each) for each in threads)
    if not text.endswith("\n") or (main and main[-1][2] == "_bootstrap"):
        return Stack(why="the process has not written its main thread's stack in time")
    return _stack(_with_left(main, *others))


def _stack(frames: Sequence[tuple[str, str, str]]) -> Stack:
    """Return the frames of the program, at most 50, with paths relative to this folder.

    A program that is a command of mpidist has no others than those inside mpidist: then it is them.
    """
    here = working_folder()
    known = [each for each in frames if not each[0].endswith(_AROUND) and each[0][:1] != "<"]
    outside = [each for each in known if not each[0].startswith(_PACKAGE)]
    kept = []
    for file, line, function in (outside or known)[:50]:
        inside = here and file.startswith(here) and "site-packages" not in file
        name = file[len(here) :] if inside else os.path.basename(file)
        kept.append(f"{name}:{line} {function}"[-200:])
    return Stack(tuple(kept))
