"""The progress bar, and who advances it."""

import io

from rich.console import Console

from mpidist.bench.progress import advance, draw_progress


def test_advance_moves_the_innermost_bar():
    console = Console(file=io.StringIO(), force_terminal=True, width=120)
    with draw_progress(console, "measuring", 4, keep=True) as move:
        move("first")
        advance("deep inside", 3)
    advance("after the bar")
    text = console.file.getvalue()
    assert "deep inside" in text and "3/4" in text and "after the bar" not in text


def test_draw_progress_without_a_terminal_draws_nothing():
    console = Console(file=io.StringIO())
    with draw_progress(console, "measuring", 2) as move:
        move()
        advance("inside", 1, 2)
    assert console.file.getvalue() == ""
