"""The full calibration: turns of calls, and the figures of all ranks."""

import numpy as np

from mpidist import run_simulated
from mpidist.communicator.full_calibration import calibrate_fully, deviation, in_turns, tenth


def test_in_turns_measures_each_call_in_each_pass_from_the_last_begin():
    def run(comm):
        acts = []
        turns = [
            (lambda number, k=k: acts.append((k, number)), lambda k=k: acts.append(k))
            for k in range(3)
        ]
        times = in_turns(comm, turns, 0.0, least=4, most=9)
        return acts, times

    (acts, times), (others, same) = run_simulated(2, run)
    assert times.shape == (4, 3) and (times == same).all(), "without the first pass"
    assert acts == others, "in one order on all ranks"
    before = acts[0::2]
    assert acts[1::2] == [k for k, _ in before]
    passes = [before[3 * n : 3 * n + 3] for n in range(5)]
    assert all(sorted(one) == [(k, n) for k in range(3)] for n, one in enumerate(passes))
    assert len({tuple(k for k, _ in one) for one in passes}) > 1, "in another order"


def test_low_and_spread_of_columns():
    times = np.array([[k, 100.0] for k in range(1, 22)])
    assert tenth(times).tolist() == [3.0, 100.0]
    assert deviation(times[:, 1:]) == 0 and deviation(times[:, :1]) == 5 / 11


def test_calibrate_fully_is_the_same_on_all_ranks_and_predicts_messages():
    def run(comm):
        found = calibrate_fully(comm, 0.0)
        every = comm.explain("allreduce", 1 << 16)[1]
        return found, {one.name: one.seconds for one in every if one.can}

    (found, times), (other, _) = run_simulated(2, run)
    assert found == other and found.kernels == () and found.noise >= 0
    assert found.messages.call > 0 and found.messages.both_ways.at(8) > 0
    assert times["ring"] > found.messages.call
    assert run_simulated(1, calibrate_fully)[0].ranks_per_node == ()
