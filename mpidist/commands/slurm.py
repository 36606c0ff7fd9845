"""``mpidist slurm``: the batch scripts for SLURM that are shipped with mpidist."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import TYPE_CHECKING

import click
from click.shell_completion import CompletionItem

from ..errors import InvalidArgument, UnknownName
from ..tables import Column
from .console import examples, make_console, make_table, show
from .options import complete

if TYPE_CHECKING:
    from rich.console import Console

HERE = Path(__file__).resolve().parents[1]
ROOTS = HERE / "launcher" / "shipped", HERE.parent  # of a wheel (setup.py), of a checkout
FOLDER, PROGRAM = "slurm", "examples/digits.py"  # of train_ddp


def root() -> Path:
    """Return the folder whose subfolders ``slurm`` and ``examples`` have the shipped files.

    In an installed package that is another folder than in a checkout.
    """
    return next(folder for folder in ROOTS if (folder / FOLDER).is_dir())


def scripts() -> dict[str, Path]:
    """Return the batch scripts by name."""
    return {path.stem: path for path in sorted((root() / FOLDER).glob("*.sbatch"))}


def _complete(
    context: click.Context, argument: click.Parameter, incomplete: str
) -> list[CompletionItem]:
    """Return a shell's completions: the names of the scripts."""
    return complete(scripts(), incomplete)


@click.command(
    "slurm",
    short_help="Print or write the batch scripts for SLURM.",
    epilog=examples(
        "mpidist slurm                        their names, and what they do",
        "mpidist slurm train_ddp > job.sbatch",
        "mpidist slurm --into .               all, with their programs, to ./slurm and ./examples",
    ),
)
@click.argument("name", required=False, shell_complete=_complete)
@click.option(
    "--into",
    type=click.Path(file_okay=False),
    metavar="FOLDER",
    help="Write all scripts, their programs and knobs, for sbatch in this folder.",
)
def slurm_command(name: str | None, into: str | None) -> None:
    """Print the batch script NAME; without a name, list the scripts."""
    known = scripts()
    if into is not None:
        if name is not None:
            raise click.UsageError(f"--into writes all scripts: expected no name, not {name}")
        _write(Path(into))
    elif name is None:
        _print_names(make_console(), known)
    elif name.removesuffix(".sbatch") in known:
        click.echo(known[name.removesuffix(".sbatch")].read_text(encoding="utf-8"), nl=False)
    else:
        raise UnknownName("script", name, known)


def _print_names(console: Console, known: dict[str, Path]) -> None:
    """Print a table of the scripts: their names, and what they do."""
    table = make_table(console, Column("script", wrap=False), "what it does")
    for script, path in known.items():
        table.add_row(script, _summary(path))
    show(console, table)


def _summary(path: Path) -> str:
    """Return the first sentence of a batch script's comment, which says what the script is for."""
    lines = path.read_text(encoding="utf-8").splitlines()
    comment = " ".join(line[2:] for line in lines if line.startswith("# "))
    return comment[: comment.index(". ") + 1]


def _write(target: Path) -> None:
    """Copy the folder of the batch scripts, and the example program, into the folder `target`."""
    for name in (FOLDER, PROGRAM):
        if (target / name).exists():
            raise InvalidArgument(f"--into {target}: {target / name} exists already")
    try:
        ignored = shutil.ignore_patterns("__pycache__")
        shutil.copytree(root() / FOLDER, target / FOLDER, ignore=ignored)
        (target / PROGRAM).parent.mkdir(exist_ok=True)
        shutil.copy(root() / PROGRAM, target / PROGRAM)
    except OSError as error:
        raise InvalidArgument(f"--into {target}: {error.strerror or error}") from None
    click.echo(f"written: {target / FOLDER}, {target / PROGRAM}")
