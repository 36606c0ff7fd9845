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


SIZES = (8, 64 << 10, 1 << 20, 64 << 20)


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
    library = describe_library()
    together = len(cores_here(comm))
    hosts = Counter(comm.allgather_object(socket.gethostname()))
    here = [len(group) for group in comm.topology.groups]
    lines = {
        "MPI": f"{library['vendor']} {library['version']}, standard {library['standard']}",
        "library": library["library"],
        "thread level": library["thread_level"],
        "ranks": f"{comm.size} on {counted(len(here), 'node')}: " + " + ".join(map(str, here)),
        "hosts": ", ".join(f"{host} ({count})" for host, count in hosts.items()),
        **_surroundings(list(hosts)),
        "cores": f"{together} for {counted(here[0], 'rank')}, {cores()} for rank 0"
        + (", oversubscribed" if here[0] > together else ""),
        "GPU": "; ".join(list_gpus()) or "none found",
        "compiled": compiled.described(),
        "versions": ", ".join(f"{name} {version}" for name, version in versions().items()),
        "deadline": "none" if comm.timeout is None else f"{comm.timeout:g} s",
        "environment": " ".join(f"{k}={v}" for k, v in knobs().items()) or "nothing set",
    }
    measured = _measure_links(comm) if links else []
    choices = _choices(comm)
    reasons = comm.allgather_object(why_no_device())
    native = comm.backend.native is not None
    candidates = table(comm.allgather_object(this_rank(native)), native, comm.topology.num_nodes)
    machine.look()
    if as_json:
        content = {
            "versions": versions(),
            "mpi": library,
            "ranks": comm.size,
            "ranks_per_node": here,
            "hosts": dict(hosts),
            **_surroundings_as_json(list(hosts)),
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
        click.echo(json.dumps(content, indent=1))
        return
    console = make_console()
    facts = make_table(console, "", "")
    facts.show_header = False
    if state := machine.described():
        lines["line"] = state
    for name, value in lines.items():
        facts.add_row(name, value)
    show(console, facts)
    if links:
        _show_links(measured, console)
    console.print('\nchoices of "auto", by bytes of the whole buffer (float32, sum):')
    chosen = make_table(console, "collective", *map(format_size, SIZES))
    for collective, names in choices.items():
        chosen.add_row(collective, *names.values())
    show(console, chosen)
    console.print(f"\narrays on a GPU: {_device(reasons)}", markup=False)
    if None in reasons:
        show(console, _tabulate(candidates, console))


def _surroundings(hosts: list[str]) -> dict[str, str]:
    """Return texts by name: "SLURM", the allocation; "network", from rank 0 to another host.

    The first is missing outside of SLURM, the second if all ranks are on one host.
    """
    from ..launcher.allocation import SlurmAllocation
    from ..launcher.connections import addresses
    from .network import adapters, describe, interface_to

    found = {}
    allocation = SlurmAllocation.find()
    if allocation is not None:
        found["SLURM"] = (
            f"job {allocation.job}, partition {allocation.partition or 'unknown'}, "
            f"{counted(allocation.nodes, 'node')} {allocation.node_list}, cores "
            + " + ".join(map(str, allocation.cpus))
        )
    if len(hosts) > 1:
        interface = interface_to(hosts[1])
        route = f"{describe(interface)} to {hosts[1]}"
        found["network"] = route if interface else ", ".join(addresses())
        found["network"] += "".join(f"; {adapter}" for adapter in adapters())
    return found


def _surroundings_as_json(hosts: list[str]) -> dict[str, Any]:
    """Return the SLURM allocation ("slurm") and rank 0's network ("network"), or None for each."""
    from ..launcher.allocation import SlurmAllocation
    from ..launcher.connections import addresses
    from .network import adapters, interface_to

    network: dict[str, Any] | None = None
    if len(hosts) > 1:
        network = {"to": hosts[1], "interface": interface_to(hosts[1]) or None}
        network |= {"addresses": addresses(), "adapters": adapters()}
    allocation = SlurmAllocation.find()
    return {"slurm": allocation and asdict(allocation), "network": network}


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
            for nbytes in (SIZES if collective != "barrier" else (0,))
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
