"""The tuner: finds the fastest way for each call by successive halving."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from ..calls.prepare import Place
from ..communicator.explain import example_call
from ..measure import median
from ..operations import find_op
from ..selection.tuning import Entry, Key, TuningTable, kind_for
from .race import History, Race, candidates, faster_half
from .rounds import Cell, Wish, cells, count_cells, undisturbed

MARGIN = 1.03  # what is not faster by more than this is noise: no reason to leave a choice

Step = Callable[[str, int], Any]


@dataclass
class Tuned:
    """What a run of the tuner found.

    Attributes
    ----------
    table : TuningTable
        Grows as sizes are done.
    wrong : list of str
        Who gave a wrong result, where.
    measured, left_out : int
        Sizes that were measured, and that there was no time for.
    """

    table: TuningTable
    wrong: list[str] = field(default_factory=list)
    measured: int = 0
    left_out: int = 0


def tune(
    comm: Any,
    wish: Wish,
    about: Mapping[str, Any],
    on_step: Step = lambda collective, nbytes: None,
    on_table: Callable[[TuningTable], Any] = lambda table: None,
    stopped: Callable[[], bool] = lambda: False,
) -> Tuned:
    """Find the fastest way for each call; collective, with the same arguments on every rank.

    Parameters
    ----------
    comm : Communicator
        On which.
    wish : Wish
        What, and for how long.
    about : mapping
        Goes into the table.
    on_step : callable
        Called with collective and bytes before each size.
    on_table : callable
        Called with the table whenever an entry has changed.
    stopped : callable
        Tells on rank 0 whether to end: what was measured so far is kept.

    Returns
    -------
    Tuned
        The same on every rank.
    """
    found = Tuned(TuningTable((), about))
    histories: dict[tuple[str, str], History] = {}
    chosen: dict[Key, dict[int, str]] = {}
    times: dict[Key, dict[int, dict[str, float]]] = {}

    def history(cell: Cell) -> History:
        return histories.setdefault((cell.collective, cell.memory), History())

    with undisturbed():
        for cell in cells(comm, wish, stopped, lambda c: history(c).cost(c.nbytes)):
            on_step(cell.collective, cell.nbytes)
            before = history(cell)
            race = Race(comm, cell.works, cell.nbytes, cell.memory, cell.until, stopped)
            nbytes = race.case.nbytes
            names, usual = candidates(comm, cell.collective, nbytes, cell.memory)
            finalists = race.run(before.order(names, usual), faster_half(usual))
            found.wrong += [f"{cell.collective} {name} {nbytes} B" for name in race.wrong]
            right = {n: t for n, t in finalists.items() if n not in race.wrong and t}
            if not right:
                continue
            key = key_of(comm, cell.collective, cell.memory, wish.dtype)
            ways = chosen.setdefault(key, {})
            previous = ways[max(ways)] if ways else usual
            ways[nbytes] = settle(right, usual, previous)
            times.setdefault(key, {})[nbytes] = before.learn(race)
            found.table.entries[key] = Entry.from_points(key, ways, times[key])
            found.measured += 1
            on_table(found.table)
    found.left_out = count_cells(comm, wish) - found.measured
    return found


def settle(finalists: Mapping[str, list[float]], usual: str, previous: str) -> str:
    """Choose: the usual way, or that of the size before, unless another is faster by a margin."""
    medians = {name: median(seconds) for name, seconds in finalists.items()}
    best = min(medians, key=lambda name: medians[name])
    for name in (usual, previous):
        if name in medians and medians[name] <= MARGIN * medians[best]:
            return name
    return best


def key_of(comm: Any, collective: str, memory: str, dtype: Any) -> Key:
    """Give the key that calls of a collective on arrays of `dtype` look up."""
    call = example_call(Place(comm.rank, comm.size), collective, 8, find_op("sum"))
    call.dtype = np.dtype(dtype)
    library = comm.backend.library
    return Key(library, tuple(map(len, comm.topology.groups)), kind_for(call), collective, memory)
