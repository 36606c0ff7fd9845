"""Start a program under mpiexec or alone, with a hard time limit and nothing left behind.

For the launcher and for every test that starts a job of its own.  Standard library only.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

# What the machine of a test needs: any user, more ranks than cores, and no rank tied to a core.
OVERSUBSCRIBED = {
    "OMPI_ALLOW_RUN_AS_ROOT": "1",
    "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
    "PRTE_MCA_rmaps_default_mapping_policy": ":oversubscribe",
    "PRTE_MCA_hwloc_default_binding_policy": "none",
    "OMPI_MCA_mpi_yield_when_idle": "1",
    "OMPI_MCA_osc": "^ucx",
    "OMP_NUM_THREADS": "1",
    "OPENBLAS_NUM_THREADS": "1",
}
# What an mpiexec leaves in the environment of its processes, and another one would stumble over.
OF_A_LAUNCH = ("OMPI_COMM_", "PMIX_", "PMI_", "PRTE_LAUNCHED", "MPI_LOCAL", "HYDI_", "HYDRA_")


@dataclass
class Finished:
    """What became of a program: `status` is None where its time ran out."""

    status: int | None
    output: str
    seconds: float

    @property
    def timed_out(self) -> bool:
        return self.status is None


def mpiexec(ranks: int, *program: str, python: str = sys.executable) -> list[str]:
    """Return the command that runs `program` with the mpiexec beside `python`."""
    return [str(Path(python).parent / "mpiexec"), "-n", str(ranks), python, *program]


def environment(**more: str) -> dict[str, str]:
    """Return this environment, without a launch that it is part of, ready for an mpiexec.

    And without the wish to write no bytecode: each of hundreds of ranks would compile mpidist anew,
    which takes longer than all else that its import does.
    """
    unwanted = (*OF_A_LAUNCH, "PYTHONDONTWRITEBYTECODE")
    plain = {k: v for k, v in os.environ.items() if not k.startswith(unwanted)}
    return {**plain, **OVERSUBSCRIBED, "PYTHONUNBUFFERED": "1", **more}


def run(
    command: Sequence[str],
    limit: float,
    env: dict[str, str] | None = None,
    cwd: str | os.PathLike | None = None,
    on_line: Callable[[str], object] = lambda line: None,
) -> Finished:
    """Run `command` for at most `limit` seconds; both its outputs go to `on_line`, line by line."""
    begin, lines = time.monotonic(), []
    process = subprocess.Popen(
        command,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
        env=environment() if env is None else env,
        cwd=cwd,
        start_new_session=True,
    )

    def read():
        for line in process.stdout:
            lines.append(line)
            on_line(line)

    reader = threading.Thread(target=read, daemon=True)
    reader.start()
    try:
        status = process.wait(limit)
    except subprocess.TimeoutExpired:
        status = None
        end(process)
    except BaseException:
        end(process)
        raise
    reader.join(5)
    return Finished(status, "".join(lines), time.monotonic() - begin)


def end(process: subprocess.Popen, patience: float = 5.0) -> None:
    """End a program and all that it started: ask first, so that an mpiexec can clean up."""
    started = descendants(process.pid)
    process.terminate()
    try:
        process.wait(patience)
    except subprocess.TimeoutExpired:
        pass
    for pid, birth in started:
        if birth_of(pid) == birth:  # not another process under the same number
            try:
                os.kill(pid, signal.SIGKILL)
            except ProcessLookupError:
                pass
    process.wait()


def descendants(pid: int) -> list[tuple[int, str]]:
    """Return `pid` and every process below it, each with its time of birth.

    The process group is not enough: an mpiexec gives each rank a group of its own.
    """
    children: dict[int, list[int]] = {}
    for entry in os.listdir("/proc"):
        if entry.isdigit() and (fields := stat(int(entry))):
            children.setdefault(int(fields[1]), []).append(int(entry))
    found, wait = [], [pid]
    while wait:
        found.append(wait.pop())
        wait += children.get(found[-1], [])
    return [(each, birth_of(each)) for each in found]


def stat(pid: int) -> list[str]:
    """Return the fields of /proc/PID/stat from the third on; [] where there is no such process."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return []


def birth_of(pid: int) -> str:
    fields = stat(pid)
    return fields[19] if fields else ""
