"""``mpidist info``: MPI, machine and network of this launch, and the choices of "auto"."""

from __future__ import annotations

import json
import socket
from collections import Counter
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

import click

from ..launcher.allocation import cores
from ..measure import counted, format_size
from ..schedule.contract import COLLECTIVES
from ..tables import Column
from .console import examples, make_console, make_table, show

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

    from ..communicator.communicator import Communicator
    from ..engine.calibration import LinkSpeed
    from ..gpu.executors import GpuCandidate


_CHOICE_SIZES = (8, 64 << 10, 1 << 20, 64 << 20)


@click.command(
    "info",
    short_help='Print MPI, machine, network, and the choices of "auto".',
    epilog=examples(
        "mpidist info",
        "mpidist run -n 4 -- mpidist info",
        "mpidist run mpidist info --links         in an allocation",
    ),
)
@click.option("--links", is_flag=True, help="Measure the links inside and between the nodes.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON instead of tables.")
def info_command(links: bool, as_json: bool) -> None:
    """Print the MPI library, the machine, the network, and the choices of "auto".

    The choices include the executors of arrays on a GPU.  With --links, the cost model is
    calibrated with the measured links; between nodes "auto" chooses by it.
    """
    import mpidist

    from ..bench.machine import Watch, cores_here, knobs, versions
    from ..device.find import list_gpus, why_no_device
    from ..gpu.executors import table, this_rank
    from ..shared_memory import compiled

    comm = mpidist.init()  # before the next import, which starts MPI: its error is one line
    from ..backends.mpi import describe_library

    machine = Watch(comm)
    machine.look()
    together = len(cores_here(comm))
    hosts = Counter(comm.allgather_object(socket.gethostname()))
    here = [len(group) for group in comm.topology.groups]
    measured = _measure_links(comm) if links else []
    choices = _choices(comm)
    reasons = comm.allgather_object(why_no_device())
    native = comm.backend.native is not None
    candidates = table(comm.allgather_object(this_rank(native)), native, comm.topology.num_nodes)
    machine.look()
    facts = {
        "versions": versions(),
        "mpi": describe_library(),
        "ranks": comm.size,
        "ranks_per_node": here,
        "hosts": dict(hosts),
        "slurm": _allocation(),
        "network": _network(list(hosts)),
        "cores": {"node": together, "rank_0": cores(), "oversubscribed": here[0] > together},
        "line_ns": machine.before_and_after(),
        "gpus": [
            dict(zip(("name", "memory"), gpu.rsplit(", ", maxsplit=1))) for gpu in list_gpus()
        ],
        "compiled": {"vector_bits": 8 * compiled.vector_width(), "note": compiled.described()},
        "deadline_s": comm.timeout,
        "environment": knobs(),
        "links": [asdict(link) for link in measured],
        "choices": choices,
        "gpu_missing": [
            {"rank": rank, "note": why} for rank, why in enumerate(reasons) if why is not None
        ],
        "gpu_executors": [
            {
                **{"operations": c.operations, "executor": c.name},
                **{"taken": c.taken, "note": c.why},
            }
            for c in candidates
        ],
    }
    if as_json:
        click.echo(json.dumps(facts, indent=1))
        return
    console = make_console()
    made = make_table(console, "", "")
    made.show_header = False
    for name, value in as_text(facts, machine.described()).items():
        made.add_row(name, value)
    show(console, made)
    if links:
        _show_links(measured, console)
    console.print('\nchoices of "auto", by bytes of the whole buffer (float32, sum):')
    chosen = make_table(console, "collective", *map(format_size, _CHOICE_SIZES))
    for collective, names in choices.items():
        chosen.add_row(collective, *names.values())
    show(console, chosen)
    console.print(f"\narrays on a GPU: {_device(reasons)}", markup=False)
    if None in reasons:
        show(console, _tabulate(candidates, console))


def as_text(facts: dict[str, Any], state: str) -> dict[str, str]:
    """Return the lines of the first table by name; those without a value are left out."""
    from .network import describe_interface

    library, here, cores = facts["mpi"], facts["ranks_per_node"], facts["cores"]
    job, network = facts["slurm"], facts["network"]
    lines = {
        "MPI": f"{library['vendor']} {library['version']}, standard {library['standard']}",
        "library": library["library"],
        "thread level": library["thread_level"],
        "ranks": f"{facts['ranks']} on {counted(len(here), 'node')}: " + " + ".join(map(str, here)),
        "hosts": ", ".join(f"{host} ({count})" for host, count in facts["hosts"].items()),
        "SLURM": job
        and f"job {job['job']}, partition {job['partition'] or 'unknown'}, "
        f"{counted(len(job['cpus']), 'node')} {job['node_list']}, cores "
        + " + ".join(map(str, job["cpus"])),
        "network": network
        and "; ".join(
            [
                f"{describe_interface(network['interface'])} to {network['to']}"
                if network["interface"]
                else ", ".join(network["addresses"]),
                *network["adapters"],
            ]
        ),
        "cores": f"{cores['node']} for {counted(here[0], 'rank')}, {cores['rank_0']} for rank 0"
        + ", oversubscribed" * cores["oversubscribed"],
        "GPU": "; ".join(", ".join(gpu.values()) for gpu in facts["gpus"]) or "none found",
        "compiled": facts["compiled"]["note"],
        "versions": ", ".join(f"{name} {version}" for name, version in facts["versions"].items()),
        "deadline": "none" if facts["deadline_s"] is None else f"{facts['deadline_s']:g} s",
        "environment": " ".join(f"{k}={v}" for k, v in facts["environment"].items())
        or "nothing set",
        "line": state,
    }
    return {name: text for name, text in lines.items() if text}


def _allocation() -> dict[str, Any] | None:
    """Return the fields of the SLURM allocation; None without one."""
    from ..launcher.allocation import SlurmAllocation

    allocation = SlurmAllocation.find()
    return None if allocation is None else asdict(allocation)


def _network(hosts: list[str]) -> dict[str, Any] | None:
    """Return rank 0's network, from it to the second host; None if all ranks are on one host."""
    from ..launcher.connections import addresses
    from .network import adapters, interface_to

    if len(hosts) == 1:
        return None
    return {
        "to": hosts[1],
        "interface": interface_to(hosts[1]) or None,
        "addresses": addresses(),
        "adapters": adapters(),
    }


def _measure_links(comm: Communicator) -> list[LinkSpeed]:
    """Return the measured links, and calibrate the cost model with them; collective."""
    from ..communicator.layers import learn
    from ..engine.calibration import measure_links

    found, calibration = measure_links(comm)
    learn(comm, calibration)
    return found


def _show_links(links: list[LinkSpeed], console: Console) -> None:
    made = make_table(
        console, Column.names("between"), Column.numbers("µs, one way"), Column.numbers("GB/s")
    )
    for link in links:
        between = f"inside {link.first}" if link.inside else f"{link.first} – {link.second}"
        speed = f"{1e-9 / link.beta:.3f}" if link.beta else ""
        made.add_row(between, f"{1e6 * link.alpha:.1f}", speed)
    console.print("\nlinks, measured by a ping-pong:")
    show(console, made)


def _choices(comm: Communicator) -> dict[str, dict[str, str]]:
    """Return the choice of "auto" in a dict by collective of dicts by size, such as "64K"."""
    return {
        collective: {
            format_size(nbytes): comm.explain(collective, nbytes)[0].name
            for nbytes in (_CHOICE_SIZES if collective != "barrier" else (0,))
        }
        for collective in COLLECTIVES
    }


def _device(reasons: list[str | None]) -> str:
    """Return a description of rank 0's GPU, or why the first rank without a GPU has none."""
    from ..device.find import find_device

    without = [(rank, reason) for rank, reason in enumerate(reasons) if reason is not None]
    if not without:
        return find_device().describe() + (" (rank 0)" if len(reasons) > 1 else "")
    rank, reason = without[0]
    return f"none on rank {rank}: {reason}"


def _tabulate(candidates: list[GpuCandidate], console: Console) -> Table:
    """Return a table of the executors of GPU arrays: whether each is taken, and why.

    It is grouped by classes of operations, such as reductions, which go to the same executor.
    """
    from ..gpu.executors import CLASSES

    made = make_table(console, *map(Column.names, ("operations", "executor", "taken")), "why")
    for operations, names in CLASSES.items():
        first = f"{operations}: {', '.join(names)}"
        for c in (c for c in candidates if c.operations == operations):
            made.add_row(first, c.name, "yes" if c.taken else "", c.why)
            first = ""
    return made
