"""The launcher in a SLURM allocation: srun if it can start this MPI, otherwise its mpiexec."""

from __future__ import annotations

import os
import re
import shutil
from dataclasses import dataclass

from ..errors import InvalidArgument, LaunchError
from .allocation import SlurmAllocation
from .mpi import (
    ANSWERED_WITHIN,
    CRAY,
    INTEL,
    MPICH,
    OPEN_MPI,
    InstalledMpi,
    find_launcher,
    run_for_output,
)

LAUNCHERS = ("auto", "srun", "mpiexec")


@dataclass(frozen=True)
class RankLayout:
    """The layout of ranks on nodes."""

    ranks: int
    nodes: int  # that they use
    per_node: int  # at most
    cpus: int  # of each rank, as SLURM counts them; 1 if oversubscribed
    cores: int  # of each rank, at least 1; fewer than `cpus` if these are hardware threads
    oversubscribed: bool  # a node has more ranks than CPUs for them
    slots: int  # largest number of tasks on a node; of CPUs, if the job requested no tasks
    by_threads: bool  # ranks share cores, each with its own hardware threads
    uneven: bool  # nodes have different numbers of ranks because SLURM placed the tasks so
    left_out: tuple[str, ...] = ()  # nodes of the allocation that are down


def place(
    allocation: SlurmAllocation, ranks: int | None, per_node: int | None, threads: int = 1
) -> RankLayout:
    """Return the layout of ranks: like the job's tasks, otherwise node after node is filled.

    `threads` are SLURM's CPUs in a core: more than 1 if it counts hardware threads.
    InvalidArgument is raised if no number of ranks is known, or they do not fit on the nodes.
    """
    nodes, tasks = allocation.nodes, allocation.tasks
    if ranks is None and per_node is None and not tasks:
        raise InvalidArgument(
            f"-n is missing: job {allocation.job} has {nodes} nodes, but no number of tasks: give "
            "-n or --ranks-per-node, or ask SLURM for --ntasks-per-node"
        )
    uneven = len(set(tasks)) > 1 and ranks is not None and ranks < sum(tasks)
    if per_node is None and tasks and ranks in (None, sum(tasks)):
        return _placed(allocation, tasks, threads)
    if per_node is None and uneven:
        assert ranks is not None
        return _placed(allocation, _filled(tasks, ranks), threads)
    usual = max(tasks or allocation.cpus)
    if ranks is None:
        assert per_node is not None
        ranks = per_node * nodes
    if per_node is None:
        per_node = usual if ranks <= usual * nodes else -(-ranks // nodes)
    needed = -(-ranks // per_node)
    if needed > nodes:
        raise InvalidArgument(
            f"-n {ranks} --ranks-per-node {per_node} needs {needed} nodes; job {allocation.job} "
            f"has {nodes}: {allocation.node_list}"
        )
    full = [per_node] * (ranks // per_node) + [ranks % per_node] * bool(ranks % per_node)
    return _placed(allocation, tuple(full), threads, False)


def _filled(tasks: tuple[int, ...], ranks: int) -> tuple[int, ...]:
    """Return how many ranks each node gets if node after node is filled up to its tasks.

    `tasks` are the tasks of each node.  Nodes without ranks are left out.
    """
    before = [sum(tasks[:k]) for k in range(len(tasks))]
    return tuple(min(n, ranks - first) for n, first in zip(tasks, before) if first < ranks)


def _placed(
    allocation: SlurmAllocation, layout: tuple[int, ...], threads: int, as_slurm: bool = True
) -> RankLayout:
    cpus = allocation.cpus_per_task or 1
    if not as_slurm:  # the ranks share the CPUs that the tasks would have had
        cpus = max(1, min(cpus, *(c // n for n, c in zip(layout, allocation.cpus))))
    oversubscribed = any(n * cpus > there for n, there in zip(layout, allocation.cpus))
    cores = -(-cpus // threads)
    by_threads = threads > 1 and any(
        n * cores > there // threads for n, there in zip(layout, allocation.cpus)
    )
    return RankLayout(
        sum(layout),
        len(layout),
        max(layout),
        1 if oversubscribed else cpus,
        1 if oversubscribed else cores,
        oversubscribed,
        max(allocation.tasks or allocation.cpus),
        by_threads and not oversubscribed,
        as_slurm and len(set(layout)) > 1,
    )


def plugins_for(library: InstalledMpi) -> tuple[str, ...]:
    """Return the plugins of srun that this library can start with, best first.

    With any other, each rank would start as a job of its own.  The plugins of MPICH depend on
    how it was configured.
    """
    if library.vendor == MPICH:
        return ("pmix", "pmi2") if "pmix" in library.about.lower() else ("pmi2",)
    known = {OPEN_MPI: ("pmix",), CRAY: ("cray_shasta", "pmi2"), INTEL: ("pmi2", "pmix")}
    return known.get(library.vendor, ())


def choose_launcher(library: InstalledMpi, launcher: str, plugin: str | None) -> str | None:
    """Return the plugin of srun that starts this MPI; None if its own mpiexec does.

    LaunchError is raised if the user's `launcher` (--launcher) or `plugin` (--mpi) cannot start it,
    or would start each rank as a job of its own.
    """
    vendor, wanted = library.vendor, plugins_for(library)
    if plugin is not None and launcher == "mpiexec":
        raise LaunchError(f"--mpi {plugin}: only for srun, not for --launcher mpiexec")
    if plugin is not None and plugin.split("_v")[0] not in wanted:
        cure = "use --launcher mpiexec"
        if wanted:
            cure = f"use --mpi {wanted[0]}, or --launcher mpiexec"
        raise LaunchError(
            f"--mpi {plugin}: {vendor} would start every rank alone, or not at all, "
            f"under srun --mpi={plugin}; {cure}"
        )
    if launcher == "mpiexec" or (vendor == INTEL and launcher == "auto" and plugin is None):
        return None  # Intel's library needs to be told of SLURM's (I_MPI_PMI_LIBRARY) for srun
    if vendor == INTEL and not os.environ.get("I_MPI_PMI_LIBRARY"):
        raise LaunchError(
            "srun would start every rank of Intel MPI alone: set I_MPI_PMI_LIBRARY to SLURM's "
            "libpmi2.so, or use --launcher mpiexec"
        )
    offered = srun_plugins()
    best = plugin or _first(wanted, offered)
    if best is not None and best in offered:
        return best
    if launcher == "srun" or plugin is not None:
        asked = plugin or " or --mpi=".join(wanted) or "any plugin for it"
        raise LaunchError(
            f"srun cannot start {vendor}: it needs --mpi={asked}, and this SLURM has "
            f"{', '.join(offered) or 'no srun'}; use --launcher mpiexec"
        )
    return None


def _first(wanted: tuple[str, ...], offered: list[str]) -> str | None:
    """Return the first wanted plugin that srun offers, or None; ``pmix_v4`` counts as ``pmix``."""
    fitting = ((w, o) for w in wanted for o in offered if o.split("_v")[0] == w)
    return next((offer for _, offer in fitting), None)


def srun_plugins() -> list[str]:
    """Return the plugins that srun offers here (``srun --mpi=list``); empty without srun."""
    srun = shutil.which("srun")
    if srun is None:
        return []
    done = run_for_output([srun, "--mpi=list"], ANSWERED_WITHIN)
    return re.findall(r"\b(?:none|pmi2|pmix\w*|cray_shasta|openmpi)\b", done.stdout + done.stderr)


def slurm_command(vendor: str, plugin: str | None, placed: RankLayout) -> list[str]:
    """Return the launcher and its arguments for a layout, without the program."""
    if plugin is not None:
        return _srun(plugin, placed)
    launcher = [find_launcher(vendor), "-n", str(placed.ranks)]
    if vendor == OPEN_MPI:
        return [*launcher, *_mapped(placed)]
    unit = f"hwthread:{placed.cpus}" if placed.by_threads else f"core:{placed.cores}"
    bound = ["-bind-to", unit] * (not placed.oversubscribed and vendor == MPICH)
    # Without -ppn Hydra places one rank for each task of SLURM on a node.
    return [*launcher, *(["-ppn", str(placed.per_node)] * (not placed.uneven)), *bound]


def _mapped(placed: RankLayout) -> list[str]:
    """Return the options of Open MPI's mpirun that place and bind the ranks as `placed` says."""
    share, bind = (placed.cores, "core") if not placed.by_threads else (placed.cpus, "hwthread")
    how = f":PE={share}" * (share > 1) + ":HWTCPUS" * placed.by_threads
    how += ":oversubscribe" * (placed.oversubscribed or placed.per_node > placed.slots)
    by = "slot" if placed.uneven else f"ppr:{placed.per_node}:node"
    return ["--map-by", f"{by}{how}", "--bind-to", "none" if placed.oversubscribed else bind]


def _srun(plugin: str, placed: RankLayout) -> list[str]:
    """Return the srun command for a layout; a rank that fails ends all ranks.

    The environment is passed on even if the job was submitted with ``--export=NONE``.  Ranks fill
    node after node, or are placed like the tasks of the job.
    """
    even = [f"--ntasks-per-node={placed.per_node}", "--distribution=block"]
    bind = "threads" if placed.by_threads else "cores"
    return [
        "srun",
        f"--mpi={plugin}",
        "--kill-on-bad-exit=1",
        "--export=ALL",
        f"--nodes={placed.nodes}",
        *([f"--exclude={','.join(placed.left_out)}"] * bool(placed.left_out)),
        f"--ntasks={placed.ranks}",
        *(even * (not placed.uneven)),
        *([f"--cpus-per-task={placed.cpus}"] * (placed.cpus > 1)),
        *(["--overcommit", "--cpu-bind=none"] if placed.oversubscribed else [f"--cpu-bind={bind}"]),
    ]
