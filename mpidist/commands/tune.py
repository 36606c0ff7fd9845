"""``mpidist tune``: measure which way is the fastest, write it down, and check it."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from time import perf_counter
from typing import Any

import click

from ..bench.results import knobs, versions
from ..errors import ConfigError, InvalidArgument
from ..measure import format_size, round_size
from .console import examples, make_console, make_table, measuring, show
from .options import Seconds, Sizes, check_collectives, check_writable, load_option

DEFAULT_SIZES = "8-64M"


@click.command(
    "tune",
    short_help='Measure which way is the fastest, for "auto" to take it.',
    epilog=examples(
        "mpidist run -n 4 -- mpidist tune -o tuning.json",
        "mpidist run -n 4 -- mpidist tune allreduce --budget 20s --bytes 8-1M -o tuning.json",
        "mpidist run -n 4 -- mpidist tune --verify tuning.json --budget 120s",
        "MPIDIST_TUNING=tuning.json mpidist run -n 4 train.py",
    ),
)
@click.argument("collectives", nargs=-1, metavar="[COLLECTIVE]...")
@click.option(
    "-o", "--output", metavar="FILE", help="Write the table; entries for others are kept."
)
@click.option("--verify", "table", metavar="FILE", help="Measure the regret of this table instead.")
@click.option(
    "--budget", type=Seconds(), default="60s", show_default=True, help="Time for everything."
)
@click.option(
    "--bytes",
    "sizes",
    type=Sizes(),
    default=DEFAULT_SIZES,
    show_default=True,
    help="Sizes of the whole buffer; --verify takes those between them as well.",
)
@click.option("--dtype", default="float32", show_default=True, help="Of the elements.")
@click.option("--json", "json_file", metavar="FILE", help="With --verify: write the figures.")
@load_option
def tune_command(
    collectives: tuple[str, ...],
    output: str | None,
    table: str | None,
    budget: float,
    sizes: list[int],
    dtype: str,
    json_file: str | None,
    imports: Any,
) -> int:
    """Find out which way is the fastest for COLLECTIVEs (all), on this machine and these ranks.

    Every way that can serve starts, in private and in symmetric memory; the slower half drops out,
    the others get more iterations, until the time is up.  Data are other in every iteration.  What
    was measured is written at once: Ctrl-C loses nothing.  --verify measures everything anew and
    prints by how much "auto" with the table misses the best.
    """
    import mpidist

    from ..bench.cases import number_dtype
    from ..bench.tuner import Wish

    if (output is None) == (table is None):
        raise InvalidArgument("one of -o FILE and --verify FILE must be given")
    if json_file is not None and table is None:
        raise InvalidArgument("--json goes with --verify; -o writes the table, which is JSON")
    check_writable("-o", output)
    check_writable("--json", json_file)
    wish = Wish(check_collectives(collectives), sorted(set(sizes)), number_dtype(dtype), budget)
    comm = mpidist.init(tuning=table)
    if output is not None:
        return _tune(comm, wish, output)
    return _verify(comm, wish, str(table), json_file)


def _tune(comm: Any, wish: Any, output: str) -> int:
    from ..bench.tuner import Stop, count_cells, tune

    old = _table_there(comm, output)

    def write(table: Any) -> None:
        if comm.rank == 0:
            (old.merged(table) if old is not None else table).save(output)

    about = _about(comm)
    stop = Stop()
    with stop.listening(), measuring(count_cells(comm, wish)) as step:
        begun = perf_counter()
        found = tune(comm, wish, about, step, write, stop)
        seconds = perf_counter() - begun
    console = make_console()
    lines = make_table(console, "=collective", "=memory", "way from so many bytes on")
    for key, entry in found.table.entries.items():
        ways = ", ".join(f"{round_size(first)} {way}" for first, way in entry.choose)
        lines.add_row(key.collective, key.memory, ways)
    show(console, lines)
    kept = f", beside {len(old.entries)} entries that were there" if old is not None else ""
    _tell_missing(
        console, found.left_out, stop.wanted, "the choice of the nearest size holds there"
    )
    if not found.table.entries:
        console.print(f"nothing was measured: {output} was not written")
        return _tell_wrong(console, found.wrong) or 1
    console.print(f"{found.measured} sizes measured in {seconds:.0f} s, written to {output}{kept}")
    return _tell_wrong(console, found.wrong)


def _table_there(comm: Any, output: str) -> Any:
    """Give what `output` holds already, which rank 0 reads; None where there is no such file."""
    from ..selection.tuning import TuningTable

    there, wrong = None, ""
    if comm.rank == 0 and Path(output).exists():
        try:
            there = TuningTable.load(output)
        except ConfigError as error:
            wrong = f"-o {error}: give another name, or remove that file"
    there, wrong = comm.broadcast_object((there, wrong))
    if wrong:
        raise ConfigError(wrong)
    return there


def _verify(comm: Any, wish: Any, table: str, json_file: str | None) -> int:
    from ..bench.regret import between, summarise, verify
    from ..bench.tuner import Stop, count_cells

    wish = dataclasses.replace(wish, sizes=between(wish.sizes))
    stop = Stop()
    with stop.listening(), measuring(count_cells(comm, wish)) as step:
        begun = perf_counter()
        found = verify(comm, wish, step, stop)
        seconds = perf_counter() - begun
    summary, about = summarise(found.regrets), _about(comm)
    console = make_console()
    console.print(
        f"{table}: {comm.size} ranks, {wish.dtype}, {len(found.regrets)} sizes in {seconds:.0f} s; "
        "regret in % of the best one's time"
    )
    names = ("sizes", "mean", "95th", "raw\nmean", "noise\nfloor", "its\n95th", "auto /\npick")
    lines = make_table(console, "=collective", "=memory", *(f">{name}" for name in names))
    for line in summary:
        figures = (line.mean, line.p95, line.raw_mean, line.floor_mean, line.floor_p95)
        percents = [f"{100 * figure:.1f}" for figure in figures]
        auto = "" if line.auto is None else f"{line.auto:.2f}"
        lines.add_row(line.collective, line.memory, str(line.cells), *percents, auto)
    show(console, lines)
    worst = sorted(found.regrets, key=lambda r: -r.regret)[:5]
    for one in (r for r in worst if r.regret > 0):
        console.print(
            f"most lost: {one.collective} {one.memory} {format_size(one.bytes)}: {one.pick} "
            f"{100 * one.regret:.1f} % behind, {one.best} is the best"
        )
    _tell_missing(console, found.left_out, stop.wanted, "they are not in these figures")
    if json_file is not None and comm.rank == 0:
        content = {
            "header": about,
            "summary": [dataclasses.asdict(line) for line in summary],
            "sizes": [dataclasses.asdict(regret) for regret in found.regrets],
        }
        Path(json_file).write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
    if not found.regrets:
        console.print("nothing was measured: there are no figures")
        return _tell_wrong(console, found.wrong) or 1
    return _tell_wrong(console, found.wrong)


def _about(comm: Any) -> dict[str, Any]:
    """Describe the run."""
    from ..bench.results import make_header

    return make_header(comm, versions(), knobs())


def _tell_missing(console: Any, left_out: int, stopped: bool, meaning: str) -> None:
    if left_out:
        why = "it was stopped" if stopped else "the budget was too short"
        console.print(f"{left_out} sizes were left out, as {why}: {meaning}")


def _tell_wrong(console: Any, wrong: list[str]) -> int:
    for line in wrong:
        console.print(f"[bold red]wrong result:[/] {line}")
    return 1 if wrong else 0
