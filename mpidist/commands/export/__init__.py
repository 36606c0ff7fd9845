"""``mpidist export``: one subcommand for each format of another tool."""

from __future__ import annotations

import click

from ..console import examples
from .goal import goal_command
from .msccl import msccl_command


@click.group(
    "export",
    short_help="Write algorithms for other tools.",
    epilog=examples(
        "mpidist export goal allreduce ring --ranks 64 --bytes 1M -o ring.goal",
        "mpidist export msccl allreduce ring --ranks 8 -o ring.xml",
    ),
)
def export_command() -> None:
    """Write algorithms in the formats of other tools, each after its proof."""


for _command in (goal_command, msccl_command):
    export_command.add_command(_command)
