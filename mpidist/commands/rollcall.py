"""``mpidist rollcall``: where each rank of a running job is."""

from __future__ import annotations

import click
from click.shell_completion import CompletionItem

from ..foreign import shown
from .console import examples


def _complete(
    context: click.Context, parameter: click.Parameter, incomplete: str
) -> list[CompletionItem]:
    from ..launcher.flight import jobs

    return [CompletionItem(path.name) for path in jobs() if path.name.startswith(incomplete)]


@click.command(
    "rollcall",
    short_help="Show where each rank of a running job is: call, stack, state.",
    epilog=examples(
        "mpidist rollcall                        the newest job that runs",
        "mpidist rollcall 20261126-160605-72c3",
    ),
)
@click.argument("job", required=False, metavar="[JOB]", shell_complete=_complete)
def rollcall_command(job: str | None) -> None:
    """Ask a running job where its ranks are: the call, the Python stack, the process's state.

    Ranks in the same call with the same stack are in one line, the fewest first.  It asks the ranks
    of this machine, under any launcher, and disturbs nothing.  JOB is a name of `mpidist flight
    --list`; by default it is the newest job of which a process runs here.  `mpidist run` prints the
    same, for all machines of its job, upon Ctrl-\\ (SIGQUIT), when no rank has moved for some time
    (--roll-call), and when a deadline is missed.
    """
    from ..launcher.roll_call import called

    for line in called(job):
        click.echo(shown(line))
