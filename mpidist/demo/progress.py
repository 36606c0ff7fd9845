"""How far the training is: a live bar on a terminal, else a line in the log."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

log = logging.getLogger("mpidist.demo")
Report = Callable[[int, float, float], None]


@contextmanager
def progress(rank: int, epochs: int, console: Console | None = None) -> Iterator[Report]:
    """Show how training goes, on rank 0 only.

    Parameters
    ----------
    rank, epochs : int
        This rank, and how many epochs there will be.
    console : rich.console.Console, optional
        Where to draw; by default standard error, if that is a terminal.

    Yields
    ------
    callable
        To be called after each epoch with (epochs done, loss, accuracy).
    """
    console = console or Console(stderr=True)
    if rank != 0:
        yield lambda done, loss, accuracy: None
    elif not console.is_terminal:
        yield lambda done, loss, accuracy: log.info(
            "epoch %d/%d: loss %.4f, test accuracy %.2f %%", done, epochs, loss, 100 * accuracy
        )
    else:
        with Progress(
            TextColumn("training"),
            BarColumn(),
            MofNCompleteColumn(),
            TextColumn("loss {task.fields[loss]:.4f}, test accuracy {task.fields[accuracy]:.2%}"),
            TimeElapsedColumn(),
            console=console,
        ) as bar:
            task = bar.add_task("training", total=epochs, loss=float("nan"), accuracy=0.0)
            yield lambda done, loss, accuracy: bar.update(
                task, completed=done, loss=loss, accuracy=accuracy
            )
