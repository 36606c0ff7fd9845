"""What all commands share: who prints, and how tables look."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from rich import box
from rich.console import Console, RenderableType
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from ..measure import format_size

TERMINAL = "MPIDIST_TERMINAL"  # set by `mpidist run`: columns of the terminal, 0 for none
PLAIN_WIDTH = 1000  # a line of a file is not broken
_RANK = ("OMPI_COMM_WORLD_RANK", "PMI_RANK", "PMIX_RANK", "SLURM_PROCID")


def launched_rank(environ: Mapping[str, str] = os.environ) -> int | None:
    """Give the rank that the launcher says this process has; None outside of a launch."""
    for name in _RANK:
        if environ.get(name, "").isdigit():
            return int(environ[name])
    return None


def make_console(stderr: bool = False) -> Console:
    """Give the console of this rank: only rank 0 prints.

    Under a launcher, whether its output is a terminal cannot be seen from here (Open MPI gives
    rank 0 a pseudo-terminal in any case): ``mpidist run`` tells by ``MPIDIST_TERMINAL``.
    """
    if launched_rank():
        return Console(quiet=True)
    told = os.environ.get(TERMINAL, "")
    if told.isdigit() or launched_rank() is not None:
        columns = int(told or 0)
    else:
        here = Console(stderr=stderr)
        columns = here.width if here.is_terminal else 0
    return Console(
        stderr=stderr, force_terminal=columns > 0, width=columns or PLAIN_WIDTH, highlight=False
    )


def make_table(console: Console, *columns: str) -> Table:
    """Give a table; without lines and colours where nobody looks at it.

    A column whose name begins with ``>`` is set to the right, one with ``=`` is never broken.
    """
    pretty = console.is_terminal
    lines = box.SIMPLE_HEAD if pretty else None
    table = Table(box=lines, pad_edge=False, padding=(0, 1 if pretty else 2, 0, 0))
    for name in columns:
        head = name.lstrip(">=") if pretty else name.lstrip(">=").replace("\n", " ")
        right, whole = name.startswith(">"), name.startswith((">", "="))
        table.add_column(head, justify="right" if right else "left", no_wrap=whole)
    return table


def show(console: Console, what: RenderableType) -> None:
    """Print a table or text; in files without blanks at the ends of lines."""
    if console.is_terminal or console.quiet:
        console.print(what)
        return
    with console.capture() as captured:
        console.print(what)
    text = "\n".join(line.rstrip() for line in captured.get().splitlines())
    console.print(text, markup=False)


def examples(*lines: str) -> str:
    """Give the examples under a command's help."""
    return "\b\nExamples:\n" + "\n".join(f"  {line}" for line in lines)


@contextmanager
def measuring(total: int) -> Iterator[Callable[[str, int], Any]]:
    """Show, on rank 0's terminal only, how far it is."""
    console = make_console(stderr=True)
    if not console.is_terminal:
        yield lambda collective, nbytes: None
        return
    with Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        console=console,
        transient=True,
    ) as bar:
        task = bar.add_task("measuring", total=total)

        def step(collective: str, nbytes: int) -> None:
            bar.update(task, advance=1, description=f"{collective} {format_size(nbytes)}")

        yield step
