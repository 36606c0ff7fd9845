"""``mpidist export``: one subcommand for each format of another tool."""

from __future__ import annotations

import click

from ..console import examples
from .goal import goal_command
from .han import han_command
from .mpich import mpich_command
from .msccl import msccl_command
from .nccl import nccl_command
from .openmpi import openmpi_command


@click.group(
    "export",
    short_help="Write algorithms and choices for other tools.",
    epilog=examples(
        "mpidist export goal allreduce ring --ranks 64 --bytes 1M -o ring.goal",
        "mpidist export msccl allreduce ring --ranks 8 -o ring.xml",
        "mpidist export openmpi allreduce --ranks 4 --check -o rules.txt",
    ),
)
def export_command() -> None:
    """Write algorithms, and choices between them, in the formats of other tools."""


for _command in (
    goal_command,
    msccl_command,
    openmpi_command,
    han_command,
    mpich_command,
    nccl_command,
):
    export_command.add_command(_command)
