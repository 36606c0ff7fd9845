"""Where an export goes: a file, or standard output."""

from __future__ import annotations

from pathlib import Path

import click

from ..options import OUTPUT_OR_STDOUT, STDOUT

output_option = click.option(
    "-o",
    "--output",
    type=OUTPUT_OR_STDOUT,
    default=STDOUT,
    show_default="standard output",
    metavar="FILE",
    help="File to write.",
)


def save(text: str, output: str, what: str) -> None:
    """Print the text, or write it to a file and say `what` is there."""
    if output == STDOUT:
        click.echo(text, nl=False)
        return
    Path(output).write_text(text, encoding="utf-8")
    click.echo(f"{what}: {output}")
