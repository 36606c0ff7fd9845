"""The regret of "auto"."""

import pytest

from mpidist.bench import Row
from mpidist.bench.regret import between, score, summarise


def test_score_is_of_the_other_half():
    """a is the best on even iterations by luck alone; b on the odd ones."""
    times = {"a": [1.0, 2.0] * 3, "b": [2.0, 1.0] * 3, "c": [1.2] * 6}
    regret, raw, floor, best = score(times, "c")
    # The oracle takes a from the even half, which takes 2 on the odd one: c is ahead of it.
    assert regret == 0.0 and best == "c" and raw == 0.0
    assert floor == pytest.approx(1.0), "the oracle loses a factor of 2 on the other half"
    regret, raw, floor, best = score({"a": [1.0] * 4, "b": [1.5] * 4}, "b")
    assert (regret, raw, floor, best) == (pytest.approx(0.5), pytest.approx(0.5), 0.0, "a")


def test_summarise_by_collective_and_all():
    def row(collective, regret):
        figures = {"best": "b", "regret": regret, "raw": regret, "floor": 0.1, "auto": 1.0}
        return Row(collective, "a", 2, 1.0, bytes=8, figures=figures)

    rows = [row("allreduce", r / 100) for r in range(101)] + [row("reduce", 0.0)]
    first, second, total = summarise(rows)
    assert first.mean == pytest.approx(0.5) and first.p95 == pytest.approx(0.95)
    assert (second.sizes, total.sizes, total.collective) == (1, 102, "all")
    assert summarise([]) == []


def test_between_neighbours():
    assert between([8, 32, 128]) == [8, 16, 32, 64, 128]
    assert between([8]) == [8]
