"""Times of a step, and what stats() makes of them."""

import numpy as np

from mpidist import run_simulated
from mpidist.parallel import DDP
from mpidist.parallel.stats import Clock
from tests.support.training_kits import Weights


def test_clock_times_of_a_step(monkeypatch):
    moments = iter([0.0, 5.0, 7.0, 10.0, 12.0])  # begin; sync begins, ends; without a begin
    monkeypatch.setattr("mpidist.parallel.stats.perf_counter", lambda: next(moments))
    clock = Clock()
    clock.begin()
    clock.within(0.5)
    clock.sync_begins()
    spans = [(3.0, 4.0), (1.0, 3.5), (6.0, 6.5)]  # four seconds are covered, less a gap
    clock.end(spans)
    assert (clock.compute, clock.exposed, clock.communication) == (4.5, 2.5, 3.5)
    assert clock.hidden == 1.0 and clock.last == 7.0 and spans == []
    clock.sync_begins()
    clock.end([])
    assert (clock.steps, clock.exposed, clock.last) == (2, 4.5, 0.0)


def test_stats_are_means_over_steps():
    """Times are means over the steps; without a step zeros."""

    def rank_main(comm):
        model = DDP(Weights(np.zeros(3, np.float32)), comm)
        zero = model.stats()
        assert (zero.steps, zero.compute, zero.hidden) == (0, 0.0, 0.0)
        clock = model.reducer.clock
        clock.steps, clock.compute, clock.exposed = 4, 8.0, 4.0
        clock.communication, clock.hidden = 12.0, 2.0
        found = model.stats()
        assert (found.steps, found.compute, found.exposed) == (4, 2.0, 1.0)
        assert (found.communication, found.hidden, found.bytes) == (3.0, 0.5, 12)
        assert str(found).startswith(
            "4 steps: compute 2,000 ms, exposed 1,000 ms, communication 3,000 ms (17% hidden), "
            "12 bytes in"
        )
        scalars = found.scalars()
        assert scalars["compute"] == 2.0 and scalars["bytes"] == 12.0 and "overlap" not in scalars
        assert {type(value) for value in scalars.values()} == {float}

    run_simulated(2, rank_main)
