"""Programs that are started with a time limit, and ended with every process that they started.

Standard library only: tests load this file alone.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

PATIENCE = 5.0  # seconds from SIGTERM, upon which an mpiexec cleans up, to SIGKILL


@dataclass
class Finished:
    """A program that has ended.

    Attributes
    ----------
    status : int or None
        The exit code, negative for a signal; None if the time limit was reached.
    output : str
        Standard output and standard error.
    seconds : float
        Run time.
    """

    status: int | None
    output: str
    seconds: float

    @property
    def timed_out(self) -> bool:
        """Whether the time limit was reached."""
        return self.status is None


def run_limited(
    command: Sequence[str],
    limit: float,
    env: Mapping[str, str] | None = None,
    cwd: str | os.PathLike | None = None,
    on_line: Callable[[str], object] = lambda line: None,
) -> Finished:
    """Run a command for at most `limit` seconds, in a session of its own and without input.

    Parameters
    ----------
    command : sequence of str
        The program and its arguments.
    limit : float
        Seconds after which it is ended by :func:`end_processes`.
    env, cwd : mapping and path, optional
        Environment and folder; by default those of this process.
    on_line : callable
        Called with each line of output, as it comes.
    """
    with session_folder(os.environ if env is None else env) as environ:
        return _run_limited(command, limit, environ, cwd, on_line)


def _run_limited(
    command: Sequence[str],
    limit: float,
    env: Mapping[str, str],
    cwd: str | os.PathLike | None,
    on_line: Callable[[str], object],
) -> Finished:
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
        status = process.wait(limit)
    except subprocess.TimeoutExpired:
        end_processes(process)
    except BaseException:
        end_processes(process)
        raise
    reader.join(5)
    return Finished(status, "".join(lines), time.monotonic() - begin)


SESSIONS = "PRTE_MCA_prte_local_tmpdir_base"  # where Open MPI's launcher makes its session folder


@contextlib.contextmanager
def session_folder(environ: Mapping[str, str]) -> Iterator[Mapping[str, str]]:
    """Yield `environ` with a new folder for the session files of Open MPI's launcher; remove it.

    The launcher names them by its process number and leaves them behind when it is killed.  A later
    launcher with the same number would find them and end ("The PMIx server's listener thread failed
    to start").  If `environ` names a folder for them, the new one is in it.
    """
    base = environ.get(SESSIONS) or environ.get("PRTE_MCA_prte_tmpdir_base") or None
    if base is not None:
        os.makedirs(base, exist_ok=True)
    with tempfile.TemporaryDirectory(
        prefix="ompi-session-", dir=base, ignore_cleanup_errors=True
    ) as folder:
        yield {**environ, SESSIONS: folder}


def end_processes(process: subprocess.Popen, patience: float = PATIENCE) -> None:
    """End a program by SIGTERM; after at most `patience` seconds kill it and all below it."""
    started = descendants(process.pid)
    process.terminate()
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(patience)
    for pid, birth in started:
        if _birth(pid) == birth:  # not another process with the same number
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
    process.wait()


def descendants(pid: int) -> list[tuple[int, str]]:
    """Return (process id, start time) of the process `pid` and of every process below it.

    The start time is the text in /proc/PID/stat: clock ticks since boot; empty if the process has
    ended.  The process group is not enough: an mpiexec gives each rank a group of its own.
    """
    children: dict[int, list[int]] = {}
    for entry in os.listdir("/proc"):
        if entry.isdigit() and (fields := stat(int(entry))):
            children.setdefault(int(fields[1]), []).append(int(entry))
    found, wait = [], [pid]
    while wait:
        found.append(wait.pop())
        wait += children.get(found[-1], [])
    return [(each, _birth(each)) for each in found]


def stat(pid: int) -> list[str]:
    """Return the fields of /proc/PID/stat from the third, the state, on; [] for no such process."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return []


def _birth(pid: int) -> str:
    fields = stat(pid)
    return fields[19] if fields else ""
