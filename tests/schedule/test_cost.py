"""The cost model: equal to the closed forms of the textbooks where these hold."""

import math

import pytest

import mpidist  # noqa: F401  (registers the algorithms)
from mpidist.errors import InvalidArgument, InvalidRank, ScheduleError, Unsupported
from mpidist.schedule import Recv, Send, algorithms
from mpidist.schedule.cost import Link, cost

A, B, C = 3e-6, 2e-10, 5e-11  # alpha, beta, gamma
RATES = {"alpha": A, "beta": B, "gamma": C}
N = 5040 * 64  # bytes; divided by every size below


def seconds(collective, name, size, n=N, **more):
    return cost(collective, name, size, n, **RATES, **more).seconds


def ring(p, n):
    return 2 * (p - 1) * A + 2 * (p - 1) / p * n * B + (p - 1) / p * n * C


def lg(p):
    return math.ceil(math.log2(p))


ANY = (1, 2, 3, 4, 5, 6, 7, 8, 9, 16, 28)
POWERS = (1, 2, 4, 8, 16, 32)
FORMS = [
    ("allreduce", "linear", ANY, lambda p, n: 2 * (p - 1) * (A + n * B) + (p - 1) * n * C),
    ("allreduce", "binomial", ANY, lambda p, n: 2 * lg(p) * (A + n * B) + lg(p) * n * C),
    ("allreduce", "ring", ANY, ring),
    ("allreduce", "direct", ANY, ring),
    ("allreduce", "recursive_doubling", POWERS, lambda p, n: lg(p) * (A + n * B + n * C)),
    (
        "allreduce",
        "rabenseifner",
        POWERS,
        lambda p, n: 2 * lg(p) * A + 2 * (p - 1) / p * n * B + (p - 1) / p * n * C,
    ),
    ("allgather", "bruck", ANY, lambda p, n: lg(p) * A + (p - 1) / p * n * B),
    ("allgather", "ring", ANY, lambda p, n: (p - 1) * (A + n / p * B)),
    ("allgather", "direct", ANY, lambda p, n: (p - 1) * (A + n / p * B)),
    ("allgather", "recursive_doubling", POWERS, lambda p, n: lg(p) * A + (p - 1) / p * n * B),
    ("allgather", "neighbor_exchange", (2, 4, 6, 8), lambda p, n: p // 2 * A + (p - 1) / p * n * B),
    ("reduce_scatter", "ring", ANY, lambda p, n: (p - 1) * (A + n / p * (B + C))),
    (
        "reduce_scatter",
        "recursive_halving",
        POWERS,
        lambda p, n: lg(p) * A + (p - 1) / p * n * (B + C),
    ),
    ("reduce", "binomial", ANY, lambda p, n: lg(p) * (A + n * B + n * C)),
    ("reduce", "linear", ANY, lambda p, n: (p - 1) * (A + n * B + n * C)),
    ("broadcast", "binomial", ANY, lambda p, n: lg(p) * (A + n * B)),
    ("broadcast", "linear", ANY, lambda p, n: (p - 1) * (A + n * B)),
    ("broadcast", "chain", ANY, lambda p, n: (p - 1) * (A + n * B)),
    (
        "broadcast",
        "scatter_allgather",
        POWERS,
        lambda p, n: (lg(p) + p - 1) * A + 2 * (p - 1) / p * n * B,
    ),
    ("gather", "binomial", POWERS, lambda p, n: lg(p) * A + (p - 1) / p * n * B),
    ("scatter", "binomial", POWERS, lambda p, n: lg(p) * A + (p - 1) / p * n * B),
    ("gather", "linear", ANY, lambda p, n: (p - 1) * (A + n / p * B)),
    ("alltoall", "pairwise", ANY, lambda p, n: (p - 1) * (A + n / p * B)),
    ("alltoall", "linear", ANY, lambda p, n: (p - 1) * (A + n / p * B)),
    ("alltoall", "bruck", POWERS, lambda p, n: lg(p) * (A + n / 2 * B)),
]


@pytest.mark.parametrize(
    ("collective", "name", "sizes", "form"), FORMS, ids=[f"{form[0]}-{form[1]}" for form in FORMS]
)
def test_closed_form(collective, name, sizes, form):
    for size in sizes:
        if N % size == 0:
            expected = form(size, N) if size > 1 else 0
            assert seconds(collective, name, size) == pytest.approx(expected, rel=1e-9), size


@pytest.mark.parametrize("size", [2, 3, 5, 8])
@pytest.mark.parametrize("segments", [1, 2, 7, 30])
def test_pipelined_chain(size, segments):
    expected = (size - 2 + segments) * (A + N / segments * B)
    found = seconds("broadcast", "chain", size, segments=segments)
    assert found == pytest.approx(expected, rel=1e-9)


def test_best_pipelined_chain():
    """(√((p-2)α) + √(nβ))² with √(nβ(p-2)/α) segments."""
    size, n, alpha, beta = 6, 1_000_000, 1e-6, 1e-10
    segments = math.sqrt(n * beta * (size - 2) / alpha)
    assert segments == pytest.approx(20)
    found = cost("broadcast", "chain", size, n, alpha=alpha, beta=beta, segments=20).seconds
    assert found == pytest.approx((math.sqrt((size - 2) * alpha) + math.sqrt(n * beta)) ** 2)


def test_the_bound_holds_for_every_allreduce():
    for algorithm in algorithms("allreduce"):
        for size in (2, 3, 5, 8):
            lower = max(lg(size) * A, 2 * (size - 1) / size * N * B)
            assert seconds("allreduce", algorithm, size) >= lower * (1 - 1e-9)


def test_windows_and_segments_shorten_a_tree():
    n = 1 << 22
    whole = seconds("allreduce", "tree", 7, n)
    two = seconds("allreduce", "tree", 7, n, segments=16, window=2)
    every = seconds("allreduce", "tree", 7, n, segments=16)
    assert two < whole and every < whole


@pytest.mark.parametrize("nbytes", [0, 1, 7, 10_007])
def test_uneven_blocks(nbytes):
    found = cost("allreduce", "ring", 5, nbytes, alpha=0.0, beta=1.0)
    assert found.nbytes == 8 * nbytes and sum(found.sent) == found.nbytes
    longest = -(-nbytes // 5)
    assert found.seconds == pytest.approx(8 * longest)


def test_two_nodes_of_two():
    """A flat ring moves 1.5 n over each slow link, lanes move n."""
    groups, slow = ((0, 1), (2, 3)), Link(alpha=0.0, beta=1.0)
    rates = {"alpha": 0.0, "beta": 1e-6, "groups": groups, "link": slow}
    flat = cost("allreduce", "ring", 4, 4000, **rates)
    lanes = cost("allreduce", "hierarchical", 4, 4000, **rates)
    leaders = cost("allreduce", "hierarchical_leaders", 4, 4000, **rates)
    assert flat.between == (6000, 6000) and lanes.between == leaders.between == (4000, 4000)
    assert lanes.seconds == pytest.approx(4000, rel=1e-2)
    assert flat.seconds == pytest.approx(6000, rel=1e-2)


def test_without_a_link_groups_cost_nothing_more():
    groups = ((0, 1), (2, 3))
    assert seconds("allreduce", "ring", 4, groups=groups) == seconds("allreduce", "ring", 4)


def test_cost_of_a_user_generator():
    def star(rank, size):
        if rank:
            yield Recv(0)
        else:
            yield tuple(Send(peer) for peer in range(1, size))

    assert seconds("broadcast", star, 4) == seconds("broadcast", "linear", 4)
    with pytest.raises(ScheduleError, match="never written"):
        seconds("broadcast", lambda rank, size: (), 2)


@pytest.mark.parametrize("wrong", [{"nbytes": -1}, {"alpha": -1.0}, {"segments": 0}])
def test_bad_input(wrong):
    right = {"nbytes": 8, "alpha": A, "beta": B}
    with pytest.raises(InvalidArgument, match=next(iter(wrong))):
        cost("allreduce", "ring", 2, **{**right, **wrong})
    with pytest.raises(InvalidRank, match="root=2"):
        cost("broadcast", "tree", 2, 8, alpha=A, beta=B, root=2)


@pytest.mark.parametrize("name", ["in_place", "hierarchical/published/ring"])
def test_shared_memory_has_no_price(name):
    """A wrong figure would be worse: there are no times of meetings."""
    with pytest.raises(Unsupported, match="memory, which the cost model cannot price"):
        cost("allreduce", name, 4, 1000, alpha=1.0, beta=1.0)
