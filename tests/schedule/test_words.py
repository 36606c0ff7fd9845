"""Words between strands, and what else thread blocks need: Signal, Wait, Combine, Named."""

import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mpidist.errors import ScheduleError, Unsupported
from mpidist.schedule import Algorithm, Copy, Get, Put, on, parallel, prove
from mpidist.schedule.cost import cost
from mpidist.schedule.memories import MEMORIES
from mpidist.schedule.reading import read
from mpidist.schedule.rounds import Combine, Named, Signal, Wait
from mpidist.schedule.show import text
from mpidist.schedule.wave import proofs


def fails(schedule, text, size=2, memory="kernels", blocks=2):
    with pytest.raises(ScheduleError, match=text):
        prove("allreduce", schedule, size, memory=memory, blocks=blocks)


def exchange(rank, peer, channel):
    return [Signal(peer, channel), Wait(peer, channel)]


def two(rank, size, first=True, last=True, relaxed=False):
    """An allreduce by one step that combines block r of both ranks and stores it in both."""
    peer = 1 - rank
    yield Copy(range(2), range(2))
    if first:
        yield from exchange(rank, peer, "a")
    places = ((rank, "out", rank), (peer, "out", rank))
    yield Combine(places, places)
    if last:
        yield Signal(peer, "b", relaxed)
        yield Wait(peer, "b")
    yield Copy(range(2), range(2), "out", "tmp")


def test_words_are_an_order():
    proof = prove("allreduce", two, 2, memory="kernels", blocks=2)
    assert (proof.reductions, proof.blocks_read, proof.blocks_stored) == (2, 2, 2)
    assert (proof.messages, proof.identical, proof.at_once) == (4, True, True)
    assert proof.depth > 4


def test_the_output_is_empty_until_it_is_written():
    """The input is apart from it, and the fast proofs leave it to the machine."""

    def nothing(rank, size):
        yield Copy(0, 0, "in", "tmp")

    known = Algorithm("allreduce", "nothing", nothing, memory=MEMORIES["kernels"])
    assert proofs(known, 1, (0,), 2, ((0,),), 1) is None
    with pytest.raises(ScheduleError, match="the result is never written"):
        prove("allreduce", known, 1)


def test_a_missing_word_is_a_race():
    fails(lambda rank, size: two(rank, size, first=False), "nothing was written")
    fails(lambda rank, size: two(rank, size, last=False), "race")


def test_a_relaxed_word_orders_nothing_of_its_strand():
    fails(lambda rank, size: two(rank, size, relaxed=True), "race")


def test_a_signal_does_not_wait_and_a_wait_does():
    def both(rank, size):
        yield Copy(range(2), range(2))
        yield Wait(1 - rank, "a")
        yield Signal(1 - rank, "a")

    fails(both, "deadlock: rank 0 in round 2 waits for rank 1 on a; rank 1 in round 2")


def test_a_word_that_nobody_takes_is_left():
    def one(rank, size):
        yield from two(rank, size)
        if rank:
            yield Signal(0, "more")

    fails(one, "rank 1, round 8: signals rank 0 on more, which does not wait for it")


def strands(*ends):
    """Words between the strands of a rank; each end is a step of one strand."""

    def schedule(rank, size):
        yield from two(rank, size)
        yield parallel(*([step(rank)] for step in ends))

    return schedule


def test_strands_of_a_rank_order_their_blocks():
    def schedule(rank, size):
        yield from two(rank, size)
        yield parallel(
            [Copy(0, 0, "out", "scratch"), Signal(rank, "full")],
            [Wait(rank, "full"), Copy(0, 0, "scratch", "tmp")],
        )

    prove("allreduce", schedule, 2, memory="kernels", blocks=2)

    def early(rank, size):
        yield from two(rank, size)
        yield parallel(
            [(Copy(0, 0, "out", "scratch"), Signal(rank, "full"))],
            [Wait(rank, "full"), Copy(0, 0, "scratch", "tmp")],
        )

    fails(early, "race: .* 'scratch', which another strand of this rank writes in round 1")


def test_one_strand_posts_and_one_takes():
    fails(strands(lambda r: Signal(r, "x"), lambda r: Signal(r, "x")), "another strand .* does")
    fails(strands(lambda r: Wait(r, "x"), lambda r: Wait(r, "x")), "is not determined")


@pytest.mark.parametrize(
    "steps, text",
    [
        ((Wait(0, "x"), Copy(0, 0)), "a Wait beside other steps"),
        (Signal(5, "x"), "peer 5 is not a rank of 2"),
        (Combine(((0, "out", 0),), ((0, "out", range(2)),)), "expected equally many"),
        (Combine(((0, "out", 0),), ((0, "nowhere", 0),)), "'nowhere' is not a buffer"),
        (Put(1, 0, "in", "input"), "others may write 'out', 'scratch'"),
        (Get(1, 0, "in", "out"), "others may read"),
    ],
)
def test_wrong_steps_are_refused(steps, text):
    def schedule(rank, size):
        yield Copy(range(2), range(2))
        if rank == 0:
            yield steps

    fails(schedule, text)


def test_other_memories_have_no_words():
    fails(lambda rank, size: [Signal(1 - rank, "x")], "needs the memory 'kernels'", memory="mapped")


def test_names_of_rounds_are_in_the_counter_example():
    def schedule(rank, size):
        rounds = list(two(rank, size, last=False))
        return Named(rounds, [f"line {k} of {rank}" for k in range(len(rounds))])

    with pytest.raises(ScheduleError, match=r"line 3 of 0: race: .*, which line 4 of 1 ") as caught:
        prove("allreduce", schedule, 2, memory="kernels", blocks=2)
    assert (caught.value.rank, caught.value.round) == (0, 4)


def test_relabelled_for_a_group():
    """Ranks, blocks and buffers of the steps are those of the enclosing schedule."""
    steps = [Signal(1, "x", True), Wait(0, "x"), Combine(((0, "in", 1),), ((1, "out", 1),))]
    placed = list(on((4, 7), steps, lambda block: block + 2, {"in": "tmp"}))
    combined = Combine(((4, "tmp", 3),), ((7, "out", 3),))
    assert placed == [(Signal(7, "x", True),), (Wait(4, "x"),), (combined,)]


def test_a_schedule_with_words_is_drawn_and_has_no_times():
    def schedule(rank, size):
        yield from two(rank, size)
        yield parallel([Signal(rank, "full")], [Wait(rank, "full")])

    known = Algorithm("allreduce", "words", schedule, blocks=2, memory=MEMORIES["kernels"])
    moves = read("allreduce", known, 2).moves
    drawn = {(move.kind, move.source, move.target) for move in moves if move.kind != "copy"}
    pairs = {("receive", 0, 1), ("receive", 1, 0), ("put", 0, 1), ("put", 1, 0)}
    assert drawn == pairs | {(kind, rank, rank) for kind in ("fold", "meet") for rank in (0, 1)}
    assert "Σ0,1 " in text("allreduce", known, 2) or "Σ0-1 " in text("allreduce", known, 2)
    with pytest.raises(Unsupported, match="no times for the thread blocks"):
        cost("allreduce", known, 2, 100, alpha=1.0, beta=0.0)


STEPS = st.tuples(
    st.integers(0, 2),  # the strand: one of each of three ranks
    st.sampled_from(("put", "get", "word", "relaxed")),
    st.integers(1, 2),  # the peer
)


@settings(deadline=None, max_examples=300)
@given(st.lists(STEPS, max_size=12))
def test_races_are_what_the_words_leave_open(program):
    """Every conflict that no chain of rounds and words orders is found, and no other.

    A word is awaited at once, so no program deadlocks.
    """
    rounds = {rank: [Copy(0, 0)] for rank in range(3)}
    order = {rank: [{(rank, 0)}] for rank in range(3)}  # what is before the end of each round
    accesses = [(rank, 0, rank, True) for rank in range(3)]
    words = itertools.count()

    def add(rank, step, more=frozenset()):
        rounds[rank].append(step)
        order[rank].append(order[rank][-1] | {(rank, len(order[rank]))} | more)

    for rank, peer in itertools.permutations(range(3), 2):  # all have begun
        add(rank, Signal(peer, "begun"))
    for rank, peer in itertools.permutations(range(3), 2):
        add(rank, Wait(peer, "begun"), order[peer][0])
    for rank, kind, by in program:
        peer = (rank + by) % 3
        if kind in ("word", "relaxed"):
            channel = f"{next(words)}"
            known = order[rank][-1] if kind == "word" else frozenset()
            add(rank, Signal(peer, channel, kind == "relaxed"))
            add(peer, Wait(rank, channel), known)
            continue
        mine, theirs = (rank, len(rounds[rank]), rank), (rank, len(rounds[rank]), peer)
        if kind == "put":
            add(rank, Put(peer))
            accesses += [(*mine, False), (*theirs, True)]
        else:
            add(rank, Get(peer, target="tmp"))
            accesses.append((*theirs, False))

    def wrong(a, b):
        (one, first, owner, writes), (other, second, its, wrote) = a, b
        if owner != its or one == other or not (writes or wrote):
            return False
        return (one, first) not in order[other][second] and (other, second) not in order[one][first]

    expected = any(wrong(a, b) for a, b in itertools.combinations(accesses, 2))
    with pytest.raises(ScheduleError) as caught:  # at the latest the result, or the last reads
        prove("allreduce", lambda rank, size: rounds[rank], 3, memory="kernels")
    assert ("neither is before the other" in str(caught.value)) == expected, caught.value
