"""Scores: how few runs of a generator stand for all ranks, and what they say of each."""

from dataclasses import replace

import numpy as np
import pytest

import mpidist
from mpidist.schedule import Recv, Send
from mpidist.schedule.clocks import Rates
from mpidist.schedule.cost import timed, together
from mpidist.schedule.model import Messages
from mpidist.schedule.ranks import Unfit
from mpidist.schedule.registry import Algorithm, find
from mpidist.schedule.score import _score, loads_of, messages_about, scores_of


def score_of(*given, **known):
    return next(scores_of(*given, **known))


def scored(collective, name, size, nbytes=0, groups=None):
    return score_of(find(collective, name).algorithm, size, nbytes, groups=groups)


def nodes(count, each):
    return tuple(tuple(range(k * each, (k + 1) * each)) for k in range(count))


@pytest.mark.parametrize(
    ("collective", "name", "lanes", "parts"),
    [
        ("allreduce", "ring", 1, 1),
        ("barrier", "dissemination", 1, 1),
        ("alltoall", "pairwise", 1, 1),
        ("alltoall", "bruck", 1, 1),
        ("allgather", "neighbor_exchange", 2, 2),
        ("allreduce", "recursive_doubling", 1, 1),
        ("allreduce", "rabenseifner", 1, 1),
        ("broadcast", "binomial", 64, 7),
        ("scan", "recursive_doubling", 64, 12),
    ],
)
def test_a_pattern_has_few_lanes_or_parts(collective, name, lanes, parts):
    score = scored(collective, name, 64)
    assert (score.lanes, score.count, len(score.parts)) == (lanes, 64 // lanes, parts)
    assert sorted(np.concatenate([part.lanes for part in score.parts])) == list(range(lanes))


def test_rounds_that_recur_are_one_beat():
    line = scored("allreduce", "ring", 1000).parts[0].line
    assert line.rounds == 1998 and len(line.beats) == 2
    assert line.numbers.tolist() == [0] * 999 + [1] * 999


def test_a_million_ranks_of_a_tree_have_a_part_for_each_height():
    score = scored("reduce", "binomial", 1 << 20, 1 << 20)
    assert len(score.parts) == 21 and max(len(part.lanes) for part in score.parts) == 1 << 19


def test_equal_nodes_have_a_lane_for_each_rank_of_one():
    score = scored("allgather", "hierarchical", 4096, 4096, nodes(512, 8))
    assert (score.lanes, score.count) == (8, 512)
    many = scored("allreduce", "ring", 1 << 15, 1 << 15, nodes(1 << 13, 4))
    assert (many.lanes, many.count) == (4, 1 << 13)


def test_nodes_that_exchange_in_any_order_are_one():
    for name, lanes in (("recursive_doubling", 8), ("rabenseifner", 8), ("binomial", 64)):
        score = scored("allreduce", name, 64, 64 * 64, nodes(8, 8))
        assert (score.lanes, score.count) == (lanes, 64 // lanes)
    exchange = scored("allreduce", "recursive_doubling", 64, 64, nodes(8, 8)).parts[0].line
    orders = [beat.sends[0].turns for beat in exchange.beats]
    assert orders == [0, 0, 0, 1, 2, 3]  # in the node, and with the nodes at distance 1, 2 and 4
    folded = scored("allreduce", "recursive_doubling", 60, 64, nodes(5, 12))
    assert folded.lanes == 60  # some nodes have extras


def test_an_algorithm_that_asks_each_rank_something_else_has_no_pattern():
    def table(rank, size):
        partner = [other ^ 1 for other in range(size)][rank]
        yield Send(partner), Recv(partner)

    algorithm = Algorithm("barrier", "table", table)
    with pytest.raises(Unfit, match=r"\d+ cases"):
        score_of(algorithm, 2048, 0)


def test_a_rank_with_too_many_messages_is_named():
    with pytest.raises(Unfit, match="rank 0 has over 20,000 messages"):
        scored("reduce", "linear", 30_000)
    with pytest.raises(Unfit, match="each of the 99,999 others"):
        scored("allreduce", "direct", 100_000, 1)


def test_rounds_that_do_not_recur_are_not_all_read(monkeypatch):
    monkeypatch.setattr("mpidist.schedule.score.MOST_BEATS", 50)
    made, rounds = find("alltoall", "pairwise").algorithm, []

    def counted(rank, size):
        for item in made.function(rank, size):
            rounds.append(item)
            yield item

    with pytest.raises(Unfit, match="over 50 rounds that do not recur"):
        _score(replace(made, function=counted), 1 << 15, 1 << 15, 8, groups=nodes(1 << 12, 8))
    assert len(rounds) < 120  # of all lanes together, and of the first one apart


def test_a_round_of_all_with_all_over_links_is_refused_by_few_ranks():
    made = find("alltoall", "linear").algorithm
    sizes = []

    def counted(rank, size):
        sizes.append(size)
        return made.function(rank, size)

    rates = Rates(1e-6, 1e-9, 1e-9, 2e-6, 1e-9, True)
    with pytest.raises(Unfit, match="each of the 65,535 others"):
        together(replace(made, function=counted), 1 << 16, 1 << 20, rates, groups=nodes(1 << 13, 8))
    assert sizes and max(sizes) < 2048  # all ranks would take minutes


@pytest.mark.parametrize("groups", [None, nodes(3, 4)], ids=["flat", "nodes"])
@pytest.mark.parametrize("nbytes", [12 * 12 * 64, 1009])
def test_loads_are_those_of_the_machine(groups, nbytes):
    for collective in ("allreduce", "allgather", "broadcast", "scan"):
        for algorithm in mpidist.schedule.algorithms(collective):
            score = score_of(algorithm, 12, nbytes, groups=groups)
            at = np.zeros(score.lanes, int)
            if score.count == 1 and groups:
                at = np.arange(12) // 4
            loads = loads_of(score, at)
            line = Messages.straight(1.0, 0.0, 0.0)
            true = timed(collective, algorithm, 12, nbytes, line, groups=groups)
            assert loads.rounds == true.proof.rounds
            assert tuple(np.tile(loads.messages, score.count).tolist()) == true.proof.sent
            if score.count == 1:
                assert tuple(loads.sent.tolist()) == true.sent
                left = np.bincount(at, weights=loads.left)
                assert tuple(left.tolist()) == true.between


def test_messages_about_counts_all_ranks():
    assert messages_about(find("allreduce", "direct").algorithm, 10) == (180, 90)
    assert messages_about(find("barrier", "dissemination").algorithm, 100) == (700, 100)


def test_of_ranks_with_too_many_blocks_two_are_asked(monkeypatch):
    monkeypatch.setattr("mpidist.schedule.score.MOST_NUMBERS", 1 << 16)
    made, asked = find("allgather", "recursive_doubling").algorithm, []

    def counted(rank, size):
        asked.append(rank)
        return made.function(rank, size)

    with pytest.raises(Unfit, match=r"about \d+ peers and blocks, one by one"):
        score_of(replace(made, function=counted), 512, 512, groups=nodes(64, 8))
    assert len([rank for rank in asked if isinstance(rank, int)]) == 2
