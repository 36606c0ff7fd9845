"""Calls, tables and means to choose from, for tests of the choice and what it stands on."""

from dataclasses import replace

import numpy as np

from mpidist import CollectiveConfig
from mpidist.calls.call import Call
from mpidist.operations import OPS
from mpidist.schedule.model import Curve
from mpidist.schedule.registry import find
from mpidist.selection.calibration import Calibration
from mpidist.selection.choose import Candidates, Means, choose
from mpidist.selection.estimates import Estimates
from mpidist.selection.tuning import Key, TuningEntry, TuningTable

KEY = Key("simulated", (4,), "float", "allreduce", "private")
TIMES = {
    64: {"ring": 8e-6, "tree:4": 2e-6, "linear": 3e-6},
    1024: {"ring": 8e-6, "tree:4": 32e-6},
}


def table(chosen=None, times=TIMES, key=KEY, source="t.json"):
    return TuningTable(
        [TuningEntry.from_points(key, chosen or {64: "tree:4", 1024: "ring"}, times)], {}, source
    )


def call_for(count, op="sum", dtype="float32", size=4, collective="allreduce"):
    x = np.broadcast_to(np.zeros(1, dtype), (count,))
    op = OPS[op] if isinstance(op, str) else op
    return Call(collective, 0, size, 0, x.dtype, x, x, op)


def advised(tuning, groups=((0, 1, 2, 3),), **more):
    return Estimates("simulated", groups, tuning=tuning, **more)


RUNS = {
    "symmetric": ["in_place"],
    "staged": ["slots", "slots_one_shot"],
    "single_copy": ["published"],
}


def schedules(executor):
    return [find("allreduce", name) for name in RUNS.get(executor, ())]


def means_of(groups=((0, 1, 2, 3),), native=None, symmetric="no array is symmetric", **more):
    """Reasons as of a communicator, by default one with native collectives only."""
    reasons = {
        "native": native,
        "symmetric": symmetric,
        "staged": "the ranks share no memory",
        "single_copy": "the ranks share no memory",
    }
    return Means(groups, reasons | more, schedules=schedules)


MEANS = means_of(native="there is no native here")


def chosen(tuning, call, algorithm="auto", config=None, means=MEANS, **more):
    candidates, config = Candidates(call, means), config or CollectiveConfig()
    return choose(candidates, algorithm, config, advised(tuning, **more))


KNOWN = Calibration.straight(1e-5, 1e-9, 1e-10)


def full(kernels, ranks_per_node=(4,), **more):
    """A full calibration: `kernels` maps the name of an executor and a collective to a time."""
    curves = tuple(
        (*key, Curve((8, 16 << 20), (seconds,) * 2, 0.0)) for key, seconds in kernels.items()
    )
    known = replace(KNOWN, kernels=curves, library="simulated", ranks_per_node=ranks_per_node)
    return replace(known, **more)
