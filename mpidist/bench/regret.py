"""How much is lost by a choice: regret against the best candidate, scored on held-out iterations.

The iterations of one size are cut into two halves, the even and the odd ones.  Of each half the
best candidate is the one with the least median.  The **regret** of a choice is its median over that
of the best candidate, less 1, where the best is found on one half and both are scored on the other,
averaged over both directions; below 0 it counts as 0.  So the oracle has no advantage from the luck
of the iterations that it is found on.  The **noise floor** is the oracle's own: the median, on one
half, of the candidate that was the best on the other half, over the least one there, less 1.
**Raw** regret is the choice's median over the least median, both of all iterations: it includes
the oracle's luck.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from ..measure import median

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
