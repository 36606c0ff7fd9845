"""Outlooks: every algorithm of messages on a job that is not here, and why some have no times."""

import pytest

from mpidist.errors import InvalidArgument
from mpidist.schedule import Recv, Send, algorithm, algorithms
from mpidist.schedule.cost import Link, cost
from mpidist.schedule.registry import _registry
from mpidist.selection import outlook as module
from mpidist.selection.outlook import nodes_of, outlook

RATES = {"alpha": 1e-6, "beta": 1e-10, "gamma": 5e-11}


def named(rows):
    return {row.algorithm: row for row in rows}


@pytest.mark.parametrize(("ranks", "nodes"), [(12, 1), (12, 4), (136, 1)])
def test_every_algorithm_has_the_times_of_the_cost_model_or_a_reason(ranks, nodes):
    link = Link(5e-6, 1e-9)
    steps = []
    known = {"link": link, **RATES}
    rows = outlook("allgather", 1 << 16, ranks, nodes, on_step=lambda: steps.append(1), **known)
    assert len(rows) == len(steps) == len(algorithms("allgather"))
    timed = [row for row in rows if row.seconds is not None]
    assert rows[: len(timed)] == sorted(timed, key=lambda row: row.seconds)
    for row in timed:
        if ranks > 100 and row.algorithm == "direct":
            continue  # one by one it takes a minute
        groups = nodes_of(ranks, nodes)
        found = cost("allgather", row.algorithm, ranks, 1 << 16, groups=groups, **known)
        assert row.seconds == pytest.approx(found.seconds, rel=1e-9)
        assert (row.messages, row.nbytes) == (max(found.messages), max(found.sent))
        assert row.rounds == found.rounds and row.why == ""
    reasons = {row.algorithm: row.why for row in rows[len(timed) :]}
    assert all(reasons.values())
    assert ("hierarchical" in reasons) == (nodes == 1)


def test_an_odd_number_of_ranks_has_its_reason():
    found = named(outlook("allgather", 1000, 33, **RATES))["neighbor_exchange"]
    assert found.seconds is None and found.rounds is None and "even number of ranks" in found.why


def test_the_bytes_of_a_barrier_do_not_count():
    assert outlook("barrier", 1 << 20, 300, **RATES) == outlook("barrier", 0, 300, **RATES)


def test_a_schedule_without_a_pattern_has_a_reason_and_above_the_limit_too(monkeypatch):
    monkeypatch.setattr(module, "ONE_BY_ONE", 1000)
    rows = named(outlook("reduce_scatter", 1 << 20, 600, **RATES))
    assert "sends 599 messages in one round" in rows["direct"].why
    assert "about 359,400 messages are too many" in rows["direct"].why
    monkeypatch.setattr(module, "MANY", 500)
    rows = named(outlook("reduce_scatter", 1 << 20, 600, **RATES))
    assert "one by one up to 500" in rows["direct"].why


def test_a_faulty_algorithm_has_its_fault_as_the_reason():
    @algorithm("barrier", "faulty")
    def faulty(rank, size):
        yield Send((rank + 1) % size) if rank else Recv(size - 2)

    try:
        found = named(outlook("barrier", 0, 5, **RATES))["faulty"]
    finally:
        del _registry["barrier", "faulty"]
    assert found.seconds is None and "deadlock" in found.why


@pytest.mark.parametrize(("ranks", "nodes"), [(10, 3), (2, 4), (0, 1), (4, 0)])
def test_nodes_that_do_not_divide_the_ranks_are_refused(ranks, nodes):
    with pytest.raises(InvalidArgument, match=rf"{ranks} ranks on {nodes} nodes: expected"):
        outlook("allreduce", 8, ranks, nodes, **RATES)


@pytest.mark.parametrize(("nbytes", "ranks"), [(8, module.MOST + 1), (1 << 44, 1 << 20)])
def test_ranks_or_bytes_beyond_what_can_be_counted_are_refused(nbytes, ranks):
    with pytest.raises(InvalidArgument, match=rf"{ranks} ranks: expected at most \d+"):
        outlook("allreduce", nbytes, ranks, **RATES)


def test_ranks_of_a_node_follow_each_other():
    assert nodes_of(6, 3) == ((0, 1), (2, 3), (4, 5)) and nodes_of(6, 1) is None


@pytest.mark.parametrize("nbytes", [1, 7, 1001])
def test_blocks_that_move_count_as_the_longest_ones(nbytes):
    for ranks in (2, 3, 5, 16, 18):
        row = named(outlook("alltoall", nbytes, ranks, **RATES))["bruck"]
        sent = max(cost("alltoall", "bruck", ranks, nbytes, **RATES).sent)
        assert sent <= row.nbytes <= sent + ranks * ranks.bit_length()
