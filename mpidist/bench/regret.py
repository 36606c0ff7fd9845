"""The regret of "auto" against the fastest algorithm, and races that verify it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from ..communicator.communicator import Communicator
from ..measure import median
from .runner import no_garbage_collection
from .tuner import (
    Cell,
    History,
    Race,
    Wish,
    all_but_the_slow,
    candidates,
    cells,
    count_cells,
)

LEAST = 4  # iterations that two halves need


@dataclass(frozen=True)
class Regret:
    """What a choice loses at one size; see the module.

    Attributes
    ----------
    pick, best : str
        What was chosen, and the least median of all iterations.
    regret, raw, floor : float
        As fractions of the best candidate's time.
    auto : float or None
        The time of ``auto`` itself over that of the pick, called by name.
    """

    collective: str
    memory: str
    bytes: int
    pick: str
    best: str
    regret: float
    raw: float
    floor: float
    auto: float | None
    iterations: int


def score(times: Mapping[str, Sequence[float]], pick: str) -> tuple[float, float, float, str]:
    """Give regret, raw regret, noise floor, and who was the best.

    Parameters
    ----------
    times : mapping
        Seconds of each candidate, iteration by iteration, as many for each and at least four.
    pick : str
        The choice.
    """
    even = {name: median(seconds[0::2]) for name, seconds in times.items()}
    odd = {name: median(seconds[1::2]) for name, seconds in times.items()}
    fair, floor = 0.0, 0.0
    for found_on, scored_on in ((even, odd), (odd, even)):
        oracle = min(found_on, key=lambda name: found_on[name])
        fair += (scored_on[pick] / scored_on[oracle] - 1) / 2
        floor += (scored_on[oracle] / min(scored_on.values()) - 1) / 2
    whole = {name: median(seconds) for name, seconds in times.items()}
    best = min(whole, key=lambda name: whole[name])
    return max(fair, 0.0), whole[pick] / whole[best] - 1, floor, best


@dataclass(frozen=True)
class Summary:
    """Mean and 95th percentile over sizes, and over collectives in the total."""

    collective: str
    memory: str
    cells: int
    mean: float
    p95: float
    raw_mean: float
    floor_mean: float
    floor_p95: float
    auto: float | None


def summarise(cells: Sequence[Regret]) -> list[Summary]:
    """Give a line for each collective and kind of memory, and one of all."""
    keys = dict.fromkeys((cell.collective, cell.memory) for cell in cells)
    lines = [_line(*key, [c for c in cells if (c.collective, c.memory) == key]) for key in keys]
    return [*lines, _line("all", "", list(cells))] if cells else []


def _line(collective: str, memory: str, cells: Sequence[Regret]) -> Summary:
    regrets, floors = [c.regret for c in cells], [c.floor for c in cells]
    ratios = [c.auto for c in cells if c.auto is not None]
    return Summary(
        collective,
        memory,
        len(cells),
        _mean(regrets),
        float(np.percentile(regrets, 95)),
        _mean(c.raw for c in cells),
        _mean(floors),
        float(np.percentile(floors, 95)),
        median(ratios) if ratios else None,
    )


def _mean(values: Iterable[float]) -> float:
    return float(np.mean(list(values)))


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
    comm: Communicator,
    wish: Wish,
    on_step: Callable[[str, int], Any] = lambda collective, nbytes: None,
    stopped: Callable[[], bool] = lambda: False,
) -> Verified:
    """Measure every candidate, and the regret of what "auto" takes now; collective.

    See :mod:`mpidist.bench.regret` for what is computed, :func:`mpidist.bench.tuner.tune` for the
    parameters.  Nothing that a table was made from is used.
    """
    found = Verified()
    histories: dict[tuple[str, str], History] = {}

    def history(cell: Cell) -> History:
        return histories.setdefault((cell.collective, cell.memory), History())

    with no_garbage_collection():
        for cell in cells(comm, wish, stopped, lambda c: LEAST * history(c).cost(c.nbytes)):
            on_step(cell.collective, cell.nbytes)
            regret = _race(comm, cell, history(cell), stopped, found.wrong)
            if regret is not None:
                found.regrets.append(regret)
    found.left_out = count_cells(comm, wish) - len(found.regrets)
    return found


def _race(
    comm: Communicator, cell: Cell, before: History, stopped: Callable[[], bool], wrong: list[str]
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
