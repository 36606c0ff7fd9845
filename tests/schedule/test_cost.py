"""The cost model: equal to the closed forms of the textbooks where these hold."""

import math
import re
from dataclasses import replace

import pytest

import mpidist  # noqa: F401  (registers the algorithms)
from mpidist.errors import InvalidArgument, InvalidRank, ScheduleError
from mpidist.schedule import Algorithm, Fold, Get, Meet, Recv, Send, algorithms, prove
from mpidist.schedule.cost import Link, Sharing, cost, timed
from mpidist.schedule.memories import MEMORIES
from mpidist.schedule.memory import SymbolicMemory
from mpidist.schedule.model import Curve, Messages
from mpidist.schedule.registry import documented_costs

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


# -- shared memory ---------------------------------------------------------------------------------

M, R, S, D, X = 4e-7, 2e-11, 1e-11, 7e-12, 3e-6  # meeting, read, store, combine, access
NEAR = Sharing.straight(meeting=M, read=R, store=S, combine=D, beyond=6e-11, cache=N, access=X)


def others(p, n):
    return (p - 1) / p * n


SHARED = [
    (
        ("allreduce", "in_place"),
        lambda p, n: 2 * (p - 1) * M + 2 * (p - 1) * X + others(p, n) * (R + D + S),
    ),
    (
        ("allreduce", "published"),
        lambda p, n: 3 * (p - 1) * M + 2 * (p - 1) * X + others(p, n) * (2 * R + D),
    ),
    (
        ("allreduce", "slots"),
        lambda p, n: 2 * (p - 1) * (M + X) + 2 * X + others(p, n) * (2 * R + D + S) + n / p * S,
    ),
    (("reduce_scatter", "in_place"), lambda p, n: (p - 1) * (2 * M + X) + others(p, n) * (R + D)),
    (("allgather", "in_place"), lambda p, n: (p - 1) * (2 * M + X) + others(p, n) * S),
    (("allgather", "slots"), lambda p, n: (p - 1) * (M + X) + X + n / p * S + others(p, n) * R),
    (("broadcast", "published"), lambda p, n: 2 * (p - 1) * M + (p > 1) * (X + n * R)),
    # The root stores a block in the memory of each of the others, which read all but this one.
    (
        ("broadcast", "in_place"),
        lambda p, n: 2 * (p - 1) * M + max((p - 1) * X + others(p, n) * S, X + others(p, n) * R),
    ),
    # The last to store is awaited by the root alone; nobody awaits the root.
    (("gather", "in_place"), lambda p, n: 2 * (p - 1) * M + (p > 1) * (X + n / p * S)),
    (("gather", "published"), lambda p, n: (p - 1) * (M + X) + others(p, n) * R + (p > 1) * M),
    (("barrier", "in_place"), lambda p, n: (p - 1) * M),
]


@pytest.mark.parametrize(
    ("what", "form"), SHARED, ids=[f"{what[0]}-{what[1]}" for what, _ in SHARED]
)
def test_closed_form_in_shared_memory(what, form):
    for size in (2, 3, 5, 8):
        if N % size == 0:
            found = seconds(*what, size, 0 if what[0] == "barrier" else N, sharing=NEAR)
            assert found == pytest.approx(form(size, N), rel=1e-9), size


def test_one_rank_meets_nobody():
    for name in ("in_place", "published"):
        assert seconds("allreduce", name, 1, sharing=NEAR) == 0


def test_bytes_in_the_memory_of_others():
    """A rank reads and stores the parts of others, and the root of a broadcast reads nothing."""
    found = cost("allreduce", "in_place", 4, 1000, **RATES, sharing=NEAR)
    assert found.read == found.stored == (750,) * 4 and found.nbytes == 0
    found = cost("broadcast", "published", 3, 900, **RATES, root=1, sharing=NEAR)
    assert found.read == (900, 0, 900) and found.stored == (0, 0, 0)
    found = cost("alltoall", "slots", 3, 900, **RATES, segments=5, sharing=NEAR)
    assert found.read == (600,) * 3 and found.stored == (0, 0, 0)


FORMS_OF_5 = {"n/p": 1, "n": 5, "(p-1)/p n": 4, "2(p-1)/p n": 8, "(p-1) n": 20}  # in n/p


@pytest.mark.parametrize(
    "algorithm", [a for a in algorithms(one_sided=True) if a.memory], ids=lambda a: a.label
)
def test_documented_bytes_in_the_memory_of_others(algorithm):
    """Those of the rank that reads and stores most."""
    told = documented_costs(algorithm.doc)[1]
    read, stored = (
        FORMS_OF_5[found[1]] if (found := re.search(rf"(\S+ n|n/p|n) {what}", told)) else 0
        for what in ("read", "stored")
    )
    if "as much stored" in told or "or stored" in told:
        stored = read
    if "twice that" in told:
        read *= 2
    nbytes = 0 if algorithm.contract.idempotent else 5000
    found = cost(algorithm.collective, algorithm, 5, nbytes, **RATES)
    assert (max(found.read), max(found.stored)) == (1000 * read, 1000 * stored), told


def test_measured_memory_has_its_own_call_and_copies():
    """An allgather stores a block elsewhere, and copies its own; a call is not one of messages."""
    line = Curve.line
    near = Sharing(M, line(0.0, R), line(0.0, S), line(0.0, D), line(0.0, 1e-9), call=7e-6)
    messages = Messages.straight(A, B, C)
    found = timed("allgather", "in_place", 2, N, replace(messages, call=1.0), sharing=near)
    assert found.seconds == pytest.approx(7e-6 + 2 * M + N / 2 * (S + 1e-9))
    free = timed("allgather", "in_place", 2, N, replace(messages, call=1.0), sharing=NEAR)
    assert free.seconds == pytest.approx(1.0 + 2 * M + X + N / 2 * S)


def test_ranks_that_combine_only_others_read_the_first_of_them():
    """The last of three combines two others: one is read, one is folded into it."""
    near = replace(NEAR, fold=Curve.line(0.0, 1.0), read=Curve.line(0.0, 10.0))
    found = timed("exscan", "slots", 3, N, Messages.straight(A, B, C), sharing=near)
    assert found.seconds == pytest.approx(11.0 * N)


def test_beyond_the_caches():
    """Twice the bytes take six times as long to store, and the meetings as long as before."""
    within = seconds("allgather", "in_place", 4, N, sharing=NEAR) - 6 * M - 3 * X
    beyond = seconds("allgather", "in_place", 4, 2 * N, sharing=NEAR) - 6 * M - 3 * X
    assert beyond == pytest.approx(12 * within)


def test_pieces_overlap_in_the_halves_of_a_slot():
    """The root writes a piece while the others read the one before: n S and the first piece."""
    rates = {
        "alpha": 1.0,
        "beta": 1.0,
        "sharing": Sharing.straight(0.0, 1.0, 1.0, 0.0, 1.0, 1 << 30),
    }
    whole, cut = (cost("broadcast", "slots", 3, 8000, segments=k, **rates).seconds for k in (1, 8))
    assert whole == 16_000 and cut == 9000


def test_messages_between_nodes_and_memory_inside():
    """Two nodes of two: both halves of the data on a lane, folded and fetched in the node."""
    groups, n = ((0, 1), (2, 3)), 4000
    link = Link(alpha=0.0, beta=1.0)
    rates = {"alpha": 0.0, "beta": 1e-6, "groups": groups, "link": link}
    free, dear = (
        Sharing.straight(0.0, 0.0, 0.0, 0.0, 0.0, n),
        Sharing.straight(0.0, 1.0, 1.0, 0.0, 1.0, n),
    )
    name = "hierarchical/published/ring"
    fast = cost("allreduce", name, 4, n, **rates, sharing=free)
    assert fast.between == (n, n) and fast.seconds == pytest.approx(n)
    assert fast.read == (n, n, n, n) and sum(fast.stored) == 0
    slow = cost("allreduce", name, 4, n, **rates, sharing=dear)
    assert slow.seconds == pytest.approx(2 * n)


def test_a_link_of_measured_messages_overlaps_their_latencies():
    """Two messages of a node cross one link: it is busy without the latency."""
    far = replace(Messages.straight(5.0, 1.0, 0.0), further=Curve.line(2.0, 1.0))
    groups, free = ((0, 1), (2, 3)), Messages.straight(0.0, 0.0, 0.0)

    def lanes(rank, size):
        yield Send(rank + 2, 0) if rank < 2 else Recv(rank - 2, 0)

    known = Algorithm("allreduce", "lanes", lanes, blocks=1)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(SymbolicMemory, "check_end", lambda *_: (None, True))
        both = timed("allreduce", known, 4, 10, free, groups=groups, link=far).seconds
        line = timed("allreduce", known, 4, 10, free, groups=groups, link=Link(5.0, 1.0)).seconds
    assert both == 12.0 + 15.0 and line == 30.0


def test_memory_is_like_messages_by_default():
    found = cost("allgather", "in_place", 3, 900, alpha=100.0, beta=1.0)
    assert found.seconds == 2 * 2 * 100 + 600


def test_wrong_schedules_in_shared_memory_have_no_cost():
    """The counter-example is that of the prover, whatever the model would have made of a step."""
    wrong = [
        (lambda rank, size: [Meet(range(size)), Fold(7)], "expected a range or tuple of ranks"),
        (lambda rank, size: [Get(size)], "is not a rank of 2"),
        (lambda rank, size: [Fold(range(size)), Meet(range(size))], "race"),
    ]
    for schedule, message in wrong:
        known = Algorithm("allreduce", "wrong", schedule, memory=MEMORIES["mapped"])
        with pytest.raises(ScheduleError, match=message) as caught:
            cost("allreduce", known, 2, 8, alpha=1.0, beta=1.0)
        with pytest.raises(ScheduleError) as proved:
            prove("allreduce", known, 2)
        assert str(caught.value) == str(proved.value)


# Each term shows in a decimal place of its own.
MEASURED = Messages(
    call=1000.0,
    strand=Curve.line(0.0, 0.0),
    further=Curve.line(0.0, 1.0),
    onward=Curve.line(0.0, 9.0),
    one_way=Curve.line(0.0, 1.0),
    both_ways=Curve.line(0.0, 2.0),
    one_way_written=Curve.line(0.0, 3.0),
    both_ways_written=Curve.line(0.0, 4.0),
    combine=Curve.line(0.0, 0.1),
    combine_apart=Curve.line(0.0, 0.2),
    copy=Curve.line(0.0, 0.01),
)


@pytest.mark.parametrize(
    ("collective", "name", "more", "expected"),
    [
        ("broadcast", "binomial", {}, 100),  # the root copies nothing: it has one array
        ("gather", "linear", {}, 50 + 0.5),  # and the root copies its own block
        ("gather", "linear", {"in_place": True}, 50),
        ("allgather", "ring", {}, 100 + 0.5),
        ("reduce", "binomial", {}, 100 + 20),
        ("allreduce", "recursive_doubling", {}, 200 + 20),
        ("allreduce", "recursive_doubling", {"in_place": True}, 200 + 10),
        ("allreduce", "ring", {}, 100 + 10 + 200),  # the second round sends what is written
        ("allreduce", "binomial", {}, 100 + 20 + 300),
        ("alltoall", "pairwise", {}, 100 + 0.5),
    ],
)
def test_timed_takes_the_curve_of_what_each_round_does(collective, name, more, expected):
    found = timed(collective, name, 2, 100, MEASURED, **more)
    assert found.seconds == pytest.approx(1000 + expected)
    assert found.nbytes == cost(collective, name, 2, 100, alpha=0, beta=0).nbytes


def test_timed_latency_of_a_fan_overlaps_and_its_bytes_do_not():
    """Of the alpha of LogGOPS only o occupies a port: a fan of three costs L once."""
    one_way = Curve.line(10.0, 1.0)
    model = replace(MEASURED, call=0.0, one_way=one_way, further=Curve.line(2.0, 1.0))
    assert timed("broadcast", "linear", 4, 100, model).seconds == 2 * (2 + 100) + 10 + 100
    all_of_it = replace(model, further=one_way)
    assert timed("broadcast", "linear", 4, 100, all_of_it).seconds == 3 * (10 + 100)


def test_timed_latency_that_grows_with_the_bytes_overlaps_too():
    """A long message waits for its receiver's answer, meanwhile the one before it moves."""
    one_way = Curve((0, 10, 20), (10.0, 50.0, 60.0), 1.0)
    model = replace(MEASURED, call=0.0, one_way=one_way, further=Curve.line(2.0, 1.0))
    assert timed("broadcast", "linear", 4, 20, model).seconds == 2 * (2 + 20) + 60
    assert timed("broadcast", "linear", 4, 5, model).seconds == 2 * (2 + 5) + 30


@pytest.mark.parametrize(("onward", "expected"), [(3.0, 13), (8.0, 18), (10.0, 20), (99.0, 20)])
def test_timed_sender_goes_on_before_its_message_arrives(onward, expected):
    """Two messages in two rounds: the second is under way with the first."""
    model = replace(
        MEASURED,
        call=0.0,
        one_way=Curve.line(10.0, 0.0),
        further=Curve.line(2.0, 0.0),
        onward=Curve.line(onward, 0.0),
    )
    found = timed("broadcast", "scatter_allgather", 2, 100, model)
    assert found.seconds == expected
    assert found.proof == prove("broadcast", "scatter_allgather", 2)


def test_timed_message_to_a_late_receiver_takes_what_is_left_of_it():
    """Rank 1 receives from 0 after 10 s: a message kept until then has 3 s left, else all 10."""

    def late(rank, size):
        if rank == 0:
            yield Send(1, 0)
        elif rank == 1:
            yield Recv(2, 1)
            yield Recv(0, 0)
        else:
            yield Send(1, 1)

    known = Algorithm("allreduce", "late", late, blocks=2)
    ten, none = Curve.line(10.0, 0.0), Curve.line(0.0, 0.0)
    model = replace(MEASURED, call=0.0, one_way=ten, further=none)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(SymbolicMemory, "check_end", lambda *_: (None, True))
        kept, whole = (
            timed("allreduce", known, 3, 2, replace(model, onward=left), in_place=True).seconds
            for left in (Curve.line(3.0, 0.0), ten)
        )
    assert (kept, whole) == (10 + 3, 10 + 10)


# What LogGOPSim (commit 76451de of its repository) printed for `mpidist export goal COLLECTIVE
# ALGORITHM --ranks P --bytes 1M`, with the parameters in the head of that file for alpha = 10 us,
# beta = 1 ns and gamma = 0 (-L 10000 -o 0 -g 0 -G 1 -O 0): the last finishing time in ns.
ONE_MESSAGE_A_ROUND = {
    ("allreduce", "ring", 5): 1757720,
    ("allreduce", "ring", 8): 1974994,
    ("allreduce", "rabenseifner", 8): 1895002,
    ("allreduce", "recursive_doubling", 8): 3175725,
    ("allgather", "bruck", 5): 868859,
    ("allgather", "bruck", 8): 947501,
    ("allgather", "ring", 6): 923810,
    ("alltoall", "pairwise", 5): 878858,
    ("alltoall", "bruck", 8): 1602861,
    ("broadcast", "chain", 5): 4234300,
    ("broadcast", "binomial", 8): 3175725,
    ("reduce", "binomial", 8): 3175725,
    ("reduce_scatter", "recursive_halving", 8): 947501,
    ("reduce_scatter", "ring", 7): 958776,
    ("scan", "chain", 5): 4234300,
    ("barrier", "dissemination", 6): 30000,
}
FANS = {
    ("gather", "linear", 5): 848856,
    ("broadcast", "linear", 5): 4204300,
    ("broadcast", "tree", 9): 4224300,
}
# LogGOPSim takes G for all bytes of a message but the first.
CLOSE = 1e-5


@pytest.mark.parametrize(("collective", "name", "size"), ONE_MESSAGE_A_ROUND)
def test_one_message_a_round_takes_the_time_of_loggopsim(collective, name, size):
    expected = ONE_MESSAGE_A_ROUND[collective, name, size]
    nbytes = 0 if collective == "barrier" else 1 << 20
    found = cost(collective, name, size, nbytes, alpha=1e-5, beta=1e-9).seconds
    assert found == pytest.approx(1e-9 * expected, rel=CLOSE)


@pytest.mark.parametrize(("collective", "name", "size"), [*ONE_MESSAGE_A_ROUND, *FANS])
def test_a_fan_whose_latencies_overlap_takes_the_time_of_loggopsim(collective, name, size):
    """With o = 0 no part of alpha occupies a port; by `cost` all of it does."""
    model = replace(Messages.straight(1e-5, 1e-9, 0.0), further=Curve.line(0.0, 1e-9))
    nbytes = 0 if collective == "barrier" else 1 << 20
    found = timed(collective, name, size, nbytes, model).seconds
    expected = (ONE_MESSAGE_A_ROUND | FANS)[collective, name, size]
    assert found == pytest.approx(1e-9 * expected, rel=CLOSE)


@pytest.mark.parametrize(("occupies", "expected"), [(True, 220 + 100), (False, 210 + 100)])
def test_timed_combines_while_a_link_moves_another_message(occupies, expected):
    """One half is combined in 10 s, while the other is on its way: if that keeps no rank busy."""
    tenth, one = Curve.line(0.0, 0.1), Curve.line(0.0, 1.0)
    near = replace(MEASURED, call=0.0, combine=tenth, combine_apart=tenth, one_way_written=one)
    far, groups = replace(near, occupies=occupies), ((0,), (1,))
    halves = "allreduce", "double_binary_tree", 2, 200
    assert timed(*halves, near, groups=groups, link=far).seconds == expected


def test_timed_strands_combine_when_no_message_keeps_the_processor():
    """Two halves: two messages and two combinations, one after the other, or overlapping."""
    model = replace(MEASURED, call=0.0, combine_apart=Curve.line(0.0, 2.0))
    halves = {"segments": 2}
    busy = timed("reduce", "binomial", 2, 100, model, **halves).seconds
    assert busy == 2 * 50 + 2 * 100
    free = timed("reduce", "binomial", 2, 100, replace(model, occupies=False), **halves).seconds
    assert free == 50 + 2 * 100, "the second message comes during the first combination"
    more = replace(model, strand=Curve.line(7.0, 0.5))
    strands = timed("reduce", "binomial", 2, 100, more, **halves).seconds
    assert strands == busy + 2 * (7 + 50 * 0.5), "of 50 bytes that rank 1 sends in each"


def test_timed_negative_bytes_are_refused():
    with pytest.raises(InvalidArgument, match="nbytes=-1"):
        timed("allreduce", "ring", 2, -1, MEASURED)
