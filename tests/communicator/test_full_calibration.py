"""The full calibration: turns of calls, and the figures of all ranks."""

import threading
import time
from functools import partial

import numpy as np
import pytest

from mpidist import run_simulated
from mpidist.backends.executor import MESSAGES
from mpidist.communicator import full_calibration
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


def test_rare_turns_are_in_each_third_pass_and_low_times_are_those_measured():
    def run(comm):
        acts = []
        turns = [(acts.append, partial(acts.append, None)) for _ in range(2)]
        return in_turns(comm, turns, 0.0, least=7, most=7, rare={1}), acts

    (times, acts), (same, _) = run_simulated(2, run)
    assert np.isnan(times[:, 1]).tolist() == [True, True, False, True, True, False, True]
    assert not np.isnan(times[:, 0]).any() and np.array_equal(times, same, equal_nan=True)
    assert [number for number in acts if number is not None] == [0, 0, 1, 2, 3, 3, 4, 5, 6, 6, 7]
    assert tenth(times)[1] == np.nanmin(times[:, 1]) and deviation(times) >= 0.0


def test_clocks_of_other_nodes_are_set_by_rank_0s_also_where_they_run_faster(monkeypatch):
    """Those of node b are 100 s ahead, and gain 1 % of the time."""
    fast, real = threading.local(), time.perf_counter

    def clock():
        return real() + (100 + 0.01 * real() if getattr(fast, "is_so", False) else 0.0)

    def offset(comm):
        comm.barrier()
        return 100 + 0.01 * real() if getattr(fast, "is_so", False) else 0.0, 0.0

    monkeypatch.setattr(full_calibration, "perf_counter", clock)
    monkeypatch.setattr(full_calibration, "clock_offset", offset)

    def run(comm):
        fast.is_so = comm.topology.node_rank == 1
        nap = (lambda number: None, lambda: time.sleep(0.02))
        return in_turns(comm, [nap, nap], 0.0, least=3, most=3)

    first, second = run_simulated(2, run, nodes="ab")
    assert (first == second).all()
    assert 0.019 < np.median(first) < 0.2, "0.02 s, however long a busy machine takes"


@pytest.mark.parametrize(("nodes", "far"), [("aab", True), ("ab", False)])
def test_messages_between_nodes_have_curves_of_their_own(nodes, far, monkeypatch):
    sizes = 8, 1 << 10, 1 << 16
    monkeypatch.setattr(full_calibration, "SIZES", (*sizes, 16 << 20))

    def run(comm):
        found = calibrate_fully(comm, 0.0)
        two = next(one for one in comm.explain("allreduce", 1 << 16)[1] if one.executor == MESSAGES)
        return found, two.seconds

    (found, seconds), *others = run_simulated(len(nodes), run, nodes=nodes)
    assert all(other == found for other, _ in others)
    assert (found.far is not None) is far, "where all messages are, they are those of a node"
    assert found.messages.occupies is far, "messages between nodes leave the processors free"
    assert found.messages.one_way.sizes == sizes and seconds > found.messages.call
    if far:
        assert not found.far.occupies
        assert found.far.both_ways.sizes == sizes and found.far.call == found.messages.call


def test_low_and_spread_of_columns():
    times = np.array([[k, 100.0] for k in range(1, 22)])
    assert tenth(times).tolist() == [3.0, 100.0]
    assert deviation(times[:, 1:]) == 0 and deviation(times[:, :1]) == 5 / 11


def test_calibrate_fully_is_the_same_on_all_ranks_and_predicts_messages():
    def run(comm):
        found = calibrate_fully(comm, 0.0, 1 << 16)
        every = comm.explain("allreduce", 1 << 16)[1]
        return found, {one.name: one.seconds for one in every if one.can}

    (found, times), (other, _) = run_simulated(2, run)
    assert found == other and found.kernels == () and found.noise >= 0
    assert found.messages.call > 0 and found.messages.both_ways.at(8) > 0
    assert times["ring"] > found.messages.call
    assert run_simulated(1, calibrate_fully)[0].ranks_per_node == ()
