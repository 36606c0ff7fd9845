"""The probes of messages: schedules whose times give back the model that they were timed by."""

from dataclasses import fields

import numpy as np
import pytest

from mpidist import run_simulated
from mpidist.communicator.layers import probes
from mpidist.engine.probes import SIZES, calls_of, choice_of, fit
from mpidist.schedule.cost import timed
from mpidist.schedule.memory import SymbolicMemory
from mpidist.schedule.model import Curve, Messages

FEW = (8, 4096, 1 << 20)


def line(first, slope):
    return Curve.through(FEW, [first + slope * (n - FEW[0]) for n in FEW])


MODEL = Messages(
    call=10.0,
    strand=Curve.through([n // 2 for n in FEW], [3.0, 3.5, 90.0]),
    further=Curve.through([n // 2 for n in FEW], [1.0 + 1e-3 * (n // 2 - 4) for n in FEW]),
    onward=Curve.through([n // 2 for n in FEW], [1.5 + 1e-3 * (n // 2 - 4) for n in FEW]),
    one_way=line(4.0, 1e-3),
    both_ways=line(6.0, 2e-3),
    one_way_written=line(5.0, 4e-3),
    both_ways_written=line(6.0, 5e-3),
    combine=line(2.0, 6e-3),
    combine_apart=line(2.5, 7e-3),
    copy=line(0.5, 8e-3),
)


@pytest.mark.parametrize("size", [2, 3, 4])
def test_fit_of_the_probes_own_times_is_the_model(size, monkeypatch):
    """What the machine adds to one term, no other term gets."""
    monkeypatch.setattr(
        SymbolicMemory, "check_end", lambda *_: (None, True)
    )  # they compute nothing
    seconds = {
        (name, nbytes): timed(
            "allreduce", choice_of(name), size, nbytes, MODEL, in_place=call.in_place
        ).seconds
        for (name, nbytes), call in calls_of(0, size, FEW).items()
    }
    found = fit(seconds, front=0.0)
    for field in fields(Messages):
        mine, expected = getattr(found, field.name), getattr(MODEL, field.name)
        if isinstance(expected, Curve):
            assert mine.sizes == expected.sizes
            assert mine.seconds == pytest.approx(expected.seconds), field.name
        else:
            assert mine == pytest.approx(expected), field.name
    assert fit(seconds, front=2.0).call == pytest.approx(12.0)


@pytest.mark.parametrize("size", [2, 3])
def test_probes_run_on_any_ranks_and_move_what_they_say(size):
    def run(comm):
        calls, runs = probes(comm, "recursive_doubling", SIZES)
        assert {nbytes for _, nbytes in runs} == set(SIZES)
        found = {}
        for key, act in runs.items():
            call = calls[key]
            call.out[:] = 0
            call.x[:] = 1 + comm.rank
            act()
            found[key] = float(call.out[0]), float(call.out[-1])
        return found

    first, second = run_simulated(size, run)[:2]
    left = 1.0 + (size - 1)  # of rank 0
    for nbytes in SIZES:
        for name in ("fold", "fold apart"):
            assert first[name, nbytes] == (1.0 + left, 1.0 + left)
        assert second["ping", nbytes] == (1.0, 1.0), "rank 0's"
        assert first["shift apart", nbytes] == (1.0, 1.0), "copied"
        assert first["shift 3", nbytes] == (1.0, 1.0) if size == 2 else True
    assert first["recursive_doubling", SIZES[0]] == (np.arange(size + 1).sum(),) * 2
