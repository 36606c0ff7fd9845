"""``mpidist bench gpu``: each path of arrays on a GPU, and the copies that it needs."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import click

from ...measure import format_size
from ..console import examples, make_console, make_table, show
from ..options import POSITIVE, CollectiveName
from .collectives import dtype_option, json_option, sizes_option

if TYPE_CHECKING:
    from ...bench.gpu import Copies, DeviceRow


@click.command(
    "gpu",
    short_help="Each path of arrays on a GPU, beside bare copies.",
    epilog=examples(
        "mpidist run -n 2 -- mpidist bench gpu allreduce --bytes 64K-64M --json gpu.json"
    ),
)
@click.argument("collectives", nargs=-1, type=CollectiveName(), metavar="[COLLECTIVE]...")
@sizes_option
@dtype_option
@click.option(
    "--iterations",
    type=POSITIVE,
    metavar="N",
    default=200,
    show_default=True,
    help="Timed iterations.",
)
@json_option
def gpu_command(
    collectives: tuple[str, ...],
    sizes: list[int],
    dtype: Any,
    iterations: int,
    json_file: str | None,
) -> int:
    """Measure collectives of arrays on a GPU by each available path, and the copies alone.

    COLLECTIVE is allreduce, reduce_scatter, allgather or broadcast; by default all four.  The
    exit code is 1 if any result was wrong.
    """
    import mpidist

    from ...bench.gpu import measure_gpu
    from ...bench.results import write_json

    comm = mpidist.init()
    found = measure_gpu(comm, collectives, sizes, dtype, iterations)
    if comm.rank == 0:
        _print(found.rows, found.copies, found.header["gpus"])
        if json_file:
            write_json(json_file, found.as_json())
    return 0 if all(row.correct for row in found.rows) else 1


def _print(rows: list[DeviceRow], copies: Copies, gpus: list[str]) -> None:
    """Print one table, and the bandwidths of the copies that it is compared with."""
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
        "the time of the bare copies divided by the time measured"
    )
