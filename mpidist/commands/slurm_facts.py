"""What SLURM knows of its nodes and its own settings, and the environment does not tell."""

from __future__ import annotations

import os
import re

from ..allocation import Allocation
from ..errors import LaunchError
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


def _scontrol(*arguments: str) -> str:
    try:
        return ask(["scontrol", *arguments], SECONDS).stdout
    except LaunchError:
        return ""
