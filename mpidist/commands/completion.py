"""``mpidist completion``: the script by which a shell completes commands, names and files."""

from __future__ import annotations

from typing import Any

import click
from click.shell_completion import (
    BashComplete,
    CompletionItem,
    FishComplete,
    ShellComplete,
    ZshComplete,
    add_completion_class,
)

from .console import COMPLETE, examples
from .options import complete_file


class OrFiles(ShellComplete):
    """Completion that falls back to the names of files where nothing else fits."""

    def get_completions(self, args: list[str], incomplete: str) -> list[CompletionItem]:
        """Return the completions of `incomplete`, or the request for those of a file."""
        return super().get_completions(args, incomplete) or complete_file(incomplete)


@add_completion_class
class Bash(OrFiles, BashComplete):
    """Completion in bash, 4.4 or newer."""

    def source(self) -> str:
        """Return the script; the shell that reads it need not be installed here."""
        return ShellComplete.source(self)


@add_completion_class
class Zsh(OrFiles, ZshComplete):
    """Completion in zsh."""


@add_completion_class
class Fish(OrFiles, FishComplete):
    """Completion in fish."""


SHELLS: dict[str, type[ShellComplete]] = {one.name: one for one in (Bash, Zsh, Fish)}


@click.command(
    "completion",
    short_help="Print the script that completes commands and names in a shell.",
    epilog=examples(
        'eval "$(mpidist completion bash)"      in ~/.bashrc',
        'eval "$(mpidist completion zsh)"       in ~/.zshrc, after compinit',
        "mpidist completion fish > ~/.config/fish/completions/mpidist.fish",
    ),
)
@click.argument("shell", type=click.Choice(list(SHELLS)))
@click.pass_context
def completion_command(context: click.Context, shell: str) -> None:
    """Print the script by which SHELL completes commands, options, names and files of mpidist.

    Names are those of collectives, algorithms, schedules and batch scripts; of your own algorithms
    too, after --import.  Where no name fits, the shell offers files.
    """
    settings: dict[str, Any] = {}
    made = SHELLS[shell](context.find_root().command, settings, "mpidist", COMPLETE)
    click.echo(made.source())
