"""``mpidist tune``: measure the fastest executors into a table, and check a table."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from time import perf_counter
from typing import TYPE_CHECKING

import click

from ..errors import InvalidArgument
from ..measure import counted, format_size, round_size
from ..schedule.contract import COLLECTIVES
from ..tables import Column
from .bench.benchmark import on_step, watched
from .bench.collectives import dtype_option
from .console import examples, make_console, make_table, print_tables, progress_bar, show
from .options import DURATION, OUTPUT, SIZES, collective_name, load_option

if TYPE_CHECKING:
    import numpy as np
    from rich.console import Console

    from ..bench.machine import Watch
    from ..bench.regret import Verified
    from ..bench.tuner import Tuned, TuningSettings
    from ..communicator.communicator import Communicator
    from ..selection.tuning import TuningTable


@click.command(
    "tune",
    short_help='Measure the fastest executor of each collective, for "auto".',
    epilog=examples(
        "mpidist run -n 4 -- mpidist tune -o tuning.json",
        "mpidist run -n 4 -- mpidist tune allreduce --budget 20s --bytes 8-1M -o tuning.json",
        "mpidist run -n 4 -- mpidist tune --verify tuning.json --budget 120s",
        "MPIDIST_TUNING=tuning.json mpidist run -n 4 train.py",
    ),
)
@click.argument("collectives", nargs=-1, type=collective_name(), metavar="[COLLECTIVE]...")
@click.option(
    "-o",
    "--output",
    type=OUTPUT,
    metavar="FILE",
    help="Write the table; other entries of an existing table are kept.",
)
@click.option(
    "--verify",
    "table",
    type=click.Path(),
    metavar="FILE",
    help='Measure instead how much slower "auto" with this table is than the best.',
)
@click.option(
    "--budget", type=DURATION, default="60s", show_default=True, help="Time of the whole command."
)
@click.option(
    "--bytes",
    "sizes",
    type=SIZES,
    help="Sizes of the whole buffer; with --verify by default those of the table.  --verify adds "
    "the sizes between them.  [default: 8-64M]",
)
@dtype_option
@click.option("--force", is_flag=True, help="Write the table of a busy machine nevertheless.")
@click.option(
    "--json",
    "json_file",
    type=OUTPUT,
    metavar="FILE",
    help="With --verify: write the figures as JSON.",
)
@click.option(
    "--export", hidden=True, expose_value=False, callback=lambda *given: _export(given[-1])
)
@load_option
def tune_command(
    collectives: tuple[str, ...],
    output: str | None,
    table: str | None,
    budget: float,
    sizes: list[int] | None,
    dtype: np.dtype,
    force: bool,
    json_file: str | None,
) -> int:
    """Measure the fastest executor and algorithm of each COLLECTIVE (by default all).

    Every executor and algorithm that can serve a call is measured, in private and in symmetric
    memory; the slower half is dropped, and the others get more iterations.  The data change in
    every iteration.  A choice of the shipped rules changes only if another is faster by more than
    the noise, and again in a second pass over these sizes.  The table is written after every size,
    so Ctrl-C loses nothing.  On a busy machine no table is written, with exit code 2, unless
    --force is given.  --verify measures again what a table holds.
    """
    if (output is None) == (table is None):
        raise click.UsageError("expected one of -o FILE and --verify FILE")
    if json_file is not None and table is None:
        raise click.UsageError("--json: only for --verify; -o writes the table, which is JSON")
    import mpidist

    from ..bench.tuner import TuningSettings

    comm = mpidist.init(tuning=table)
    machine = watched(comm)
    known = tuple(COLLECTIVES)
    if table is not None:
        known, held = _held(comm, table)
        missing = [name for name in collectives if name not in known]
        if missing:
            raise InvalidArgument(
                f"--verify {table}: no entry for {', '.join(missing)}; it has {', '.join(known)}"
            )
        sizes = sizes or held
    sizes = sizes or SIZES.parse("8-64M")
    settings = TuningSettings(collectives or known, sorted(set(sizes)), dtype, budget)
    if output is not None:
        if machine.busy and not force:
            raise refusal("tune", machine, f"{output} is not written")
        return _tune(comm, settings, output, machine, force)
    return _verify(comm, settings, str(table), machine, json_file)


def _export(tool: str | None) -> None:
    """Name the command for tables of other tools, which starts its jobs itself."""
    if tool is not None:
        raise click.UsageError(
            f"--export {tool}: `mpidist export` measures and writes what other tools choose by: "
            "`mpidist export openmpi --ranks 4 -o rules.txt`, or mpich, han, nccl"
        )


def refusal(command: str, machine: Watch, outcome: str) -> InvalidArgument:
    """Return the error that refuses the file of a busy machine, with exit code 2."""
    from ..bench.machine import BUSY, WATCHED, load_text

    load = "; ".join(load_text(*node) for node in machine.busy)
    return InvalidArgument(
        f"{command}: {load} (in {WATCHED:g} s while the ranks slept): expected at most "
        f"{100 * BUSY:.0f} %; {outcome}, as its choices may be slower than those without a file.  "
        "Measure on a quiet machine, or nevertheless by --force"
    )


def _held(comm: Communicator, path: str) -> tuple[tuple[str, ...], list[int]]:
    """Return the collectives and sizes in bytes that a table has for these ranks; collective.

    All, and no sizes, of a calibration alone.  Raise ConfigError if the file has nothing for this
    MPI library and these ranks per node.
    """
    from ..bench.tuner import existing_table
    from ..errors import ConfigError

    table = existing_table(comm, path)
    assert table is not None  # the communicator has it already
    wrong = table.why_not(comm.backend.library, tuple(map(len, comm.topology.groups)))
    if wrong:
        raise ConfigError(wrong)
    here = comm.backend.library, tuple(map(len, comm.topology.groups))
    entries = [e for k, e in table.entries.items() if (k.library, k.ranks_per_node) == here]
    if not entries:  # a calibration only, by which the model chooses everywhere
        return tuple(COLLECTIVES), []
    sizes = {size for entry in entries for size in entry.times if size}
    names = {entry.key.collective for entry in entries}
    return tuple(name for name in COLLECTIVES if name in names), sorted(sizes) or [8]


def _tune(
    comm: Communicator, settings: TuningSettings, output: str, machine: Watch, force: bool
) -> int:
    from ..bench.machine import make_header
    from ..bench.tuner import Stop, count_races, existing_table, tune

    old = existing_table(comm, output)

    def write(table: TuningTable) -> None:
        if comm.rank == 0:
            (old.merged(table) if old is not None else table).save(output)

    about = make_header(comm)
    stop, total = Stop(), count_races(comm, settings)
    with stop.listening(), progress_bar("measuring", total):
        begun = perf_counter()
        found = tune(comm, settings, about, on_step(total), write, stop)
        seconds = perf_counter() - begun
    doubts = machine.again()
    found.table.about |= {"line_ns": machine.before_and_after(), "busy": machine.busy}
    if machine.busy and not force:
        if comm.rank == 0 and old is not None:
            old.save(output)
        elif comm.rank == 0:
            Path(output).unlink(missing_ok=True)
        raise refusal("tune", machine, f"{output} is as it was before")
    if found.table.entries:
        write(found.table)
    console = make_console()
    lines = make_table(
        console, Column.names("collective"), Column.names("memory"), "from this size on"
    )
    for key, entry in found.table.entries.items():
        chosen = ", ".join(f"{round_size(int(rule.start))} {rule.choose}" for rule in entry.rules)
        lines.add_row(key.collective, key.memory, chosen)
    show(console, lines)
    kept = f"; {len(old.entries)} entries of the existing table" if old is not None else ""
    _print_missing(console, found, stop.wanted, '"auto" chooses there as without the table')
    if not found.table.entries:
        console.print(f"nothing was measured: {output} was not written")
        return _print_wrong(console, found.wrong) or 1
    console.print(
        f"{counted(found.measured, 'size')} measured in {seconds:.0f} s, written to {output}{kept}"
    )
    console.print(
        f"choices that differ from those without the table: at {counted(found.confirmed, 'size')}; "
        f"at {found.faster - found.confirmed} more another was faster in one pass, not in both"
    )
    _print_doubts(console, machine.described(), doubts)
    return _print_wrong(console, found.wrong)


def _verify(
    comm: Communicator, settings: TuningSettings, table: str, machine: Watch, json_file: str | None
) -> int:
    from ..bench.machine import make_header
    from ..bench.regret import between, summarise, summary_table, verify
    from ..bench.results import Results
    from ..bench.tuner import Stop, count_races

    settings = dataclasses.replace(settings, sizes=between(settings.sizes))
    stop, total = Stop(), count_races(comm, settings)
    with stop.listening(), progress_bar("measuring", total):
        begun = perf_counter()
        found = verify(comm, settings, on_step(total), stop)
        seconds = perf_counter() - begun
    doubts = machine.again()
    summary = summarise(found.regrets)
    console = make_console()
    console.print(
        f"{table}: {counted(comm.size, 'rank')}, {settings.dtype}, "
        f"{counted(len(found.regrets), 'size')} in {seconds:.0f} s; regret of auto in % of the "
        "best time.  Raw mean: with all iterations, "
        "so that noise counts as regret; noise floor: the regret of the best candidate itself"
    )
    print_tables(console, [summary_table(summary)])
    worst = sorted(found.regrets, key=lambda row: -row.figures["regret"])[:5]
    for row in (row for row in worst if row.figures["regret"] > 0):
        console.print(
            f"largest regret: {row.work} {row.memory} {format_size(row.bytes or 0)}: "
            f"{row.candidate} is {100 * row.figures['regret']:.1f} % slower than "
            f"{row.figures['best']}"
        )
    _print_missing(console, found, stop.wanted, "these figures do not include them")
    _print_doubts(console, machine.described(), doubts)
    about = make_header(comm) | {"summary": [dataclasses.asdict(line) for line in summary]}
    about |= {"line_ns": machine.before_and_after(), "busy": machine.busy}
    if json_file is not None and comm.rank == 0:
        Results(about, found.regrets, benchmark="tune").save(json_file)
    if not found.regrets:
        console.print("nothing was measured: there are no figures")
        return _print_wrong(console, found.wrong) or 1
    return _print_wrong(console, found.wrong)


def _print_missing(console: Console, found: Tuned | Verified, stopped: bool, meaning: str) -> None:
    late = found.left_out - found.unsteady
    why = "the run was stopped" if stopped else "the budget was too short"
    for count, reason in ((late, why), (found.unsteady, "the machine changed during each race")):
        if count:
            console.print(f"{counted(count, 'size')} left out, as {reason}: {meaning}")


def _print_doubts(console: Console, state: str, doubts: list[str]) -> None:
    """Print the machine's state, and why the figures are not to be trusted."""
    if state and state not in doubts:
        console.print(state, markup=False)
    if doubts:
        text = f"not to be trusted: {'; '.join(doubts)}"
        console.print(text, style="bold red", markup=False)


def _print_wrong(console: Console, wrong: list[str]) -> int:
    """Print wrong results; return the exit code, 1 if there are any."""
    for line in wrong:
        console.print(f"[bold red]wrong result:[/] {line}")
    return 1 if wrong else 0
