"""The command line: the group ``mpidist`` of all commands."""

from __future__ import annotations

import importlib

import click

from . import __version__
from .commands.console import examples
from .commands.main import Main
from .errors import UnknownName

COMMANDS = (
    *("bench", "calibrate", "check", "completion", "demo", "explain", "export", "flight", "info"),
    *("list", "prove", "rollcall", "run", "show", "slurm", "tune"),
)


class Commands(Main):
    """The commands of the group ``mpidist``; each is imported when it is used."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        """Return the names of all commands."""
        return list(COMMANDS)

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        """Return name, command and its arguments; UnknownName, if there is no such command."""
        name = args[0]
        if name not in COMMANDS and not name.startswith("-") and not ctx.resilient_parsing:
            raise UnknownName("command", name, COMMANDS)
        return super().resolve_command(ctx, args)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        """Import and return the command with this name, or None if there is none."""
        if cmd_name not in COMMANDS:
            return None
        module = importlib.import_module(f"{__package__}.commands.{cmd_name}")
        return getattr(module, f"{cmd_name}_command")


@click.group(
    cls=Commands,
    epilog=examples(
        "mpidist run -n 4 -- mpidist demo   train on real digits, compare every allreduce",
        "mpidist list                       every algorithm",
        "mpidist show allreduce ring        one of them as a picture",
        "mpidist run -n 4 train.py          your own script on 4 ranks",
    ),
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100},
)
@click.version_option(__version__, message="mpidist %(version)s")
def main() -> None:
    """Distributed training with MPI: collectives, data parallelism, pipelines."""
