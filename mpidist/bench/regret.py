"""The regret of "auto": how much slower its choice is than the fastest candidate.

One half of the iterations selects the fastest candidate, the other half measures the regret;
then the halves swap their parts.  If one set of iterations did both, the luckiest
candidate would count as the fastest.  The regret is the mean of the two, and at least 0.  The
noise floor is how much slower the fastest of one half is on the other half than the fastest there:
a smaller regret is noise.  The raw regret compares the medians of all iterations.

A row of the results has the choice of "auto" as its candidate, and the figures ``best`` (the least
median of all iterations), ``regret``, ``raw`` and ``floor`` (fractions of the best time), ``auto``
(time of ``auto`` over that of its choice called by name, or None) and ``iterations``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from ..communicator.communicator import Communicator
from ..measure import median
from ..tables import Column, Line, Table
from .race import no_garbage_collection
from .results import Row
from .tuner import (
    History,
    PlannedRace,
    TuningSettings,
    all_but_the_slow,
    candidate_names,
    count_races,
    planned_races,
    steady_race,
)

_MIN_FOR_HALVES = 4  # iterations that two halves need


def score(times: Mapping[str, Sequence[float]], pick: str) -> tuple[float, float, float, str]:
    """Return the regret and raw regret of `pick`, the noise floor, and the best candidate's name.

    The first three are fractions of the best time; the module explains them.  `times` has the
    seconds of each candidate, one per iteration, of at least four iterations.
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
    """Mean and 95th percentile over sizes of the regrets of one collective and kind of memory.

    The module explains regret, raw regret and noise floor, which are fractions of the best time.
    """

    collective: str  # "all" for the summary over all rows
    memory: str  # empty for the summary over all rows
    sizes: int  # how many
    mean: float  # of the regret, as is p95
    p95: float
    raw_mean: float  # of the raw regret
    floor_mean: float  # of the noise floor, as is floor_p95
    floor_p95: float
    # Median of the time of "auto" over that of its choice called by name; None if not measured.
    auto: float | None


def summarise(rows: Sequence[Row]) -> list[Summary]:
    """Return a summary for each collective and kind of memory, and one over all of them."""
    keys = dict.fromkeys((row.work, row.memory) for row in rows)
    each = [_summary(*key, [r for r in rows if (r.work, r.memory) == key]) for key in keys]
    return [*each, _summary("all", "", rows)] if rows else []


def _summary(collective: str, memory: str, rows: Sequence[Row]) -> Summary:
    regrets, floors = [r.figures["regret"] for r in rows], [r.figures["floor"] for r in rows]
    ratios = [r.figures["auto"] for r in rows if r.figures["auto"] is not None]
    return Summary(
        collective,
        memory,
        len(rows),
        _mean(regrets),
        float(np.percentile(regrets, 95)),
        _mean(r.figures["raw"] for r in rows),
        _mean(floors),
        float(np.percentile(floors, 95)),
        median(ratios) if ratios else None,
    )


def _mean(values: Iterable[float]) -> float:
    return float(np.mean(list(values)))


@dataclass
class Verified:
    """The measured regrets of ``mpidist tune --verify``."""

    # One for each size: all candidates were called, the choice of "auto" at least 4 times.
    regrets: list[Row] = field(default_factory=list)
    # Collective, candidate and bytes of wrong results.
    wrong: list[str] = field(default_factory=list)
    left_out: int = 0  # sizes without a row, mostly for lack of time
    unsteady: int = 0  # those of them during each of whose races the machine changed


def verify(
    comm: Communicator,
    settings: TuningSettings,
    on_step: Callable[[str, int], Any] = lambda collective, nbytes: None,
    stopped: Callable[[], bool] = lambda: False,
) -> Verified:
    """Measure every candidate, and the regret of the present choice of "auto"; collective.

    See :func:`mpidist.bench.tuner.tune` for the parameters.  All is measured anew: nothing is
    reused of the run that made the tuning table.
    """
    found = Verified()
    histories: dict[tuple[str, str], History] = {}

    def history(planned: PlannedRace) -> History:
        return histories.setdefault((planned.collective, planned.memory), History())

    with no_garbage_collection():
        for planned in planned_races(
            comm, settings, stopped, lambda c: _MIN_FOR_HALVES * history(c).cost(c.nbytes)
        ):
            on_step(planned.collective, planned.nbytes)
            regret = _race(comm, planned, history(planned), stopped, found)
            if regret is not None:
                found.regrets.append(regret)
    found.left_out = count_races(comm, settings) - len(found.regrets)
    return found


def _race(
    comm: Communicator,
    planned: PlannedRace,
    before: History,
    stopped: Callable[[], bool],
    found: Verified,
) -> Row | None:
    nbytes = planned.whole(planned.nbytes)
    names, pick = candidate_names(comm, planned.collective, nbytes, planned.memory)
    first, *others = before.order(names, pick)
    every, keep = [first, "auto", *others], all_but_the_slow(pick, "auto")
    raced = steady_race(comm, planned, every, keep, stopped)
    if raced is None:
        found.unsteady += 1
        return None
    race, times = raced
    before.learn(race)
    found.wrong += [f"{planned.collective} {name} {nbytes} B" for name in race.wrong]
    auto = times.pop("auto", None)
    if not race.complete or len(times.get(pick, ())) < _MIN_FOR_HALVES:
        return None
    regret, raw, floor, best = score(times, pick)
    ratio = median(auto) / median(times[pick]) if auto else None
    row = Row(planned.collective, pick, comm.size, 1e6 * median(times[pick]))
    row.bytes, row.memory = nbytes, planned.memory
    row.figures = {"best": best, "regret": regret, "raw": raw, "floor": floor, "auto": ratio}
    row.figures["iterations"] = len(times[pick])
    return row


def summary_table(summaries: Sequence[Summary]) -> Table:
    """Return a table of the summaries; regrets and noise floors are in percent."""
    figures = ("sizes", "mean", "95th", "raw\nmean", "noise\nfloor", "its\n95th", "auto /\nchoice")
    lines = []
    for one in summaries:
        parts = (one.mean, one.p95, one.raw_mean, one.floor_mean, one.floor_p95)
        percents = [f"{100 * part:.1f}" for part in parts]
        auto = "" if one.auto is None else f"{one.auto:.2f}"
        lines.append(Line([one.collective, one.memory, str(one.sizes), *percents, auto]))
    return Table(
        "",
        [Column.names("collective"), Column.names("memory"), *map(Column.numbers, figures)],
        lines,
    )


def between(sizes: Sequence[int]) -> list[int]:
    """Return the ascending `sizes` and the geometric mean of each two neighbours, sorted."""
    middles = [round((low * high) ** 0.5) for low, high in zip(sizes, sizes[1:])]
    return sorted({*sizes, *middles})
