"""Clocks: the times of scores are those of the machine, which runs ranks one by one."""

import numpy as np
import pytest

import mpidist
from mpidist.schedule import Recv, Reduce, Send, parallel
from mpidist.schedule.clocks import Rates, seconds_of
from mpidist.schedule.cost import Link, cost, timed, together
from mpidist.schedule.model import Messages
from mpidist.schedule.ranks import Unfit
from mpidist.schedule.registry import Algorithm, algorithms, find
from mpidist.schedule.score import _score

A, B, C = 3e-6, 2e-10, 5e-11  # alpha, beta, gamma
FAR = Link(5e-6, 1e-9)
NEAR, LINKED = Rates(A, B, C), Rates(A, B, C, FAR.alpha, FAR.beta, True)


def nodes(count, each):
    return tuple(tuple(range(k * each, (k + 1) * each)) for k in range(count))


def one_by_one(algorithm, size, nbytes, groups=None, link=None, root=0):
    model = Messages.straight(A, B, C)
    given = {"groups": groups, "link": link, "root": root}
    return timed(algorithm.collective, algorithm, size, nbytes, model, **given)


def assert_equal(algorithm, size, nbytes, groups=None, root=0):
    link = None if groups is None else FAR
    true = one_by_one(algorithm, size, nbytes, groups, link, root)
    rates = NEAR if groups is None else LINKED
    found = together(algorithm, size, nbytes, rates, root=root, groups=groups)
    where = (algorithm.label, size, nbytes, groups, root)
    assert found.seconds == pytest.approx(true.seconds, rel=1e-9), where
    assert found.rounds == true.rounds, where
    assert found.messages == true.messages, where
    assert sum(found.between) == sum(true.between), where


EVERY = [pytest.param(a, id=a.label.replace(" ", "-")) for a in algorithms()]


@pytest.mark.parametrize("algorithm", EVERY)
def test_together_on_all_sizes_is_as_one_by_one(algorithm):
    for size in (*range(4, 18), 32, 33):
        if algorithm.unsupported(size) is None:
            for root in (0, size - 1) if algorithm.contract.rooted else (0,):
                assert_equal(algorithm, size, size * size * 64, root=root)


@pytest.mark.parametrize("algorithm", EVERY)
def test_together_with_uneven_blocks_is_as_one_by_one_or_unfit(algorithm):
    for size in (5, 8, 12):
        if algorithm.unsupported(size) is not None:
            continue
        lanes = _score(algorithm, size, 10_007, size) if not algorithm.equal_blocks else None
        if lanes is not None:
            found = seconds_of(lanes, NEAR, np.zeros(size, int))
            true = one_by_one(algorithm, size, 10_007).seconds
            assert found == pytest.approx(true, rel=1e-9), (algorithm.label, size)


@pytest.mark.parametrize("algorithm", EVERY)
def test_together_on_nodes_is_as_one_by_one(algorithm):
    uneven = ((0, 1, 2), (3, 4), (5, 6))
    for size, groups in (
        *((each * count, nodes(count, each)) for count, each in ((2, 2), (2, 4), (4, 2), (3, 4))),
        *((16, nodes(count, 16 // count)) for count in (2, 4)),
        (33, nodes(11, 3)),
        (7, uneven),
    ):
        if algorithm.unsupported(size, groups) is None:
            assert_equal(algorithm, size, size * size * 64, groups)


@pytest.mark.parametrize(("size", "count"), [(64, 8), (96, 12), (60, 5)])
@pytest.mark.parametrize("algorithm", EVERY)
def test_together_on_equal_nodes_is_as_one_by_one(algorithm, size, count):
    groups = nodes(count, size // count)
    if algorithm.unsupported(size, groups) is None:
        assert_equal(algorithm, size, size * size * 64, groups)


@pytest.mark.parametrize("nbytes", [10_007, 31 * 31 + 3])
def test_the_longest_block_of_a_ring_is_in_every_round(nbytes):
    for collective, name in (
        ("allreduce", "ring"),
        ("allgather", "ring"),
        ("alltoall", "pairwise"),
    ):
        algorithm = find(collective, name).algorithm
        one_lane = _score(algorithm, 31, nbytes, 1, longest=True)
        true = one_by_one(algorithm, 31, nbytes).seconds
        assert seconds_of(one_lane, NEAR, np.zeros(1, int)) == pytest.approx(true, rel=1e-9)


def test_an_uneven_ring_has_a_time_also_on_many_ranks():
    found = cost("allreduce", "ring", 300, 3_007, alpha=A, beta=B)
    assert found.seconds == pytest.approx(2 * 299 * (A + 11 * B), rel=1e-9)


@pytest.mark.parametrize(
    ("collective", "name"),
    [
        ("allreduce", "hierarchical"),
        ("allreduce", "hierarchical_leaders"),
        ("allgather", "hierarchical"),
        ("reduce_scatter", "hierarchical"),
        ("allreduce", "ring"),
        ("allgather", "ring"),
    ],
)
def test_a_lane_for_each_rank_of_a_node_is_as_one_for_each(collective, name):
    """Also where most rounds are skipped, since they are like the last ones."""
    algorithm, groups, size = find(collective, name).algorithm, nodes(32, 4), 128
    few = _score(algorithm, size, size * size, 4, groups=groups)
    every = _score(algorithm, size, size * size, size, groups=groups)
    seconds = seconds_of(every, LINKED, np.arange(size) // 4)
    assert seconds_of(few, LINKED, np.zeros(4, int)) == pytest.approx(seconds, rel=1e-9)


def test_a_lane_of_one_million_ranks_has_the_closed_form():
    p, n = 1 << 20, 16 << 20
    found = cost("barrier", "dissemination", p, 0, alpha=A, beta=B)
    assert found.seconds == pytest.approx(20 * A) and found.rounds == 20
    assert found.proof is None and found.messages == (20,) * p
    found = cost("reduce", "binomial", p, n, alpha=A, beta=B, gamma=C)
    assert found.seconds == pytest.approx(20 * (A + n * B + n * C))
    assert found.nbytes == (p - 1) * n and sum(found.messages) == p - 1


@pytest.mark.long
def test_half_a_million_rounds_of_a_ring_have_the_closed_form():
    p, n = 1 << 18, 16 << 20
    found = cost("allreduce", "ring", p, n, alpha=A, beta=B, gamma=C)
    assert found.rounds == 2 * (p - 1)
    assert found.seconds == pytest.approx((p - 1) * (2 * A + n / p * (2 * B + C)), rel=1e-9)


def of(function):
    return Algorithm("barrier", function.__name__, function)


def test_a_deadlock_is_unfit():
    def waits(rank, size):
        yield Recv((rank + 1) % size)
        yield Send((rank - 1) % size)

    def crossed(rank, size):
        yield Send(rank ^ 1) if rank % 2 else Recv(rank ^ 2)

    def other_node(rank, size):
        yield Send(rank ^ 2), Recv(rank ^ 4)

    for algorithm in (of(waits), of(crossed), of(other_node)):
        with pytest.raises(Unfit, match="deadlock"):
            together(algorithm, 8, 0, NEAR)
        with pytest.raises(Unfit, match="deadlock"):
            together(algorithm, 8, 0, LINKED, groups=nodes(4, 2))


def test_nodes_some_of_which_send_to_themselves_do_not_do_alike():
    """Nodes 0 and 2 send to themselves, 1 and 3 to each other."""

    def mirrored(rank, size):
        yield from find("allreduce", "recursive_doubling").algorithm.function(rank, size)
        for _ in range(3):
            yield Send((1 - rank) % size, 0), Recv((1 - rank) % size, 0, "tmp")

    algorithm = Algorithm("allreduce", "mirrored", mirrored)
    assert_equal(algorithm, 8, 10_000, nodes(4, 2))
    assert_equal(algorithm, 16, 10_000, nodes(4, 4))


def test_messages_of_another_length_are_unfit():
    def unlike(rank, size):
        yield Send(rank ^ 1, blocks=(0, 1)) if rank % 2 else Reduce(rank ^ 1)

    with pytest.raises(Unfit, match="another length"):
        together(of(unlike), 8, 0, NEAR)


def test_strands_share_the_ports_of_their_rank():
    def both(rank, size):
        yield parallel(*([(Send(rank ^ 1), Reduce(rank ^ 1))] for _ in range(3)))

    algorithm = of(both)
    with pytest.raises(Unfit):
        together(of(lambda rank, size: iter([parallel([parallel([])])])), 8, 0, NEAR)
    assert together(algorithm, 8, 0, NEAR).seconds == pytest.approx(3 * A)


def test_what_goes_on_at_too_many_times_is_unfit(monkeypatch):
    monkeypatch.setattr("mpidist.schedule.clocks.MOST_TIMES", 50)
    with pytest.raises(Unfit, match="over 50 different times"):
        together(find("broadcast", "chain").algorithm, 64, 1, NEAR)
    monkeypatch.setattr("mpidist.schedule.clocks.MOST_WAITING", 50)
    with pytest.raises(Unfit, match="wait for their ports"):
        together(find("broadcast", "linear").algorithm, 32, 1, NEAR)


def test_many_ranks_without_a_pattern_are_refused_by_name():
    with pytest.raises(mpidist.Unsupported, match="linear on 100001 ranks has no pattern"):
        cost("allreduce", "linear", 100_001, 1, alpha=A, beta=B)


def test_above_the_proved_ranks_a_schedule_without_a_pattern_runs_one_by_one():
    order = [other ^ 1 for other in range(1000)]

    def table(rank, size):
        yield Send(order[rank]), Reduce(order[rank])

    def everyone(rank, size):
        yield from table(rank, size)
        for distance in (1, 2, 4, 8, 16, 32, 64, 128, 256, 512):
            yield Send((rank + distance) % size), Reduce((rank - distance) % size)

    found = cost("barrier", everyone, 1000, 0, alpha=A, beta=B)
    assert found.proof is not None and found.seconds == pytest.approx(11 * A)
