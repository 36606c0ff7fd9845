"""The SLURM allocation of this job, from the environment and from scontrol."""

from __future__ import annotations

import os
import re
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from ..errors import LaunchError
from .mpi import run_for_output, say


def cores() -> int:
    """Return the number of cores that this process may use on this node."""
    return len(os.sched_getaffinity(0))


_GROUP = re.compile(r"(\d+)(?:\(x(\d+)\))?")


@dataclass(frozen=True)
class SlurmAllocation:
    """The resources that SLURM granted to a job."""

    job: str  # its number, or ARRAY_INDEX where the number is also that of a whole job array
    node_list: str  # as SLURM writes it, for example n[1-4]
    cpus: tuple[int, ...]  # of each node, as SLURM counts them: cores or hardware threads
    tasks: tuple[int, ...] = ()  # on each node; empty if the job requested none
    cpus_per_task: int | None = None  # None if the job requested none
    partition: str = ""
    restarts: int = 0  # by the environment, perhaps that of the job that submitted this one
    parts: int = 1  # of a heterogeneous job

    @classmethod
    def find(cls, environ: Mapping[str, str] = os.environ) -> SlurmAllocation | None:
        """Return the allocation of this process; None outside an allocation."""
        job = environ.get("SLURM_JOB_ID", "")
        cpus = per_node(environ.get("SLURM_JOB_CPUS_PER_NODE", ""))
        if not job or not cpus:
            return None
        array = environ.get("SLURM_ARRAY_JOB_ID", ""), environ.get("SLURM_ARRAY_TASK_ID", "")
        requested = any(environ.get(f"SLURM_NTASKS{kind}") for kind in ("", "_PER_NODE"))
        return cls(
            "_".join(array) if all(array) and array[0] == job else job,
            environ.get("SLURM_JOB_NODELIST", ""),
            cpus,
            per_node(environ.get("SLURM_TASKS_PER_NODE", "")) if requested else (),
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
    """Return one number per node (of tasks or CPUs) from SLURM's short form; empty for other text.

    For example, ``2(x3),1`` is (2, 2, 2, 1).
    """
    found = [_GROUP.fullmatch(part) for part in text.split(",")]
    if not text or not all(found):
        return ()
    return tuple(int(m[1]) for m in found if m for _ in range(int(m[2] or 1)))


def _number(environ: Mapping[str, str], name: str) -> int:
    text = environ.get(name, "")
    return int(text) if text.isdecimal() else 0


def in_step(environ: Mapping[str, str] = os.environ) -> bool:
    """Return whether srun started this process; False in a batch script or the shell of salloc."""
    step = environ.get("SLURM_STEP_ID", "")
    return step.isdecimal() and "SLURM_STEP_NUM_TASKS" in environ


ANSWER_SECONDS = 5.0  # after which a default is taken in place of SLURM's answer
KILL_WAIT = 30.0  # SLURM's own default
REQUEUED_WITHIN = 60.0  # seconds that scontrol requeue may take
ENDED_WITHIN = 120.0  # seconds in which SLURM ends a job that it requeues


def threads_per_core(allocation: SlurmAllocation) -> int:
    """Return how many CPUs, as SLURM counts them, a core has; 1 if SLURM does not answer."""
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
    """Return SLURM's KillWait: seconds from its SIGTERM, as at a time limit, to its SIGKILL."""
    found = re.search(r"^KillWait\s*=\s*(\d+)", _scontrol("show", "config"), re.M)
    return float(found[1]) if found else KILL_WAIT


def whole_job(
    allocation: SlurmAllocation, environ: Mapping[str, str] = os.environ
) -> SlurmAllocation:
    """Return the allocation with the tasks of the whole job.

    A shell of ``srun --pty`` has only its own task in the environment: there SLURM is asked.
    """
    if not in_step(environ):
        return allocation
    facts = job_facts(allocation.job)
    on_node = facts.get("NtasksPerN:B:S:C", "0").partition(":")[0]
    if "NumTasks" not in facts:
        on_node = environ.get("SLURM_NTASKS_PER_NODE", "")
    if on_node.isdecimal() and int(on_node):
        return replace(allocation, tasks=(int(on_node),) * allocation.nodes)
    count, each = (facts.get(name, "") for name in ("NumTasks", "CPUs/Task"))
    if not count.isdecimal() or not int(count):
        return allocation
    share = int(each) if each.isdecimal() and int(each) else 1
    tasks = [max(1, cpus // share) for cpus in allocation.cpus]
    if sum(tasks) != int(count):  # the CPUs do not tell the layout: as even as possible
        whole, more = divmod(int(count), allocation.nodes)
        tasks = [whole + (node < more) for node in range(allocation.nodes)]
    return replace(allocation, tasks=tuple(tasks))


def job_facts(job: str) -> dict[str, str]:
    """Return the fields of ``scontrol show job``; an empty dict if SLURM does not answer.

    The environment is not enough: a submitted job inherits that of the job that submitted it.
    """
    words = _scontrol("-o", "show", "job", job).split()
    return dict(word.split("=", 1) for word in words if "=" in word)


def host_names(node_list: str) -> list[str]:
    """Return the nodes of SLURM's short form, as of ``n[1-4]``; [] if SLURM does not answer."""
    return _scontrol("show", "hostnames", node_list).split()


def nodes_down(names: Sequence[str]) -> set[str]:
    """Return those of some nodes that are down, or do not answer to SLURM."""
    found = set()
    for line in _scontrol("-o", "show", "node", ",".join(names)).splitlines():
        facts = dict(word.split("=", 1) for word in line.split() if "=" in word)
        state = facts.get("State", "")
        # As IDLE+NOT_RESPONDING, or ALLOCATED* in older releases.
        if state.startswith("DOWN") or "*" in state or "NOT_RESPONDING" in state:
            found.add(facts.get("NodeName", ""))
    return found & set(names)


def _scontrol(*arguments: str) -> str:
    try:
        return run_for_output(["scontrol", *arguments], ANSWER_SECONDS).stdout
    except LaunchError:
        return ""


def requeue(allocation: SlurmAllocation, most: int) -> None:
    """Have SLURM put this job back into its queue; SLURM ends the job, and starts it again later.

    It does not return, but waits until SLURM ends it: a batch script that ended by itself meanwhile
    would count as failed, and not be queued.  Of a job array only this job is requeued.

    LaunchError is raised if it was requeued `most` times already, or SLURM refuses.
    """
    known = job_facts(allocation.job).get("Restarts", "")  # the environment may be another job's
    restarts = int(known) if known.isdecimal() else allocation.restarts
    if restarts >= most:
        raise LaunchError(
            f"exit code {os.EX_TEMPFAIL}, but job {allocation.job} was requeued "
            f"{restarts} times already: the limit is {most} (--requeue-limit)"
        )
    count = f"{restarts + 1} of {most}"
    say(f"exit code {os.EX_TEMPFAIL}: requeuing job {allocation.job}, {count}")
    done = run_for_output(["scontrol", "requeue", allocation.job], REQUEUED_WITHIN)
    if done.returncode:
        raise LaunchError(f"scontrol requeue {allocation.job}: {done.stderr.strip()}")
    time.sleep(ENDED_WITHIN)
    raise LaunchError(f"SLURM has not ended job {allocation.job} within {ENDED_WITHIN:g} s")
