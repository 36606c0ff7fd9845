"""Predicted times beside measured ones: what the cost model is worth on this machine.

The probes of the calibration, which are none of the calls that are predicted, and those calls take
turns, each after its input was written anew: another load, or another core, meets both alike.  A
time is the 10th percentile, from the last rank's begin to the last rank's end::

    write, barrier, probe | write, barrier, call | write, barrier, another call | …

A row has the figures ``predicted_us``, and ``error``: predicted over measured time, less 1.  The
regret of "auto", which chooses by the predictions, is the time of its choice over the least, less
1; what was fastest by luck counts as the fastest, so it is rather too large.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from ..backends.executor import MESSAGES
from ..communicator.communicator import Communicator
from ..communicator.full_calibration import (
    FullCalibration,
    Turn,
    fewest,
    in_turns,
    tenth,
    why_not,
)
from ..errors import Unsupported
from ..measure import counted, median
from ..selection.names import NATIVE, SYMMETRIC
from ..selection.tuning import PRIVATE
from .candidates import memories, ours
from .cases import Case, Workload
from .machine import make_header
from .race import no_garbage_collection
from .results import Results, Row

MEMORY, BY_NAME = "shared memory", "schedules in shared memory"
MOST = 1000  # passes
NOISY = 0.15  # noise from which errors say little of the model


@dataclass
class Cell:
    """One call to predict and to measure."""

    row: Row
    case: Case
    work: Workload
    call: Callable[[], Any]
    kind: str  # by which errors are summed up: one of those below


def predict(
    comm: Communicator, collectives: Sequence[str], sizes: Sequence[int], seconds: float
) -> Results:
    """Predict and measure calls of private float32 arrays, and symmetric ones; collective.

    `sizes` are bytes of the whole buffer; `seconds` is about how long to measure.  Return a row for
    each algorithm by messages and each executor, the same on every rank.  Raise Unsupported if the
    ranks share cores, or are alone: then nothing can be predicted.
    """
    header, reason = make_header(comm), why_not(comm)
    if reason is not None:
        raise Unsupported(reason)
    full = FullCalibration(comm, max(sizes))
    cells = _cells(comm, full, collectives, sizes)
    if not cells:
        raise Unsupported("nothing to predict: expected a collective that has data")
    with no_garbage_collection():
        for cell in cells:
            cell.call()
        turns = [*full.turns, *map(_turn, cells)]
        times = in_turns(comm, turns, seconds, fewest(comm), MOST, full.rare)
    known = full.learn(times[:, : len(full.turns)])
    for cell, time in zip(cells, tenth(times[:, len(full.turns) :]).tolist()):
        cell.row.time_us = 1e6 * time
    regrets = _add_predictions(comm, cells)
    results = Results(header, [cell.row for cell in cells], benchmark="predict")
    results.notes += [*_summaries(cells), _regret_text(regrets)]
    results.notes.append(_noise_text(known.noise, len(times)))
    return results


def _cells(
    comm: Communicator, full: FullCalibration, collectives: Sequence[str], sizes: Sequence[int]
) -> list[Cell]:
    """Return the calls of every algorithm by messages, and of every executor."""
    cells = []
    for collective in collectives:
        private = Workload(collective, comm.rank, comm.size, 0, max(sizes), np.float32)
        for memory in memories(comm, collective):
            work = private if memory == PRIVATE else private.elsewhere(comm.empty)
            for nbytes in dict.fromkeys(work.case(n).nbytes for n in sizes):
                for one in comm.explain(collective, nbytes, memory=memory)[1]:
                    symmetric, schedule = one.executor == SYMMETRIC, one.choice is not None
                    if not one.can or (memory != PRIVATE) != symmetric:
                        continue
                    by_name = schedule and (one.name, collective) not in full.kernels
                    case = work.case(nbytes)
                    row = Row(collective, one.name, comm.size, 0.0, bytes=nbytes, memory=memory)
                    other = BY_NAME if by_name else MEMORY
                    kind = {MESSAGES: MESSAGES, NATIVE: NATIVE}.get(one.executor, other)
                    cells.append(Cell(row, case, work, ours(comm, case, one.name), kind))
    return cells


def _add_predictions(comm: Communicator, cells: Sequence[Cell]) -> list[float]:
    """Add the predictions to the rows; return the regret of each choice of "auto" by them."""
    alike: dict[tuple[str, int | None], list[Row]] = {}
    for row in (cell.row for cell in cells):
        alike.setdefault((row.work, row.bytes), []).append(row)
    regrets = []
    for (work, nbytes), rows in alike.items():
        for memory in dict.fromkeys(row.memory for row in rows):
            chosen, every = comm.explain(work, nbytes or 0, memory=memory)
            seconds = {one.name: one.seconds for one in every}
            for row in (row for row in rows if row.memory == memory):
                predicted = seconds[row.candidate]
                if predicted is not None:
                    row.figures["predicted_us"] = 1e6 * predicted
                    row.figures["error"] = 1e6 * predicted / row.time_us - 1
            # Private ways serve symmetric arrays too.
            able = [row for row in rows if row.memory in (memory, PRIVATE)]
            names = chosen.name, chosen.name.partition(":")[0]
            # Between nodes it may be one that names its levels, which is not among the rows.
            for taken in [row for row in able if row.candidate in names][:1]:
                regrets.append(taken.time_us / min(row.time_us for row in able) - 1)
    return regrets


def _regret_text(regrets: Sequence[float]) -> str:
    if not regrets:
        return "choices: none is among the measured calls"
    mean, most = float(np.mean(regrets)), float(np.percentile(regrets, 95))
    return (
        f"choices: mean regret {100 * mean:.1f} %, 95th percentile {100 * most:.0f} %, of "
        f"{counted(len(regrets), 'call')}"
    )


def _turn(cell: Cell) -> Turn:
    def write(number: int) -> None:
        if cell.case.out is not None and not cell.case.in_place:
            cell.case.out.fill(0)
        cell.case.fill(cell.work.next_turn())

    return write, cell.call


def _summaries(cells: Sequence[Cell]) -> list[str]:
    lines = []
    for kind in (MESSAGES, MEMORY, BY_NAME, NATIVE):
        rows = [cell.row.figures for cell in cells if cell.kind == kind]
        errors = [abs(figures["error"]) for figures in rows if "error" in figures]
        if errors:
            worst = float(np.percentile(errors, 90))
            lines.append(
                f"{kind}: median error {100 * median(errors):.1f} %, 90th percentile "
                f"{100 * worst:.0f} %, of {len(errors)} calls"
            )
    return lines


def _noise_text(noise: float, passes: int) -> str:
    text = f"noise: {100 * noise:.1f} % (median deviation of the probes); {passes} passes"
    return f"{text}: too noisy to judge the model" if noise > NOISY else text
