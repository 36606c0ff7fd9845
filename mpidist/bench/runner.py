"""Measures: contenders and sizes interleaved, so that drift hits all alike; results checked."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from ..measure import algbw, busbw, median, spread
from .cases import Workload
from .contenders import BARE, MEMORIES, Contender, contenders
from .records import PRIVATE, SYMMETRIC, Refusal, Results, Row
from .series import Entry, Series, Settings

PASSES = 3  # times that all sizes are gone through
LONG = 0.1  # seconds of an iteration after which no cache is warm any more


Step = Callable[[str, int], Any]


def measure(
    comm: Any,
    collectives: Sequence[str],
    settings: Settings,
    on_step: Step = lambda collective, nbytes: None,
) -> Results:
    """Measure collectives on all ranks; collective, with the same arguments everywhere.

    The time of an iteration is that of its slowest rank, from a barrier on; a row has the median.

    Parameters
    ----------
    comm : Communicator
        On which.
    collectives : sequence of str
        Which.
    settings : Settings
        The rest.
    on_step : callable
        Called with collective and bytes before each part of the work.

    Returns
    -------
    Results
        The same on every rank; its header is left empty.

    Raises
    ------
    UnknownName
        If there is no such algorithm for any of the collectives.
    Unsupported
        If there is no symmetric memory, but it was asked for.
    """
    results = Results()
    every = {
        c: contenders(comm, c, settings.algorithms, settings.memory, collectives)
        for c in collectives
    }
    for collective in collectives:
        _measure_one(comm, collective, every[collective], settings, results, on_step)
    return results


def steps(collectives: Sequence[str], settings: Settings) -> int:
    """Give the number of times that :func:`measure` calls `on_step`."""
    return sum(PASSES * len(_sizes(c, settings)) for c in collectives)


def _sizes(collective: str, settings: Settings) -> list[int]:
    return [0] if collective == "barrier" else list(settings.sizes)


def _measure_one(
    comm: Any,
    collective: str,
    who: list[Contender],
    settings: Settings,
    results: Results,
    on_step: Step,
) -> None:
    sizes = _sizes(collective, settings)
    works = workloads(comm, collective, max(sizes), settings)
    series: dict[int, Series] = {}
    with _no_garbage_collection():
        for turn in range(PASSES):
            for nbytes in sizes:
                on_step(collective, nbytes)
                if nbytes not in series:
                    series[nbytes] = Series(comm, works, nbytes, who, settings)
                elif series[nbytes].iterations > turn and series[nbytes].seconds < LONG:
                    series[nbytes].warm_up()
                series[nbytes].run(turn, PASSES)
    for one in series.values():
        results.iterations[f"{collective} {one.case.nbytes}"] = one.done
        _add(results, one, comm, settings)


def workloads(comm: Any, collective: str, largest: int, settings: Settings) -> dict[str, Workload]:
    """Give the workload of a collective in each kind of memory that is needed; collective."""
    work = Workload(
        collective,
        comm.rank,
        comm.size,
        settings.root,
        largest,
        settings.dtype,
        settings.op,
        settings.in_place,
        settings.data,
    )
    works = {PRIVATE: work}
    if SYMMETRIC in MEMORIES[settings.memory]:
        works[SYMMETRIC] = work.elsewhere(comm.empty)
    return works


@contextmanager
def _no_garbage_collection() -> Iterator[None]:
    """A collection in the midst of a call would count as its time."""
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


def _add(results: Results, series: Series, comm: Any, settings: Settings) -> None:
    """Append the rows and refusals of one size."""
    case = series.case
    results.unsupported += [
        Refusal(case.collective, who.name, case.nbytes, reason, who.memory)
        for who, reason in series.refused
    ]
    reference = next((median(e.times) for e in series.entries if e.name == BARE and e.times), None)
    for entry in series.entries:
        if entry.times:
            results.rows.append(_row(entry, reference, comm))
            if settings.bits:
                before = results.identical.get(entry.name, True)
                results.identical[entry.name] = before and entry.identical


def _row(entry: Entry, reference: float | None, comm: Any) -> Row:
    case, seconds = entry.case, median(entry.times)
    return Row(
        collective=case.collective,
        algorithm=entry.name,
        backend=BARE if entry.name == BARE else comm.backend.name,
        ranks=comm.size,
        bytes=case.nbytes,
        dtype=str(entry.work.dtype),
        op=case.op.name if case.op is not None else None,
        in_place=case.in_place,
        time_us=seconds * 1e6,
        algbw_gbs=algbw(case.nbytes, seconds),
        busbw_gbs=busbw(case.collective, case.nbytes, seconds, comm.size),
        vs_native=reference / seconds if reference is not None and seconds > 0 else None,
        correct=not entry.wrong,
        memory=entry.contender.memory,
        spread=spread(entry.times),
    )
