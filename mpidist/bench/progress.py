"""The progress bar of everything that takes long."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn


@contextmanager
def draw_progress(
    console: Console, doing: str, total: int | None = None, keep: bool = False
) -> Iterator[Callable[..., None]]:
    """Draw a progress bar, if the console is a terminal.

    Parameters
    ----------
    console : rich.console.Console
        Where to draw.
    doing : str
        Text before the bar.
    total : int, optional
        Number of steps; None as long as it is unknown.
    keep : bool
        Whether the bar stays on the screen in the end.

    Yields
    ------
    callable
        ``advance(text=doing, done=None, total=None)``: one step more, or `done` steps of `total`.
    """
    if not console.is_terminal:
        yield lambda text=doing, done=None, total=None: None
        return
    with Progress(
        TextColumn("{task.description}", markup=False),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        console=console,
        transient=not keep,
    ) as bar:
        task = bar.add_task(doing, total=total)

        def advance(text: str = doing, done: int | None = None, total: int | None = None) -> None:
            more = 1 if done is None else None
            bar.update(task, advance=more, completed=done, total=total, description=text)

        yield advance
