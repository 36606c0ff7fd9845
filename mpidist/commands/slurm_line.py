"""The launch line in a SLURM allocation: srun where it can start this MPI, else its mpiexec."""

from __future__ import annotations

import re
import shutil
import subprocess
from dataclasses import dataclass

from ..allocation import Allocation
from ..errors import InvalidArgument, LaunchError
from .launchers import MPICH, OPEN_MPI, find_launcher

LAUNCHERS = ("auto", "srun", "mpiexec")
# By which plugin of srun a library learns of the other ranks; by any other it starts singletons.
PLUGINS = {OPEN_MPI: "pmix", MPICH: "pmi2"}


@dataclass(frozen=True)
class Placement:
    """How many ranks on how many nodes.

    Attributes
    ----------
    ranks, nodes, per_node : int
        Ranks, the nodes that they take, and how many each holds at most.
    threads : int
        Cores for each rank.
    crowded : bool
        Whether a node holds more ranks than cores.
    slots : int
        Tasks that SLURM grants to a node.
    """

    ranks: int
    nodes: int
    per_node: int
    threads: int
    crowded: bool
    slots: int


def place(allocation: Allocation, ranks: int | None, per_node: int | None) -> Placement:
    """Place ranks on the nodes of an allocation, node after node.

    Raises
    ------
    InvalidArgument
        If neither the user nor the allocation says how many, or they do not fit.
    """
    nodes, tasks = allocation.nodes, allocation.tasks
    if ranks is None and per_node is None and not tasks:
        raise InvalidArgument(
            f"-n is missing: job {allocation.job} has {nodes} nodes, but no number of tasks: give "
            "-n or --ranks-per-node, or ask SLURM for --ntasks-per-node"
        )
    if ranks is None:
        ranks = sum(tasks) if per_node is None else per_node * nodes
    usual = max(tasks or allocation.cores)
    if per_node is None:
        per_node = usual if ranks <= usual * nodes else -(-ranks // nodes)
    needed = -(-ranks // per_node)
    if needed > nodes:
        raise InvalidArgument(
            f"-n {ranks} --ranks-per-node {per_node} needs {needed} nodes; job {allocation.job} "
            f"has {nodes}: {allocation.node_list}"
        )
    cores, asked = min(allocation.cores[:needed]), allocation.cores_per_task or 1
    crowded = per_node * asked > cores
    threads = 1 if crowded else max(asked, 1)
    return Placement(ranks, needed, min(per_node, ranks), threads, crowded, usual)


def choose_launcher(vendor: str, launcher: str, plugin: str | None) -> str | None:
    """Give the plugin of srun that is to start this MPI, or None: its own mpiexec is to.

    Parameters
    ----------
    vendor : str
        Of the MPI library.
    launcher : {"auto", "srun", "mpiexec"}
        What the user asks for.
    plugin : str or None
        The ``--mpi`` that the user asks for.

    Raises
    ------
    LaunchError
        If what is asked for would start every rank alone, or not at all.
    """
    wanted = PLUGINS.get(vendor)
    if plugin is not None and launcher == "mpiexec":
        raise LaunchError(f"--mpi {plugin} is for srun, not for --launcher mpiexec")
    if plugin is not None and (wanted is None or not plugin.startswith(wanted)):
        cure = f"use --mpi {wanted}, or --launcher mpiexec" if wanted else "use --launcher mpiexec"
        raise LaunchError(
            f"--mpi {plugin}: {vendor} would start every rank alone, without a word, or not at all "
            f"under srun --mpi={plugin}; {cure}"
        )
    if launcher == "mpiexec":
        return None
    offered = srun_plugins()
    best = plugin or next((name for name in offered if name.split("_v")[0] == wanted), None)
    if best is not None and best in offered:
        return best
    if launcher == "srun" or plugin is not None:
        asked = plugin or wanted or "any plugin for it"
        raise LaunchError(
            f"srun cannot start {vendor}: it needs --mpi={asked}, and this SLURM has "
            f"{', '.join(offered) or 'no srun'}; use --launcher mpiexec"
        )
    return None


def srun_plugins() -> list[str]:
    """List the values of srun's ``--mpi`` on this machine."""
    srun = shutil.which("srun")
    if srun is None:
        return []
    done = subprocess.run(
        [srun, "--mpi=list"], capture_output=True, text=True, timeout=30, check=False
    )
    return re.findall(r"\b(?:none|pmi2|pmix\w*|cray_shasta|openmpi)\b", done.stdout + done.stderr)


def slurm_command(vendor: str, plugin: str | None, placed: Placement) -> list[str]:
    """Give the launch line without the program."""
    if plugin is not None:
        return _srun(plugin, placed)
    launcher = [find_launcher(vendor), "-n", str(placed.ranks)]
    if vendor != OPEN_MPI:
        bound = ["-bind-to", f"core:{placed.threads}"] * (not placed.crowded and vendor == MPICH)
        return [*launcher, "-ppn", str(placed.per_node), *bound]
    over = ":oversubscribe" * (placed.crowded or placed.per_node > placed.slots)
    share = f":PE={placed.threads}" * (placed.threads > 1)
    bind = "none" if placed.crowded else "core"
    by = f"ppr:{placed.per_node}:node{share}{over}"
    return [*launcher, "--map-by", by, "--bind-to", bind]


def _srun(plugin: str, placed: Placement) -> list[str]:
    """Give the line of srun: a rank that fails ends the step, ranks fill node after node."""
    return [
        "srun",
        f"--mpi={plugin}",
        "--kill-on-bad-exit=1",
        f"--nodes={placed.nodes}",
        f"--ntasks={placed.ranks}",
        f"--ntasks-per-node={placed.per_node}",
        "--distribution=block",
        *([f"--cpus-per-task={placed.threads}"] * (placed.threads > 1)),
        *(["--overcommit", "--cpu-bind=none"] if placed.crowded else ["--cpu-bind=cores"]),
    ]
