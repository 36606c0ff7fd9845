"""The progress bar of commands that take a long time."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar

from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)

Advance = Callable[..., None]


def _no_bar(text: str = "", done: int | None = None, total: int | None = None) -> None:
    """Do nothing: stands in for the function that advances the bar, where none is drawn."""


_drawn: ContextVar[Advance] = ContextVar("drawn", default=_no_bar)


def advance(text: str, done: int | None = None, total: int | None = None) -> None:
    """Advance the innermost bar of :func:`draw_progress`, if any, and set its text.

    It advances by a step, or to `done` steps of `total`.  For measurements deep inside a benchmark,
    which are not passed the bar.
    """
    _drawn.get()(text, done, total)


@contextmanager
def draw_progress(
    console: Console, doing: str, total: int | None = None, keep: bool = False
) -> Iterator[Advance]:
    """Draw a progress bar, if the console is a terminal.

    Yields ``advance(text=doing, done=None, total=None)``, which advances the bar by a step, or to
    `done` steps of `total`; a `total` of None is unknown until `advance` sets it.  With `keep` the
    bar stays on the screen in the end.
    """
    if not console.is_terminal:
        yield _no_bar
        return
    with Progress(
        TextColumn("{task.description}", markup=False),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TimeRemainingColumn(),
        console=console,
        transient=not keep,
    ) as bar:
        task = bar.add_task(doing, total=total)

        def move(text: str = doing, done: int | None = None, total: int | None = None) -> None:
            more = 1 if done is None else None
            bar.update(task, advance=more, completed=done, total=total, description=text)

        token = _drawn.set(move)
        try:
            yield move
        finally:
            _drawn.reset(token)
