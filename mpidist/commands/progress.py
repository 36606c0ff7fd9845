"""How far a measurement is, on rank 0's terminal."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from ..measure import format_size
from .common import make_console


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
