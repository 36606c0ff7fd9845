"""``mpidist info``: what this launch runs on, and what "auto" will do."""

from __future__ import annotations

import os
import platform
import re
import shutil
import socket
import subprocess
from collections import Counter
from collections.abc import Mapping
from typing import Any

import click

from ..measure import format_size
from ..schedule.contract import COLLECTIVES
from .common import examples, make_console, make_table, show
from .info_gpu import show_paths

SIZES = (8, 64 << 10, 1 << 20, 64 << 20)
_KNOBS = re.compile(
    r"(MPIDIST|OMPI_MCA|PRTE_MCA|PMIX_MCA|MPIR_CVAR|UCX|FI|I_MPI|MALLOC|OMP|OPENBLAS|MKL)_[A-Z]"
)
_NOT_KNOBS = (
    "OMPI_MCA_ess",
    "OMPI_MCA_orte",
    "OMPI_MCA_PREFIXES",
    "PMIX_MCA_mca_base",
    "MPIDIST_TERMINAL",
)


def knobs(environ: Mapping[str, str] = os.environ) -> dict[str, str]:
    """Give the variables of the environment that steer us, MPI, its transports and threads."""
    return {
        name: value
        for name, value in sorted(environ.items())
        if _KNOBS.match(name) and not name.startswith(_NOT_KNOBS)
    }


def versions() -> dict[str, str]:
    """Give the versions of what is at work."""
    import mpi4py
    import numpy

    from .. import __version__

    return {
        "mpidist": __version__,
        "mpi4py": mpi4py.__version__,
        "numpy": numpy.__version__,
        "python": platform.python_version(),
    }


def cores() -> int:
    """Give the number of cores that this process may use."""
    return len(os.sched_getaffinity(0))


def gpus() -> list[str]:
    """Name the GPUs of this host; an empty list where the driver shows none."""
    command = shutil.which("nvidia-smi")
    if command is None:
        return []
    query = [command, "--query-gpu=name,memory.total", "--format=csv,noheader"]
    try:
        done = subprocess.run(query, capture_output=True, text=True, timeout=10, check=True)
    except (OSError, subprocess.SubprocessError):
        return []
    return [line.strip() for line in done.stdout.splitlines() if line.strip()]


@click.command(
    "info",
    epilog=examples(
        "mpidist info",
        "mpidist run -n 4 -- mpidist info",
        "mpidist run mpidist info --links         in an allocation",
    ),
)
@click.option("--links", is_flag=True, help="Measure the links inside and between the nodes.")
def info_command(links: bool) -> None:
    """Show MPI, machine, network, and what "auto" and GPU arrays take.

    With --links the measured speeds go to the cost model, which then says what each algorithm
    between the nodes would take.
    """
    import mpidist

    from ..backends.mpi import describe_library
    from ..bench.records import cores_here
    from ..shared_memory import compiled

    comm = mpidist.init()
    library = describe_library()
    together = len(cores_here(comm))
    hosts = Counter(comm.allgather_object(socket.gethostname()))
    here = [len(group) for group in comm.topology.groups]
    lines = {
        "MPI": f"{library['vendor']} {library['version']}, standard {library['standard']}",
        "library": library["library"],
        "thread level": library["thread_level"],
        "ranks": f"{comm.size} on {len(here)} node{'s' * (len(here) > 1)}: "
        + " + ".join(map(str, here)),
        "hosts": ", ".join(f"{host} ({count})" for host, count in hosts.items()),
        **surroundings(comm, list(hosts)),
        "cores": f"{together} for {here[0]} rank{'s' * (here[0] > 1)}, {cores()} for rank 0"
        + (", oversubscribed" if here[0] > together else ""),
        "GPU": "; ".join(gpus()) or "none found",
        "compiled": compiled.described(),
        "versions": ", ".join(f"{name} {version}" for name, version in versions().items()),
        "deadline": "none" if comm.timeout is None else f"{comm.timeout:g} s",
        "environment": " ".join(f"{k}={v}" for k, v in knobs().items()) or "nothing set",
    }
    console = make_console()
    facts = make_table(console, "", "")
    facts.show_header = False
    for name, value in lines.items():
        facts.add_row(name, value)
    show(console, facts)
    if links:
        show_links(comm, console)
    console.print('\n"auto" takes, by bytes of the whole buffer (float32, sum):')
    show(console, choices(comm, console))
    show_paths(comm, console)


def surroundings(comm: Any, hosts: list[str]) -> dict[str, str]:
    """Tell of the allocation, and of the network between the hosts as rank 0 sees it."""
    from .allocation import Allocation
    from .interfaces import adapters, addresses, describe, towards

    found = {}
    allocation = Allocation.find()
    if allocation is not None:
        found["SLURM"] = (
            f"job {allocation.job}, partition {allocation.partition or 'unknown'}, "
            f"{allocation.nodes} node{'s' * (allocation.nodes > 1)} {allocation.node_list}, cores "
            + " + ".join(map(str, allocation.cpus))
        )
    if len(hosts) > 1:
        way = towards(hosts[1])
        found["network"] = f"{describe(way)} to {hosts[1]}" if way else ", ".join(addresses())
        found["network"] += "".join(f"; {adapter}" for adapter in adapters())
    return found


def show_links(comm: Any, console: Any) -> None:
    """Measure the links, show them, and have the cost model predict by them; collective."""
    from ..engine.calibration import measure_links

    found, calibration = measure_links(comm)
    comm.learn(calibration)
    table = make_table(console, "=between", ">µs, one way", ">GB/s")
    for link in found:
        between = f"inside {link.first}" if link.inside else f"{link.first} – {link.second}"
        speed = f"{1e-9 / link.beta:.3f}" if link.beta else ""
        table.add_row(between, f"{1e6 * link.alpha:.1f}", speed)
    console.print("\nlinks, by messages there and back:")
    show(console, table)


def choices(comm: Any, console: Any) -> Any:
    """Tabulate what "auto" takes for each collective at a few sizes."""
    table = make_table(console, "collective", *map(format_size, SIZES))
    for collective in COLLECTIVES:
        sizes = SIZES if collective != "barrier" else (0,)
        names = [comm.explain(collective, nbytes)[0].name for nbytes in sizes]
        table.add_row(collective, *names)
    return table
