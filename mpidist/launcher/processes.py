"""Programs that are started with a time limit, and ended with every process that they started.

Standard library only: tests load this file alone.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

PATIENCE = 5.0  # seconds from SIGTERM, upon which an mpiexec cleans up, to SIGKILL


@dataclass
class Finished:
    """A program that has ended."""

    status: int | None  # the exit code, negative for a signal; None if the time limit was reached
    output: str  # standard output and standard error
    seconds: float  # run time

    @property
    def timed_out(self) -> bool:
        """Whether the time limit was reached."""
        return self.status is None


def run_limited(
    command: Sequence[str],
    limit: float | Callable[[], float],
    env: Mapping[str, str] | None = None,
    cwd: str | os.PathLike | None = None,
    on_line: Callable[[str], object] = lambda line: None,
) -> Finished:
    """Run a command within a time limit, in a session of its own and without input.

    After `limit` seconds it is ended by :func:`end_processes`; a callable returns the seconds that
    are left now, and is called again when they have passed.  `on_line` is called with each line of
    output, as it comes.
    """
    begin, lines = time.monotonic(), []
    process = subprocess.Popen(
        command,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
        env=env,
        cwd=cwd,
        start_new_session=True,
    )

    def read() -> None:
        assert process.stdout is not None
        for line in process.stdout:
            lines.append(line)
            on_line(line)

    reader = threading.Thread(target=read, daemon=True)
    reader.start()
    status: int | None = None
    try:
        left = limit() if callable(limit) else limit
        while status is None and left > 0:
            with contextlib.suppress(subprocess.TimeoutExpired):
                status = process.wait(left)
            left = limit() if callable(limit) else 0
        if status is None:
            end_processes(process, environ=env)
    except BaseException:
        end_processes(process, environ=env)
        raise
    remove_session_files(process.pid, os.environ if env is None else env)
    reader.join(5)
    return Finished(status, "".join(lines), time.monotonic() - begin)


SESSION_BASES = "PRTE_MCA_prte_local_tmpdir_base", "PRTE_MCA_prte_tmpdir_base", "TMPDIR"


def remove_session_files(pid: int, environ: Mapping[str, str]) -> None:
    """Remove the files that Open MPI's launcher, process `pid`, leaves behind when it is killed.

    Their folder has its process number for a name: a later launcher with the same number would find
    them and end ("The PMIx server's listener thread failed to start").  `environ` is the launcher's
    environment, which may say where the folder is.
    """
    base = next((environ[name] for name in SESSION_BASES if environ.get(name)), "/tmp")
    shutil.rmtree(Path(base, f"ompi.{pid}"), ignore_errors=True)


def end_processes(
    process: subprocess.Popen,
    patience: float = PATIENCE,
    environ: Mapping[str, str] | None = None,
) -> None:
    """End a program by SIGTERM; after at most `patience` seconds kill it and all below it.

    `environ` is its environment; None for this process's.
    """
    # Before the signal: a process whose parent has ended is below nobody any more.
    started = descendants(process.pid)
    process.terminate()
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(patience)
    for pid, birth in started:
        if _birth(pid) == birth:  # not another process with the same number
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
    process.wait()
    for pid, _ in started:
        remove_session_files(pid, os.environ if environ is None else environ)


def descendants(pid: int) -> list[tuple[int, str]]:
    """Return (process id, start time) of the process `pid` and of every process below it.

    The start time is the text in /proc/PID/stat: clock ticks since boot; empty if the process has
    ended.  The process group is not enough: an mpiexec gives each rank a group of its own.
    """
    return [(each, _birth(each)) for each in below(pid, families())]


def families() -> dict[int, list[int]]:
    """Return the children of each process of this machine that has some."""
    children: dict[int, list[int]] = {}
    for entry in os.listdir("/proc"):
        if entry.isdecimal() and (fields := stat(int(entry))):
            children.setdefault(int(fields[1]), []).append(int(entry))
    return children


def below(pid: int, children: Mapping[int, Sequence[int]]) -> list[int]:
    """Return the process `pid` and every process below it, each after its parent."""
    found, wait = [], [pid]
    while wait:
        found.append(wait.pop())
        wait += children.get(found[-1], [])
    return found


def stat(pid: int) -> list[str]:
    """Return the fields of /proc/PID/stat from the third, the state, on; [] for no such process."""
    try:
        # A process may name itself by any bytes.
        text = Path(f"/proc/{pid}/stat").read_text(encoding="ascii", errors="replace")
        return text.rpartition(")")[2].split()
    except OSError:
        return []


def working_folder() -> str:
    """Return the current folder as the beginning of a path in it; "" if it is gone."""
    try:
        return f"{os.getcwd()}{os.sep}"
    except OSError:
        return ""


def _birth(pid: int) -> str:
    fields = stat(pid)
    return fields[19] if fields else ""
