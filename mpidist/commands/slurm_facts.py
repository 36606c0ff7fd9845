"""What SLURM knows of its nodes and its own settings, and the environment does not tell."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from dataclasses import replace

from ..errors import LaunchError
from .allocation import Allocation, in_step
from .asking import ask

SECONDS = 5.0  # a controller that is slower is not waited for: there are usual values
KILL_WAIT = 30.0  # SLURM's own default


def threads_per_core(allocation: Allocation) -> int:
    """Give how many of the CPUs that SLURM counts are one core; 1 if it does not answer."""
    node = os.environ.get("SLURMD_NODENAME") or allocation.node_list
    threads = 1
    for line in _scontrol("-o", "show", "node", node).splitlines():
        found = dict(re.findall(r"\b(\w+)=(\d+)", line))
        names = ("Boards", "Sockets", "CoresPerSocket", "ThreadsPerCore", "CPUTot")
        boards, sockets, cores, each, cpus = (int(found.get(name, 1)) for name in names)
        if cpus >= max(boards, 1) * sockets * cores * each:  # else SLURM counts cores
            threads = max(threads, each)
    return threads


def kill_wait() -> float:
    """Give the seconds from SLURM's SIGTERM, as at a job's time limit, to its SIGKILL."""
    found = re.search(r"^KillWait\s*=\s*(\d+)", _scontrol("show", "config"), re.M)
    return float(found[1]) if found else KILL_WAIT


def whole_job(allocation: Allocation, environ: Mapping[str, str] = os.environ) -> Allocation:
    """Give the allocation with the tasks of the job, also to a shell of ``srun --pty``.

    There the environment has the one task of the shell in their place.
    """
    if not in_step(environ):
        return allocation
    said = about_job(allocation.job)
    asked = said.get("NtasksPerN:B:S:C", "0").partition(":")[0]
    if "NumTasks" not in said:
        asked = environ.get("SLURM_NTASKS_PER_NODE", "")
    if asked.isdigit() and int(asked):
        return replace(allocation, tasks=(int(asked),) * allocation.nodes)
    count, each = (said.get(name, "") for name in ("NumTasks", "CPUs/Task"))
    if not count.isdigit() or not int(count):
        return allocation
    share = int(each) if each.isdigit() and int(each) else 1
    tasks = [max(1, cpus // share) for cpus in allocation.cpus]
    if sum(tasks) != int(count):  # more than fit, or fewer: as evenly as can be
        whole, more = divmod(int(count), allocation.nodes)
        tasks = [whole + (node < more) for node in range(allocation.nodes)]
    return replace(allocation, tasks=tuple(tasks))


def about_job(job: str) -> dict[str, str]:
    """Give what SLURM says of a job; nothing if it does not answer.

    The environment may be that of another job: one that is submitted inherits it.
    """
    words = _scontrol("-o", "show", "job", job).split()
    return dict(word.split("=", 1) for word in words if "=" in word)


def _scontrol(*arguments: str) -> str:
    try:
        return ask(["scontrol", *arguments], SECONDS).stdout
    except LaunchError:
        return ""
