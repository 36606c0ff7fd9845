"""``mpidist bench ddp | pipeline`` and ``--device``: training and GPU paths."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import json
from pathlib import Path
from typing import Any

import click
from click.core import ParameterSource

from ..bench.results import knobs, versions
from ..errors import InvalidArgument, Unsupported
from ..measure import format_size
from .console import make_console, make_table, show
from .options import check_only, check_writable

DDP = "ddp"
DDP_OPTIONS = ("iterations", "json_file", "parameters", "overlap")
DDP_ALLOWED = "--iterations, --json, --parameters and --overlap"
DDP_ITERATIONS = 20
MISSING = "PyTorch is not installed: pip install 'mpidist\\[torch]' measures it as well"


def print_training(iterations: int, json_file: str | None, parameters: str, overlap: bool) -> int:
    """Measure and print."""
    import mpidist

    from ..bench.results import make_header

    check_options(overlap)
    sizes = millions(parameters)
    if not given("iterations"):
        iterations = DDP_ITERATIONS
    if iterations < 1:
        raise InvalidArgument(f"--iterations {iterations}: allowed are numbers >= 1")
    check_writable("--json", json_file)
    comm = mpidist.init()
    have = comm.broadcast_object(importlib.util.find_spec("torch") is not None)
    if overlap:
        rows, notes = measure_overlap(comm, iterations, have)
    else:
        rows, notes = measure_steps(comm, iterations, have, sizes)
    library = {"torch": importlib.metadata.version("torch")} if have else {}
    header = make_header(comm, {**versions(), **library}, knobs())
    if comm.rank == 0:
        (print_overlap if overlap else print_rows)(rows)
        for note in notes if have else [MISSING, *notes]:
            make_console().print(note)
        if json_file:
            content = {"header": header, "rows": [row.as_json() for row in rows], "notes": notes}
            Path(json_file).write_text(json.dumps(content, indent=1), encoding="utf-8")
    return 0


def measure_steps(
    comm: Any, iterations: int, have: bool, sizes: list[float]
) -> tuple[list[Any], list[str]]:
    """Measure steps by several means, and the communication of small gradients."""
    from ..bench.training import communication

    rows, notes = [], []
    if have:
        from ..bench.training_torch import training, width_for

        for size in sizes:
            more, stats = training(comm, iterations, width_for(size))
            rows += more
            notes.append(f"{more[0].work}: {describe(stats)}")
    if comm.size > 1:
        rows += communication(comm, iterations)
    return rows, notes


def measure_overlap(comm: Any, iterations: int, have: bool) -> tuple[list[Any], list[str]]:
    """Measure steps with and without overlap."""
    from ..bench.training import overlaps, waiting

    if comm.size == 1:
        raise InvalidArgument("bench ddp --overlap: allowed on 2 ranks and more: mpidist run -n 2")
    rows = overlaps(comm, iterations, "backward that waits on a timer", waiting)
    if have:
        from ..bench.training_torch import busy, threads

        with threads(comm):
            rows += overlaps(comm, iterations, "backward that computes", busy)
    autos = [row.share for row in rows if row.name.startswith("auto")]
    return rows, [f"auto: at most {max(autos):.2f} of the time without overlap"]


def given(name: str) -> bool:
    """Tell whether an option stands in the command."""
    source = click.get_current_context().get_parameter_source(name)
    return source == ParameterSource.COMMANDLINE


def millions(text: str) -> list[float]:
    """Read numbers of parameters.

    Raises
    ------
    InvalidArgument
        If one is none, or not positive.
    """
    try:
        sizes = [float(part) for part in text.split(",")]
    except ValueError:
        sizes = []
    if not sizes or not all(0 < size < 1e6 for size in sizes):
        raise InvalidArgument(f"--parameters {text}: allowed are millions, for example 4,17,50")
    return sizes


def check_options(overlap: bool) -> None:
    """Raise InvalidArgument where an option is given that would have no effect."""
    check_only(DDP, DDP_OPTIONS, DDP_ALLOWED)
    if overlap and given("parameters"):
        raise InvalidArgument("--overlap together with --parameters: its networks are fixed")


def check_not_for_collectives() -> None:
    """Raise InvalidArgument where an option of this benchmark is given to another one."""
    wrong = [f"--{name}" for name in ("parameters", "overlap") if given(name)]
    if wrong:
        raise InvalidArgument(f"{', '.join(wrong)}: allowed with bench {DDP} only")


def describe(stats: Any) -> str:
    """Say which way of overlapping was taken, after what trials, and where the time went."""
    parts = ("compute", "exposed", "hidden")
    times = ", ".join(f"{part} {1e3 * getattr(stats, part):.2f} ms" for part in parts)
    trials = ", ".join(f"{name} {1e3 * seconds:.2f} ms" for name, seconds in stats.trials.items())
    tried = f" after steps of {trials}" if trials else ""
    return f"overlap {stats.overlap!r}{tried}; {times}"


def print_rows(rows: list[Any]) -> None:
    """Print the table of steps."""
    console = make_console()
    table = make_table(console, "what", "by", ">ms", ">time of ours / this")
    for row in rows:
        table.add_row(row.work, row.name, f"{1e3 * row.seconds:.3f}", f"{row.ratio:.2f}")
    show(console, table)


def print_overlap(rows: list[Any]) -> None:
    """Print the table of ways to overlap."""
    console = make_console()
    table = make_table(console, "step", "overlap", ">ms", ">least ms", ">time / none", ">hidden %")
    for row in rows:
        hidden = "" if row.hidden is None else f"{100 * row.hidden:.0f}"
        times = [f"{1e3 * seconds:.2f}" for seconds in (row.seconds, row.least)]
        table.add_row(row.work, row.name, *times, f"{row.share:.2f}", hidden)
    show(console, table)


PIPELINE = "pipeline"
PIPELINE_OPTIONS = ("iterations", "json_file")
PIPELINE_ITERATIONS = 40


def print_pipelines(iterations: int, json_file: str | None) -> int:
    """Measure and print."""
    import mpidist

    from ..bench.pipelines import engine_cost
    from ..bench.results import make_header

    iterations = checked(iterations, json_file)
    comm = mpidist.init()
    if comm.size < 2:
        raise InvalidArgument(
            "bench pipeline on 1 rank: allowed are 2 and more, as mpidist run -n 2 starts"
        )
    costs = engine_cost(comm, iterations)
    have, rows = beside(comm, iterations)
    library = {"torch": importlib.metadata.version("torch")} if have else {}
    header = make_header(comm, {**versions(), **library}, knobs())
    if comm.rank == 0:
        print_costs(costs, comm.size)
        if rows:
            print_rows(rows)
            print_shares(rows)
        if not have:
            make_console().print(MISSING)
        if json_file:
            write(json_file, header, costs, rows)
    return 0


def checked(iterations: int, json_file: str | None) -> int:
    """Check the options; give the number of iterations."""
    check_only(PIPELINE, PIPELINE_OPTIONS, "--iterations and --json")
    if not given("iterations"):
        iterations = PIPELINE_ITERATIONS
    if iterations < 1:
        raise InvalidArgument(f"--iterations {iterations}: allowed are numbers >= 1")
    check_writable("--json", json_file)
    return iterations


def beside(comm: Any, iterations: int) -> tuple[bool, list[Any]]:
    """Time steps beside PyTorch's own, where rank 0 has it, and those of replicas on 4 ranks."""
    where = "torch.distributed.pipelining"
    have = importlib.util.find_spec("torch") is not None
    have = comm.broadcast_object(have and importlib.util.find_spec(where) is not None)
    rows: list[Any] = []
    if have:
        from ..bench.pipelines_torch import steps

        rows += steps(comm, iterations)
    if comm.size == 4:
        from ..bench.pipelines import replicas

        rows += replicas(comm, iterations)
    return have, rows


def write(json_file: str, header: dict[str, Any], costs: list[Any], rows: list[Any]) -> None:
    """Write what was measured as JSON."""
    content = {
        "header": header,
        "engine": [cost.as_json() for cost in costs],
        "rows": [row.as_json() for row in rows],
    }
    Path(json_file).write_text(json.dumps(content, indent=1), encoding="utf-8")


def print_costs(costs: list[Any], ranks: int) -> None:
    """Print what the engine takes, and, where there is one, the goal beside it."""
    from ..bench.pipelines import ENGINE_GOAL

    console = make_console()
    heads = ["identity stages", ">microbatches", ">µs a microbatch and stage"]
    table = make_table(console, *heads, *([">goal"] if ranks == 2 else []))
    for cost in costs:
        mark = "" if cost.seconds <= ENGINE_GOAL else "missed: "
        goal = [f"{mark}≤ {1e6 * ENGINE_GOAL:.0f}"] if ranks == 2 else []
        table.add_row(cost.schedule, str(cost.microbatches), f"{1e6 * cost.seconds:.1f}", *goal)
    show(console, table)


def print_shares(rows: list[Any]) -> None:
    """Print in how many of the races against PyTorch's own pipelining the goal was reached."""
    from ..bench.pipelines import SHARE_GOAL, THEIRS

    shares = [row.ratio for row in rows if row.name == THEIRS]
    if shares:
        reached = sum(share <= SHARE_GOAL for share in shares)
        make_console().print(
            f"goal ≤ {SHARE_GOAL:g} of {THEIRS}: reached at {reached} of {len(shares)} sizes, "
            f"worst {max(shares):.2f}"
        )


DEVICE_OPTIONS = ("device", "sizes", "dtype", "iterations", "json_file")
DEVICE_ALLOWED = "--bytes, --dtype, --iterations and --json"


def print_on_device(
    collectives: tuple[str, ...], sizes: Any, dtype: str, iterations: int, json_file: str | None
) -> int:
    """Measure and print."""
    import mpidist

    from ..bench.cases import number_dtype
    from ..bench.gpu import COLLECTIVES, measure_copies, measure_paths
    from ..bench.results import make_header
    from ..device.find import find_device

    check_only(None, DEVICE_OPTIONS, DEVICE_ALLOWED)
    wrong = [name for name in collectives if name not in COLLECTIVES]
    if wrong:
        raise InvalidArgument(
            f"--device cuda: {', '.join(wrong)}: allowed are {', '.join(COLLECTIVES)}"
        )
    if iterations < 1:
        raise InvalidArgument(f"--iterations {iterations}: allowed are numbers >= 1")
    check_writable("--json", json_file)
    known = number_dtype(dtype)
    comm = mpidist.init()
    try:
        comm.use_gpu()
    except Unsupported as error:
        raise Unsupported(f"--device cuda needs cupy, and a GPU for each rank: {error}") from None
    device = find_device()
    copies = measure_copies(comm, max(*sizes, 1 << 20))
    names = collectives or COLLECTIVES
    rows = measure_paths(comm, names, tuple(sizes), known, iterations, copies)
    gpus = comm.allgather_object(f"{device.describe()} {device.identity()}")
    if comm.rank == 0:
        print_paths(rows, copies, gpus)
        if json_file:
            header = {**make_header(comm, versions(), knobs()), "gpus": gpus}
            content = {
                "header": header,
                "copies": vars(copies),
                "rows": [r.as_json() for r in rows],
            }
            Path(json_file).write_text(json.dumps(content, indent=1), encoding="utf-8")
    return 0 if all(row.correct for row in rows) else 1


def print_paths(rows: list[Any], copies: Any, gpus: list[str]) -> None:
    """Print one table, and what it is compared with."""
    console = make_console()
    for rank, gpu in enumerate(gpus):
        console.print(f"rank {rank}: {gpu}", markup=False)
    table = make_table(
        console, "collective", ">bytes", "path", ">µs", ">busbw GB/s", ">of copies", "why not"
    )
    for row in rows:
        time = "" if row.time_us is None else f"{row.time_us:.1f}"
        bus = "" if row.busbw_gbs is None else f"{row.busbw_gbs:.2f}"
        share = "" if row.of_copies is None else f"{100 * row.of_copies:.0f} %"
        note = row.why_not or ("" if row.correct else "WRONG RESULT")
        table.add_row(row.collective, format_size(row.bytes), row.path, time, bus, share, note)
    show(console, table)
    console.print(
        f"copies of all ranks at once: {copies.on_device / 1e9:.1f} GB/s read and written on GPUs, "
        f"{copies.to_host / 1e9:.1f} to the host, {copies.from_host / 1e9:.1f} from it; of copies: "
        "what these alone would take, over the time"
    )


def device_option(command: Any) -> Any:
    """Add ``--device`` to a command."""
    return click.option(
        "--device",
        type=click.Choice(["cuda"]),
        help="Measure arrays on GPUs: each path there is, and what copies alone would take.",
    )(command)
