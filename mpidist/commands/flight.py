"""``mpidist flight``: the last operations of each rank, after a crash or during a hang."""

from __future__ import annotations

import click
from click.shell_completion import CompletionItem

from ..errors import InvalidArgument
from ..foreign import shown
from ..measure import counted
from .console import examples
from .options import OUTPUT, Count, complete_file


def _complete(
    context: click.Context, parameter: click.Parameter, incomplete: str
) -> list[CompletionItem]:
    from ..launcher.flight import jobs

    names = [path.name for path in jobs() if path.name.startswith(incomplete)]
    return [CompletionItem(name) for name in names] or complete_file(incomplete)


@click.command(
    "flight",
    short_help="Show where each rank of a job is, or was when it ended.",
    epilog=examples(
        "mpidist flight                          the newest job",
        "mpidist flight --list",
        "mpidist flight 20261126-160605-72c3 --last 20",
        "mpidist flight --trace loss.json        for https://ui.perfetto.dev",
        "mpidist flight /dev/shm/mpidist-flight-0/20261126-160605-72c3",
    ),
)
@click.argument("job", required=False, metavar="[JOB|DIR]", shell_complete=_complete)
@click.option(
    "--last", type=Count(), metavar="N", help="Also print the last N operations of each rank."
)
@click.option(
    "--trace",
    type=OUTPUT,
    metavar="FILE",
    help="Write the records as a trace, for ui.perfetto.dev.",
)
@click.option("--list", "listed", is_flag=True, help="Print the jobs whose records are left.")
def flight_command(job: str | None, last: int | None, trace: str | None, listed: bool) -> None:
    """Read the flight records of a job: which rank diverged first, and where each rank is.

    Every process records its last 1,024 operations in memory that outlives it, also after kill -9.
    JOB is a name of `mpidist flight --list`, DIR a folder of records; by default it is the newest
    job on this machine, which may still run.  A job whose ranks all end well leaves no records, and
    of the others the newest eight are kept.  On several nodes, each has the records of its own
    ranks.
    """
    from ..launcher.flight import Job, clock, find, jobs
    from ..trace import write

    if listed:
        if (job, last, trace) != (None, None, None):
            raise click.UsageError("--list: not with a job, --last or --trace")
        for path in jobs():
            try:
                found = Job(path)
            except InvalidArgument:  # it has just ended well
                continue
            alive = sum(record.alive for record in found.records)
            program = found.records[0].program if found.records else ""
            ranks = f"{len(found.records)} of {counted(found.ranks, 'rank')}"
            click.echo(shown(f"{path.name}  {ranks}, {alive} running  {program}"))
        return
    found = Job(find(job))
    click.echo(shown(f"job {found.path.name}: {found.records[0].program if found.records else ''}"))
    for line in found.lines():
        click.echo(shown(line))
    if trace is not None:
        drawn = found.events()
        write(trace, drawn)
        events = counted(sum(len(rank.events) for rank in drawn), "operation")
        click.echo(f"{events} of {counted(len(drawn), 'rank')} in {trace}")
    if last is None:
        return
    for record in found.records:
        names = {track.serial: track.name for track in record.tracks}
        click.echo(f"\nrank {record.rank}, {counted(record.count, 'operation')} begun:")
        for each in record.operations[-last:]:
            name = names.get(each.serial, "(gone)")
            click.echo(shown(f"  {clock(record, each.time)}  {name:9} {each}"))
