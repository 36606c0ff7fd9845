"""The SLURM allocation that this process is in: nodes, tasks and cores, from the environment."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass

_GROUP = re.compile(r"(\d+)(?:\(x(\d+)\))?")


@dataclass(frozen=True)
class Allocation:
    """What SLURM granted to a job.

    Attributes
    ----------
    job : str
        Its number.
    node_list : str
        Its nodes as SLURM writes them, for example ``n[1-4]``.
    cores : tuple of int
        Cores on each node.
    tasks : tuple of int
        Tasks on each node; empty where the job asked for none.
    cores_per_task : int or None
        As the job asked for; None where it did not.
    partition : str
        Where it runs.
    """

    job: str
    node_list: str
    cores: tuple[int, ...]
    tasks: tuple[int, ...] = ()
    cores_per_task: int | None = None
    partition: str = ""

    @classmethod
    def find(cls, environ: Mapping[str, str] = os.environ) -> Allocation | None:
        """Give the allocation of this process; None outside of one."""
        job = environ.get("SLURM_JOB_ID", "")
        cores = per_node(environ.get("SLURM_JOB_CPUS_PER_NODE", ""))
        if not job or not cores:
            return None
        asked = any(environ.get(f"SLURM_NTASKS{kind}") for kind in ("", "_PER_NODE"))
        per_task = environ.get("SLURM_CPUS_PER_TASK", "")
        return cls(
            job,
            environ.get("SLURM_JOB_NODELIST", ""),
            cores,
            per_node(environ.get("SLURM_TASKS_PER_NODE", "")) if asked else (),
            int(per_task) if per_task.isdigit() else None,
            environ.get("SLURM_JOB_PARTITION", ""),
        )

    @property
    def nodes(self) -> int:
        """Number of nodes."""
        return len(self.cores)


def per_node(text: str) -> tuple[int, ...]:
    """Read numbers by node as SLURM writes them.

    Examples
    --------
    >>> per_node("2(x3),1")
    (2, 2, 2, 1)
    """
    found = [_GROUP.fullmatch(part) for part in text.split(",")]
    if not text or not all(found):
        return ()
    return tuple(int(m[1]) for m in found if m for _ in range(int(m[2] or 1)))


def in_step(environ: Mapping[str, str] = os.environ) -> bool:
    """Tell whether srun started this process (a batch script and salloc's shell it did not)."""
    step = environ.get("SLURM_STEP_ID", "")
    return step.isdigit() and "SLURM_STEP_NUM_TASKS" in environ
