"""Output of all commands: the console of rank 0, tables, the progress bar."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from ..launcher.mpi import TERMINAL, launched_rank
from ..tables import Column, Table

if TYPE_CHECKING:
    from rich.console import Console, RenderableType
    from rich.table import Table as RichTable

COMPLETE = "_MPIDIST_COMPLETE"  # set by a shell's completion script
PLAIN_WIDTH = 1000  # columns of a file: lines are not wrapped
NARROW = 90  # columns of a terminal below which marked columns are left out, points not aligned
_BLANK = "\u2800"  # behind right-aligned numbers; rich strips every kind of white space there
STYLES = {
    "fastest": "green",
    "baseline": "bold",
    "wrong": "bold red",
    "better": "green",
    "worse": "red",
}


def make_console(stderr: bool = False) -> Console:
    """Return the console of this rank, which prints on rank 0 only.

    A rank cannot see whether its launcher writes to a terminal (Open MPI gives rank 0 a
    pseudo-terminal in any case), so ``mpidist run`` sets ``MPIDIST_TERMINAL``.
    """
    from rich.console import Console

    if launched_rank():
        return Console(quiet=True)
    width = os.environ.get(TERMINAL, "")
    if width.isdecimal() or launched_rank() is not None:
        columns = int(width or 0)
    else:
        here = Console(stderr=stderr)
        columns = here.width if here.is_terminal else 0
    return Console(
        stderr=stderr, force_terminal=columns > 0, width=columns or PLAIN_WIDTH, highlight=False
    )


def make_table(console: Console, *columns: Column | str) -> RichTable:
    """Return an empty table with these columns, or heads; plain if the console is no terminal."""
    from rich import box
    from rich.table import Table as RichTable

    pretty = console.is_terminal
    lines = box.SIMPLE_HEAD if pretty else None
    table = RichTable(box=lines, pad_edge=False, padding=(0, 1 if pretty else 2, 0, 0))
    for each in columns:
        column = Column(each) if isinstance(each, str) else each
        head = column.head if pretty else column.head.replace("\n", " ")
        table.add_column(head, justify=column.align, no_wrap=not column.wrap)
    return table


def print_tables(console: Console, tables: Iterable[Table]) -> None:
    """Print result tables; on a terminal in colours, and the first cells once per group of lines.

    Terminals of less than 90 columns get those only that are for narrow ones.
    """
    from rich.markup import escape
    from rich.text import Text

    pretty = console.is_terminal
    for table in tables:
        wide = console.width >= NARROW
        shown = [k for k, column in enumerate(table.columns) if wide or column.narrow]
        made = make_table(console, *(table.columns[k] for k in shown))
        columns = {k: [line.cells[k] for line in table.lines] for k in shown}
        if wide:
            columns = {k: _at_points(cells) for k, cells in columns.items()}
        groups = any(not line.starts_group for line in table.lines)
        for n, line in enumerate(table.lines):
            if pretty and groups and line.starts_group and n:
                made.add_section()
            cells = [Text(columns[k][n]) for k in shown]
            if pretty and not line.starts_group:
                cells[0] = Text("")
            made.add_row(*cells, style=STYLES.get(line.style) if pretty else None)
        if table.heading:
            console.print(f"\n[bold]{escape(table.heading)}[/]")
        show(console, made)


def _at_points(cells: list[str]) -> list[str]:
    """Return the cells of a right-aligned column, padded so that their decimal points align.

    The cells are unchanged unless all are numbers or empty.
    """
    if not all(re.fullmatch(r"[\d,]*(\.\d+)?", cell) for cell in cells):
        return cells
    behind = [len(cell) - (cell + ".").index(".") for cell in cells]
    return [cell + _BLANK * (max(behind) - n) for cell, n in zip(cells, behind)]


def show(console: Console, table: RenderableType) -> None:
    """Print a table; without a terminal, lines have no trailing blanks."""
    if console.quiet:
        return
    with console.capture() as captured:
        console.print(table)
    text = captured.get().replace(_BLANK, " ")
    if not console.is_terminal:
        text = "\n".join(line.rstrip() for line in text.splitlines()) + "\n"
    console.file.write(text)


def examples(*lines: str) -> str:
    """Return example commands as the text that ends a command's help."""
    return "\b\nExamples:\n" + "\n".join(f"  {line}" for line in lines)


@contextmanager
def progress_bar(doing: str, total: int | None = None) -> Iterator[Callable[..., None]]:
    """Draw a progress bar on rank 0's terminal, on standard error; yield its `advance`.

    See :func:`mpidist.bench.progress.draw_progress`.
    """
    from ..bench.progress import draw_progress

    with draw_progress(make_console(stderr=True), doing, total) as advance:
        yield advance
