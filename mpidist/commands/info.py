"""``mpidist info``: what this launch runs on, and what "auto" will do."""

from __future__ import annotations

import shutil
import socket
import subprocess
from collections import Counter
from typing import Any

import click

from ..bench.results import knobs, versions
from ..device.find import find_device, why_no_device
from ..gpu.paths import CLASSES, Path, table, this_rank
from ..launcher.allocation import cores
from ..measure import format_size
from ..schedule.contract import COLLECTIVES
from .console import examples, make_console, make_table, show


def show_paths(comm: Any, console: Any) -> None:
    """Show what arrays on a GPU would take on this communicator; collective."""
    native = comm.backend.native is not None
    reasons = comm.allgather_object(why_no_device())
    paths = table(comm.allgather_object(this_rank(native)), native, comm.topology.num_nodes)
    console.print(f"\narrays on a GPU: {_device(reasons)}", markup=False)
    show(console, tabulate(paths, console))


def _device(reasons: list[str | None]) -> str:
    """Say on which device, or why on none; of the ranks that have none the first counts."""
    without = [(rank, reason) for rank, reason in enumerate(reasons) if reason is not None]
    if not without:
        return find_device().describe() + (" (rank 0)" if len(reasons) > 1 else "")
    rank, reason = without[0]
    return f"none on rank {rank}: {reason}.  With one:"


def tabulate(paths: list[Path], console: Any) -> Any:
    """Tabulate every path that could serve a class, the one that is taken marked."""
    made = make_table(console, "=operations", "=path", "=taken", "why")
    for operations, names in CLASSES.items():
        first = f"{operations}: {', '.join(names)}"
        for path in (p for p in paths if p.operations == operations):
            made.add_row(first, path.name, "yes" if path.taken else "", path.why)
            first = ""
    return made


SIZES = (8, 64 << 10, 1 << 20, 64 << 20)


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
    from ..bench.results import cores_here
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
    from ..launcher.allocation import Allocation
    from ..launcher.connections import adapters, addresses, describe, towards

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
