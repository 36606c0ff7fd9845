"""``mpidist explain``: the choice of "auto", and its reason."""

from __future__ import annotations

import json
from dataclasses import asdict, replace
from typing import TYPE_CHECKING

import click

from ..measure import counted, format_size, significant
from ..tables import Column
from .console import examples, make_console, make_table, show
from .options import byte_count, collective_name, load_option

if TYPE_CHECKING:
    from ..schedule.model import Messages
    from ..selection.calibration import Calibration
    from ..selection.choose import Candidate

_SIZE = 1 << 20  # bytes, by default
_SECONDS = 1.0  # of measurements for the table


@click.command(
    "explain",
    short_help='Print the choice of "auto" for a COLLECTIVE, and why.',
    epilog=examples(
        "mpidist explain allreduce 64M",
        "mpidist run -n 4 -- mpidist explain allgather --bytes 8K",
        "mpidist run -n 4 -- mpidist explain allreduce --memory symmetric --tuning tuning.json",
    ),
)
@click.argument("collective", type=collective_name())
@click.argument("size", required=False, type=byte_count())
@click.option("--bytes", "nbytes", type=byte_count(), help="The SIZE, as an option.")
@click.option(
    "--op", default="sum", metavar="NAME", show_default=True, help="Operation of reductions."
)
@click.option(
    "--memory",
    type=click.Choice(["private", "symmetric"]),
    default="private",
    show_default=True,
    help="Memory of the arrays; comm.empty() returns symmetric ones.",
)
@click.option("--device", type=click.Choice(["cuda"]), help="Arrays on a GPU, not on the host.")
@click.option(
    "--tuning", type=click.Path(), metavar="FILE", help="File of `mpidist tune` or `calibrate`."
)
@click.option("--json", "as_json", is_flag=True, help="Print JSON instead of a table.")
@load_option
def explain_command(
    collective: str,
    size: int | None,
    nbytes: int | None,
    op: str,
    memory: str,
    device: str | None,
    tuning: str | None,
    as_json: bool,
) -> None:
    """Print the choice of "auto" for a COLLECTIVE, and the reason.

    SIZE is that of the whole buffer in bytes, such as 8, 64K or 64M; by default 1M.

    The table lists every executor, every algorithm by messages, and the schedules that can run in
    shared memory, with the expected time, or the reason why it cannot serve the call.  With
    --device, these are the executors of arrays on a GPU.

    Expected times are those of the tuning table if it has an entry for the call, otherwise those of
    what a first call tries out, else those of the file's calibration; without one, calls and
    messages are measured for the times, not for the choice.  They are shown with their noise.  With
    more ranks than cores there are none: those times are the scheduler's.  Between nodes native is
    assumed to take the time of the best non-hierarchical algorithm.
    """
    import mpidist

    from ..communicator.full_calibration import calibrate_fully
    from ..communicator.layers import calibrate, try_out
    from ..communicator.layers import known as measured

    if size is not None and nbytes is not None:
        raise click.UsageError("give the size once: as SIZE or as --bytes")
    nbytes = next(given for given in (size, nbytes, _SIZE) if given is not None)
    comm = mpidist.init(tuning=tuning)
    chosen, every = comm.explain(collective, nbytes, op, memory, device=device)
    if chosen.untried:
        try_out(comm, collective, nbytes, op)
        chosen, every = comm.explain(collective, nbytes, op, memory)
    if chosen.missing:
        calibrate(comm)
        chosen, every = comm.explain(collective, nbytes, op, memory)
    _, known, _ = measured(comm)
    if comm.size > 1 and device is None and not (known and known.kernels):
        known = calibrate_fully(comm, _SECONDS)  # the choice would be another one by it
        every = comm.explain(collective, nbytes, op, memory)[1]
        times = {one.name: (one.seconds, one.basis) for one in every}
        time, basis = times.get(chosen.name, (chosen.seconds, chosen.basis))
        chosen = replace(chosen, seconds=time, basis=basis)
    if chosen.name not in [candidate.name for candidate in every]:
        every = [replace(chosen, why="the choice, by its full name"), *every]
    if as_json:
        content = {
            **{"collective": collective, "bytes": nbytes, "op": op, "memory": memory},
            "device": device,
            **{"ranks": comm.size, "nodes": comm.topology.num_nodes},
            **{"choice": chosen.name, "why": chosen.why},
            "calibration": known and asdict(known),
            "candidates": [
                {
                    **dict(zip(("executor", "algorithm"), _served_by(candidate))),
                    **{"can": candidate.can, "why": candidate.why},
                    **{"expected_s": candidate.seconds, "basis": candidate.basis},
                }
                for candidate in every
            ],
        }
        click.echo(json.dumps(content, indent=1))
        return
    from ..selection.estimates import MODEL

    console = make_console()
    kind = f"{memory} memory of GPUs" if device else f"{memory} memory"
    data = f", {format_size(nbytes)} bytes of float32 in {kind}"
    where = f"{counted(comm.size, 'rank')} on {counted(comm.topology.num_nodes, 'node')}"
    console.print(
        f"{collective}{data if collective != 'barrier' else ''}, {where}: "
        f"[bold]{chosen.name}[/]{_time(chosen)}\n"
        f"{chosen.why}"
    )
    table = make_table(
        console,
        *map(Column.names, ("executor", "algorithm")),
        "can",
        Column.numbers("expected µs"),
        "why",
    )
    for candidate in every:
        taken = candidate.name == chosen.name
        style = "bold" if taken else "" if candidate.can else "dim"
        seconds = "" if candidate.seconds is None else significant(candidate.seconds * 1e6, 4)
        can = "taken" if taken else "yes" if candidate.can else "no"
        table.add_row(*_served_by(candidate), can, seconds, candidate.why, style=style)
    show(console, table)
    if comm.size == 1 and device is None:
        console.print(f"expected µs: none for 1 rank; for 4: {_example(collective, nbytes)}")
    for basis in dict.fromkeys(candidate.basis for candidate in every if candidate.basis):
        console.print(f"expected µs: {basis}{_constants(known) if basis == MODEL else ''}")


def _example(collective: str, nbytes: int) -> str:
    return f"mpidist run -n 4 -- mpidist explain {collective} {format_size(nbytes)}"


def _served_by(candidate: Candidate) -> tuple[str, str]:
    """Return the names of the executor and, where it runs one, of the algorithm."""
    return candidate.executor, "" if candidate.choice is None else candidate.name


def _time(candidate: Candidate) -> str:
    return (
        ""
        if candidate.seconds is None
        else f", expected {significant(candidate.seconds * 1e6, 4)} µs"
    )


def _constants(known: Calibration | None) -> str:
    if known is None:
        return ""
    more = ""
    if known.far is not None:
        more = f", between nodes {known.far.alpha * 1e6:.3g} µs, {_rate(known.far.beta)}"
    if known.mapped is not None:
        near = known.mapped
        more += (
            f"; shared memory: {near.meeting * 1e6:.3g} µs for each rank in a meeting, "
            f"reads {_rate(near.read)}, stores {_rate(near.store)}, "
            f"beyond the caches {_rate(near.beyond)}"
        )
    if known.ranks_per_node:
        return f" ± {100 * known.noise:.0f} %: {_curves(known.messages)}{more}"
    line, combine = known.messages.one_way, known.messages.combine
    return (
        f": α {line.at(0) * 1e6:.3g} µs, β {line.slope * 1e9:.3g} ns/byte, "
        f"γ {combine.slope * 1e9:.3g} ns/byte{more}; native is not modelled"
    )


def _curves(known: Messages) -> str:
    """Return what is most telling of the curves: two points of the first, and a call's overhead."""
    short, long = known.both_ways.at(8), known.both_ways.at(1 << 20)
    return (
        f"{known.call * 1e6:.3g} µs for a call, {short * 1e6:.3g} µs for a round of 8 bytes and "
        f"{long * 1e6:.3g} µs of 1M that every rank sends and receives"
    )


def _rate(beta: float) -> str:
    return f"{1e-9 / beta if beta else float('inf'):.3g} GB/s"
