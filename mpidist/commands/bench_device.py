"""``mpidist bench --device cuda``: the paths of arrays on a GPU beside each other."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import click

from ..errors import InvalidArgument, Unsupported
from ..measure import format_size
from .bench_checks import check_only
from .common import make_console, make_table, show
from .info import knobs, versions
from .options import check_writable

OPTIONS = ("device", "sizes", "dtype", "iterations", "json_file")
ALLOWED = "--bytes, --dtype, --iterations and --json"


def print_on_device(
    collectives: tuple[str, ...], sizes: Any, dtype: str, iterations: int, json_file: str | None
) -> int:
    """Measure and print."""
    import mpidist

    from ..bench.data import find_dtype
    from ..bench.device_case import measure_copies
    from ..bench.on_device import COLLECTIVES, measure_paths
    from ..bench.records import make_header
    from ..device.find import find_device

    check_only(None, OPTIONS, ALLOWED)
    wrong = [name for name in collectives if name not in COLLECTIVES]
    if wrong:
        raise InvalidArgument(
            f"--device cuda: {', '.join(wrong)}: allowed are {', '.join(COLLECTIVES)}"
        )
    if iterations < 1:
        raise InvalidArgument(f"--iterations {iterations}: allowed are numbers >= 1")
    check_writable("--json", json_file)
    known = find_dtype(dtype)
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
        print_rows(rows, copies, gpus)
        if json_file:
            header = {**make_header(comm, versions(), knobs()), "gpus": gpus}
            content = {
                "header": header,
                "copies": vars(copies),
                "rows": [r.as_json() for r in rows],
            }
            Path(json_file).write_text(json.dumps(content, indent=1), encoding="utf-8")
    return 0 if all(row.correct for row in rows) else 1


def print_rows(rows: list[Any], copies: Any, gpus: list[str]) -> None:
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
