"""Measures what a tuning table loses: every candidate anew, at its sizes and between them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from ..measure import median
from .race import History, Race, all_but_the_slow, candidates
from .regret import LEAST, Regret, score
from .rounds import Cell, Wish, cells, count_cells, undisturbed


@dataclass
class Verified:
    """What a verification found.

    Attributes
    ----------
    regrets : list of Regret
        For each size at which every candidate was measured often enough.
    wrong : list of str
        Who gave a wrong result, where.
    left_out : int
        Sizes that there was no time for.
    """

    regrets: list[Regret] = field(default_factory=list)
    wrong: list[str] = field(default_factory=list)
    left_out: int = 0


def verify(
    comm: Any,
    wish: Wish,
    on_step: Callable[[str, int], Any] = lambda collective, nbytes: None,
    stopped: Callable[[], bool] = lambda: False,
) -> Verified:
    """Measure every candidate, and the regret of what "auto" takes now; collective.

    See :mod:`mpidist.bench.regret` for what is computed, :func:`mpidist.bench.tune.tune` for the
    parameters.  Nothing that a table was made from is used.
    """
    found = Verified()
    histories: dict[tuple[str, str], History] = {}

    def history(cell: Cell) -> History:
        return histories.setdefault((cell.collective, cell.memory), History())

    with undisturbed():
        for cell in cells(comm, wish, stopped, lambda c: LEAST * history(c).cost(c.nbytes)):
            on_step(cell.collective, cell.nbytes)
            regret = _race(comm, cell, history(cell), stopped, found.wrong)
            if regret is not None:
                found.regrets.append(regret)
    found.left_out = count_cells(comm, wish) - len(found.regrets)
    return found


def _race(
    comm: Any, cell: Cell, before: History, stopped: Callable[[], bool], wrong: list[str]
) -> Regret | None:
    race = Race(comm, cell.works, cell.nbytes, cell.memory, cell.until, stopped)
    nbytes = race.case.nbytes
    names, pick = candidates(comm, cell.collective, nbytes, cell.memory)
    first, *others = before.order(names, pick)
    times = race.run([first, "auto", *others], all_but_the_slow(pick, "auto"))
    before.learn(race)
    wrong += [f"{cell.collective} {name} {nbytes} B" for name in race.wrong]
    auto = times.pop("auto", None)
    if not race.complete or len(times.get(pick, ())) < LEAST:
        return None
    regret, raw, floor, best = score(times, pick)
    ratio = median(auto) / median(times[pick]) if auto else None
    iterations = len(times[pick])
    where = (cell.collective, cell.memory, nbytes)
    return Regret(*where, pick, best, regret, raw, floor, ratio, iterations)


def between(sizes: Sequence[int]) -> list[int]:
    """Give the sizes and, between any two, the one in the middle on a logarithmic axis."""
    middles = [round((low * high) ** 0.5) for low, high in zip(sizes, sizes[1:])]
    return sorted({*sizes, *middles})
