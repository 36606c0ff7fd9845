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
        Its number; where that is the number of an array too, ARRAY_INDEX, by which SLURM knows this
        job alone.
    node_list : str
        Its nodes as SLURM writes them, for example ``n[1-4]``.
    cpus : tuple of int
        On each node, as SLURM counts: cores, or their hardware threads.
    tasks : tuple of int
        Tasks on each node; empty where the job asked for none.
    cpus_per_task : int or None
        As the job asked for; None where it did not.
    partition : str
        Where it runs.
    restarts : int
        How often SLURM has started the job again, as the environment says: it may have been
        inherited from the job in which this one was submitted.
    parts : int
        Of a heterogeneous job; 1 for others.
    """

    job: str
    node_list: str
    cpus: tuple[int, ...]
    tasks: tuple[int, ...] = ()
    cpus_per_task: int | None = None
    partition: str = ""
    restarts: int = 0
    parts: int = 1

    @classmethod
    def find(cls, environ: Mapping[str, str] = os.environ) -> Allocation | None:
        """Give the allocation of this process; None outside of one."""
        job = environ.get("SLURM_JOB_ID", "")
        cpus = per_node(environ.get("SLURM_JOB_CPUS_PER_NODE", ""))
        if not job or not cpus:
            return None
        array = environ.get("SLURM_ARRAY_JOB_ID", ""), environ.get("SLURM_ARRAY_TASK_ID", "")
        asked = any(environ.get(f"SLURM_NTASKS{kind}") for kind in ("", "_PER_NODE"))
        return cls(
            "_".join(array) if all(array) and array[0] == job else job,
            environ.get("SLURM_JOB_NODELIST", ""),
            cpus,
            per_node(environ.get("SLURM_TASKS_PER_NODE", "")) if asked else (),
            _number(environ, "SLURM_CPUS_PER_TASK") or None,
            environ.get("SLURM_JOB_PARTITION", ""),
            _number(environ, "SLURM_RESTART_COUNT"),
            max(_number(environ, "SLURM_HET_SIZE"), 1),
        )

    @property
    def nodes(self) -> int:
        """Number of nodes."""
        return len(self.cpus)


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


def _number(environ: Mapping[str, str], name: str) -> int:
    text = environ.get(name, "")
    return int(text) if text.isdigit() else 0


def in_step(environ: Mapping[str, str] = os.environ) -> bool:
    """Tell whether srun started this process (a batch script and salloc's shell it did not)."""
    step = environ.get("SLURM_STEP_ID", "")
    return step.isdigit() and "SLURM_STEP_NUM_TASKS" in environ
