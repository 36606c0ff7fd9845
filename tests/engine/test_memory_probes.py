"""The probes of memory: schedules whose times give back the model that they were timed by."""

from dataclasses import fields

import numpy as np
import pytest

from mpidist.communicator.layers import memory_probes
from mpidist.engine.memory_probes import NAMES, SIZES, calls_of, choice_of, fit
from mpidist.schedule.cost import Sharing, timed
from mpidist.schedule.memory import SymbolicMemory
from mpidist.schedule.model import Curve, Messages

FREE = Messages.straight(0.0, 0.0, 0.0)


def line(first, slope):
    return Curve.through(SIZES, [first + slope * (n - SIZES[0]) for n in SIZES])


MODEL = Sharing(
    meeting=3.0,
    read=line(1.0, 1e-3),
    store=line(1.5, 2e-3),
    fold=line(2.0, 3e-3),
    copy=line(0.5, 4e-3),
    call=10.0,
)


@pytest.mark.parametrize("memory", NAMES)
@pytest.mark.parametrize("size", [2, 3, 4])
def test_fit_of_the_probes_own_times_is_the_model(size, memory, monkeypatch):
    """What the machine adds to one term, no other term gets."""
    monkeypatch.setattr(
        SymbolicMemory, "check_end", lambda *_: (None, True)
    )  # they compute nothing
    calls = calls_of(memory, 0, size, lambda shape: np.empty(shape, np.uint8))
    seconds = {
        (name, nbytes): timed(
            *(call.collective, choice_of(name), size, call.nbytes, FREE), sharing=MODEL
        ).seconds
        for (name, nbytes), call in calls.items()
    }
    found = fit(memory, seconds, size, front=0.0)
    for field in fields(Sharing):
        mine, expected = getattr(found, field.name), getattr(MODEL, field.name)
        if memory == "published" and field.name == "store":
            assert mine.at(1 << 20) == 0.0, "others cannot be written to"
        elif isinstance(expected, Curve):
            assert mine.sizes == expected.sizes
            assert mine.seconds == pytest.approx(expected.seconds), field.name
        else:
            assert mine == pytest.approx(expected), field.name
    assert fit(memory, seconds, size, front=2.0).call == pytest.approx(12.0)


@pytest.mark.one_node
@pytest.mark.mpi(min_size=2)
def test_probes_run_and_move_what_they_say(comm):
    calls, runs = memory_probes(comm)
    if comm.backend.native is None:
        assert calls == runs == {}, "simulated ranks share no memory"
        return
    assert {name.partition(" ")[0] for name, _ in runs} >= {"mapped", "slots"}
    right, left = (comm.rank + 1) % comm.size, (comm.rank - 1) % comm.size
    for (name, nbytes), act in runs.items():
        call, what = calls[name, nbytes], name.partition(" ")[2]
        call.out[:] = 0
        call.x[:] = 1 + comm.rank
        comm.barrier()
        act()
        comm.barrier()
        expected = {
            "get": 1 + right,
            "put": 1 + left if name.startswith("mapped") else 1 + comm.rank,
            "fold": 2 + comm.rank + right,
        }.get(what, 1 + comm.rank)
        assert (call.out == expected).all(), (name, nbytes)
