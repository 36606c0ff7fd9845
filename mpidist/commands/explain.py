"""``mpidist explain``: the choice of "auto", and its reason."""

from __future__ import annotations

import json
from dataclasses import asdict, replace
from typing import TYPE_CHECKING

import click
from click.core import ParameterSource

from ..measure import counted, format_size, significant
from ..schedule.contract import COLLECTIVES
from ..tables import Column
from .console import examples, make_console, make_table, progress_bar, show
from .export.library import MODEL
from .options import MANY, byte_count, check_only, collective_name, load_option, only

if TYPE_CHECKING:
    from collections.abc import Mapping

    from ..schedule.model import Messages
    from ..selection.calibration import Calibration
    from ..selection.choose import Candidate

_SIZE = 1 << 20  # bytes, by default
_SECONDS = 1.0  # of measurements for the table
HERE = "a call in this job, without --ranks"
ELSEWHERE = "a job that is not here, with --ranks"


@click.command(
    "explain",
    short_help='Print the choice of "auto" for a COLLECTIVE, and why.',
    epilog=examples(
        "mpidist explain allreduce 64M",
        "mpidist run -n 4 -- mpidist explain allgather --bytes 8K",
        "mpidist run -n 4 -- mpidist explain allreduce --memory symmetric --tuning tuning.json",
        "mpidist explain allreduce 16M --ranks 1M --nodes 128K",
    ),
)
@click.argument("collective", type=collective_name())
@click.argument("size", required=False, type=byte_count())
@click.option("--bytes", "nbytes", type=byte_count(), help="The SIZE, as an option.")
@only(
    HERE,
    click.option(
        "--op", default="sum", metavar="NAME", show_default=True, help="Operation of reductions."
    ),
    click.option(
        "--memory",
        type=click.Choice(["private", "symmetric"]),
        default="private",
        show_default=True,
        help="Memory of the arrays; comm.empty() returns symmetric ones.",
    ),
    click.option("--device", type=click.Choice(["cuda"]), help="Arrays on a GPU, not on the host."),
    click.option(
        "--tuning", type=click.Path(), metavar="FILE", help="File of `mpidist tune` or `calibrate`."
    ),
)
@click.option(
    "--ranks",
    type=MANY,
    help="Predict the times of all algorithms by messages on so many ranks, which are not here.",
)
@only(
    ELSEWHERE,
    click.option(
        "--nodes",
        type=MANY,
        default="1",
        show_default=True,
        help="Number of nodes, with equally many ranks each.",
    ),
    click.option(
        "--predict",
        "model",
        type=MODEL,
        default="1e-6,1e-10,5e-11",
        show_default=True,
        help="Seconds of a message in a node, of a byte sent, of a byte combined.",
    ),
    click.option(
        "--link",
        type=MODEL,
        default="5e-6,8e-11",
        show_default=True,
        help="Seconds of a message between nodes, and of a byte; a node sends one at a time.",
    ),
)
@click.option("--json", "as_json", is_flag=True, help="Print JSON instead of a table.")
@load_option
@click.pass_context
def explain_command(
    context: click.Context,
    collective: str,
    size: int | None,
    nbytes: int | None,
    op: str,
    memory: str,
    device: str | None,
    tuning: str | None,
    ranks: int | None,
    nodes: int,
    model: Mapping[str, float],
    link: Mapping[str, float],
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
    more ranks than cores there are none: those times are the scheduler's.  Between nodes nothing
    but constants is measured without a file, and native is assumed to take the time of the best
    non-hierarchical algorithm.

    With --ranks it lists all algorithms by messages for a job that is not here, the fastest first,
    by the cost model: of straight lines, with the constants that --predict and --link give.
    """
    if size is not None and nbytes is not None:
        raise click.UsageError("give the size once: as SIZE or as --bytes")
    if COLLECTIVES[collective].idempotent and (size or nbytes):
        raise click.UsageError(f"{size or nbytes} bytes: {collective} has no data")
    nbytes = next(given for given in (size, nbytes, _SIZE) if given is not None)
    if ranks is not None:
        check_only(context, ELSEWHERE)
        _explain_elsewhere(context, collective, nbytes, ranks, nodes, model, link, as_json)
        return
    check_only(context, HERE)
    import mpidist

    from ..communicator.full_calibration import calibrate_fully
    from ..communicator.layers import calibrate, try_out
    from ..communicator.layers import known as measured

    comm = mpidist.init(tuning=tuning)
    chosen, every = comm.explain(collective, nbytes, op, memory, device=device)
    if chosen.untried:
        try_out(comm, collective, nbytes, op)
        chosen, every = comm.explain(collective, nbytes, op, memory)
    if chosen.missing:
        calibrate(comm)
        chosen, every = comm.explain(collective, nbytes, op, memory)
    _, known, _ = measured(comm)
    apart = comm.size == 1 or comm.topology.num_nodes > 1  # over a link it would take long
    if not apart and device is None and not (known and known.kernels):
        # The choice would be another one by it.
        known = calibrate_fully(comm, _SECONDS, nbytes)
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


def _explain_elsewhere(
    context: click.Context,
    collective: str,
    nbytes: int,
    ranks: int,
    nodes: int,
    model: Mapping[str, float],
    link: Mapping[str, float],
    as_json: bool,
) -> None:
    """Print what the algorithms would take on ranks that are not here."""
    from ..communicator.launcher_notes import launched_size
    from ..schedule.cost import Link
    from ..schedule.registry import algorithms
    from ..selection.outlook import outlook

    if launched_size() > 1:
        raise click.UsageError(
            f"--ranks {ranks}: this job has {launched_size()} ranks; a prediction needs none of "
            "them: start it without a launcher"
        )
    if "gamma" in link:
        raise click.UsageError("--link: expected two numbers: combining is a matter of --predict")
    if nodes == 1 and context.get_parameter_source("link") is ParameterSource.COMMANDLINE:
        raise click.UsageError("--link: only with two --nodes or more: nothing is between nodes")
    far = Link(link["alpha"], link["beta"])
    with progress_bar(f"{collective} on {ranks} ranks", len(algorithms(collective))) as advance:
        every = outlook(collective, nbytes, ranks, nodes, link=far, on_step=advance, **model)
    if as_json:
        content = {
            **{"collective": collective, "bytes": nbytes, "ranks": ranks, "nodes": nodes},
            **{"model": dict(model), "link": dict(link) if nodes > 1 else None},
            "candidates": [
                {
                    **{"algorithm": one.algorithm, "can": one.seconds is not None, "why": one.why},
                    **{"expected_s": one.seconds, "rounds": one.rounds},
                    **{"messages": one.messages, "bytes": one.nbytes},
                }
                for one in every
            ],
        }
        click.echo(json.dumps(content, indent=1))
        return
    console = make_console()
    data = "" if collective == "barrier" else f", {format_size(nbytes)} bytes"
    console.print(
        f"{collective}{data}, {counted(ranks, 'rank')} on {counted(nodes, 'node')} that are not "
        "here: messages, and their bytes, of the rank that sends the most"
    )
    table = make_table(
        console,
        Column.names("algorithm"),
        *map(Column.numbers, ("expected µs", "rounds", "messages", "bytes")),
    )
    without: dict[str, list[str]] = {}  # by reason, which in a column would be too narrow to read
    for one in every:
        if one.seconds is None:
            without.setdefault(one.why, []).append(one.algorithm)
            continue
        figures = map(str, (one.rounds, one.messages, one.nbytes))
        table.add_row(one.algorithm, significant(one.seconds * 1e6, 4), *figures)
    show(console, table)
    for why, names in without.items():
        console.print(f"not {', '.join(names)}: {why}", style="dim", markup=False)
    between = f"; between nodes {_model(link)}, one at a time" if nodes > 1 else ""
    console.print(f"expected µs: by the cost model: {_model(model)}{between}; not measured here")


def _model(constants: Mapping[str, float]) -> str:
    combined = constants.get("gamma")
    more = "" if combined is None else f", combining at {_rate(combined)}"
    return f"{constants['alpha'] * 1e6:.3g} µs a message, {_rate(constants['beta'])}{more}"


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
        link, long = known.far.one_way, 1 << 20
        rate = _rate((link.at(long) - link.at(0)) / long)
        more = f", between nodes {link.at(0) * 1e6:.3g} µs, {rate}"
    if known.mapped is not None:
        near, long = known.mapped, 1 << 20
        more += (
            f"; shared memory: {near.meeting * 1e6:.3g} µs for each rank in a meeting, "
            f"reads {_rate(near.read.at(long) / long)}, stores {_rate(near.store.at(long) / long)}"
        )
        if near.beyond is not None:
            more += f", beyond the caches {_rate(near.beyond.read.at(long) / long)}"
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
