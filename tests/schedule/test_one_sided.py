"""Get, Put, Fold and Meet: what the prover accepts, and each counter-example."""

import pytest

from mpidist.errors import ScheduleError, UnknownName
from mpidist.schedule import (
    Copy,
    Fold,
    Get,
    Meet,
    Put,
    Recv,
    Reduce,
    Send,
    algorithms,
    on,
    parallel,
    prove,
)

COMBINED = (Fold((0, 1), blocks=0), Fold((1, 0), blocks=1))


def fails(schedule, text, size=2, collective="allreduce", memory="mapped", blocks=2, **known):
    with pytest.raises(ScheduleError, match=text):
        prove(collective, schedule, size, memory=memory, blocks=blocks, **known)


def test_an_allreduce():
    def two(rank, size):
        yield Meet(range(size))
        yield COMBINED[rank]
        yield Put(1 - rank, blocks=rank)
        yield Meet(range(size))

    proof = prove("allreduce", two, 2, memory="mapped", blocks=2)
    assert (proof.meetings, proof.blocks_read, proof.blocks_stored, proof.messages) == (2, 2, 2, 0)
    assert (proof.depth, proof.rounds, proof.reductions, proof.written) == (4, 4, 2, (2, 2))
    assert proof.ordered and proof.identical


def test_a_fold_has_the_order_of_direct():
    """The first is combined with the others in turn; a lower rank is the left operand."""

    def in_order(peers):
        def fold(rank, size):
            yield Meet(range(size))
            if rank == 0:
                yield Fold(peers)
            yield Meet(range(size))

        return prove("reduce", fold, 4, memory="published").ordered

    assert in_order((2, 1, 0, 3)) and in_order((0, 1, 2, 3)) and in_order((3, 2, 1, 0))
    assert not in_order((2, 0, 1, 3))


def test_steps_need_a_memory():
    def get(rank, size):
        yield Meet(range(size))

    fails(get, "Meet needs the memory of other ranks: expected", memory=None)
    with pytest.raises(UnknownName, match="unknown memory 'mapt'; did you mean 'mapped'"):
        prove("barrier", get, 2, memory="mapt")


def test_messages_cannot_run_them():
    shared = {a.name for a in algorithms(one_sided=True)} - {a.name for a in algorithms()}
    assert {"in_place", "published", "slots"} <= shared


# -- races ----------------------------------------------------------------------------------------


def without(meeting):
    """An allreduce without one of its three meetings."""

    def published(rank, size):
        rounds = [
            Meet(range(size)),
            COMBINED[rank],
            Meet(range(size)),
            Get(1 - rank, blocks=1 - rank),
            Meet(range(size)),
        ]
        del rounds[meeting]
        yield from rounds

    return published


def test_the_first_meeting_is_missing():
    text = "rank 0, round 1, block 0: race: reads 'in' of rank 1, which may not have called yet"
    fails(without(0), text, memory="published")


def test_the_meeting_before_a_result_is_missing():
    text = "reads 'out' of rank [01], which is not written yet|race: reads rank 0's 'out'"
    fails(without(2), text, memory="published")


def test_the_last_meeting_is_missing():
    text = "race: reads 'out' of rank 0, which may have returned to its caller"
    fails(without(4), text, memory="published")


def test_a_neighbours_block():
    def racy(rank, size):
        yield Meet(range(size))
        yield Fold((rank, 1 - rank), blocks=rank)
        yield Copy(rank, rank, "out", "tmp"), Get(1 - rank, blocks=rank, source="in", target="tmp")
        yield Meet(range(size))

    fails(racy, "round 3, block 0: is written twice in one round in 'tmp'")

    def overwritten(rank, size):
        yield Meet(range(size))
        yield Put(1 - rank, blocks=0, source="in")
        yield Meet(range(size))

    # In place, "in" and "out" are one memory: rank 0 reads what rank 1 overwrites.
    text = "rank 1, round 2, block 0: (race: writes rank 0's 'out', which rank 0 reads|reads 'in')"
    fails(overwritten, text)


def test_two_ranks_write_one_block():
    def both(rank, size):
        yield Meet(range(size))
        if rank:
            yield Put(0, blocks=0, source="in")
        yield Meet(range(size))

    text = "rank 2, round 2, block 0: race: writes rank 0's 'out', which rank 1 writes in round 2"
    fails(both, text, size=3)


def test_a_message_is_an_order():
    def signalled(rank, size):
        yield Meet(range(size))
        if rank == 0:
            yield Copy(0, 0)
            yield Send(1, blocks=())
        else:
            yield Recv(0, blocks=())
            yield Get(0)
        yield Meet(range(size))

    prove("broadcast", signalled, 2, memory="published")

    def too_early(rank, size):
        yield Meet(range(size))
        if rank == 0:
            yield Send(1, blocks=())
            yield Copy(0, 0)
        else:
            yield Recv(0, blocks=())
            yield Get(0)
        yield Meet(range(size))

    fails(too_early, "block 0: race: |which is not written yet", 2, "broadcast", "published", 1)


def test_an_input_is_gone_once_the_result_is_written():
    def late(rank, size):
        yield Meet(range(size))
        yield Fold((0, 1), blocks=rank)
        yield Meet(range(size))
        yield Fold((0, 1), blocks=1 - rank)
        yield Meet(range(size))

    fails(late, "block 1: reads 'in' of rank 1 after 'out' was written, which is the same memory")

    def early(rank, size):
        yield Meet(range(size))
        yield Fold((0, 1), blocks=(0, 1))
        yield Meet(range(size))

    # Rank 1 writes block 0 while rank 0 may still read it: so one shot is not in place.
    fails(early, "race: writes its own 'out', which rank 0 reads as 'in'|reads 'in' of rank")


def test_a_slot_is_used_again_in_a_later_call():
    def apart(rank, size):
        """Rank 2 reads the slot of rank 0, but meets rank 1 only."""
        if rank == 0:
            yield Copy(0, 0, target="slot0")
            yield Meet((0, 1))
            yield Copy(0, 0)
        elif rank == 1:
            yield Meet((0, 1))
            yield Get(0, source="slot0")
            yield Meet((1, 2))
        else:
            yield Meet((1, 2))
            yield Get(0, source="slot0")

    text = "reads 'slot0' of rank 0, which may use it again in a later call: it never awaits"
    fails(apart, text, 3, "broadcast", "slots", 1)


# -- what a memory offers -------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("memory", "step", "text"),
    [
        ("published", Put(1), "writes 'out' of rank 1; in 'published' memory others may write no"),
        ("slots", Get(1), "reads 'out' of rank 1; in 'slots' memory others may read 'slot0', 'slo"),
        ("slots", Fold((0, 1)), "reads 'in' of rank 1; in 'slots' memory"),
        ("mapped", Put(1, source="in", target="in"), "writes 'in' of rank 1; in 'mapped' memory"),
        ("mapped", Get(1, source="slot0"), "'slot0' is not a buffer: expected in, out, tmp"),
        ("mapped", Get(0), "Get names this rank as its peer; use Copy"),
        ("mapped", Get(2), "peer 2 is not a rank of 2: expected 0 … 1"),
        ("mapped", Get(1, 0, to=(0, 1)), "copies 1 blocks to 2: expected equally many"),
        ("mapped", Fold((1, 1)), r"folds the ranks \(1, 1\): expected each once"),
        ("mapped", Fold(()), r"folds the ranks \(\): expected each once, and at least one"),
        ("mapped", Fold(2), r"Fold\(peers=2, .* has 2: expected a range or tuple of ranks"),
    ],
)
def test_beyond_what_a_memory_offers(memory, step, text):
    def schedule(rank, size):
        yield Meet(range(size))
        if rank == 0:
            yield step
        yield Meet(range(size))

    fails(schedule, f"rank 0, round 2.*{text}", memory=memory)


def test_another_node():
    def get(rank, size, *, groups):
        yield Meet((rank,))
        yield Get(1 - rank, source="in")

    fails(get, "reaches the memory of rank 1, which is on another node", groups=((0,), (1,)))

    def meet(rank, size, *, groups):
        yield Meet(range(size))

    text = r"meets the ranks \(0, 1\), which are on several nodes"
    fails(meet, text, groups=((0,), (1,)))


# -- rounds and meetings --------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("item", "text"),
    [
        ((Meet((0, 1)), Get(1)), "has a Meet beside other steps; it is a round of its own"),
        ((Send(1), Get(1)), "has messages beside Get, Put or Fold"),
        ((Put(1, 0), Copy(0, 0, "in", "out")), "is read and written in one round in 'out'"),
        (Meet(2), r"Meet\(group=2, awaits=None\) has 2: expected a range or tuple of ranks"),
        (Meet((0, 1), awaits=1), "has 1: expected a range or tuple of ranks"),
        (Meet((0, 2)), r"meets the ranks \(0, 2\): expected different ones of 0 … 1"),
        (Meet((0, 0)), r"meets the ranks \(0, 0\): expected different ones"),
        (Meet((1,)), "is not a meeting of this rank"),
        (Meet((0,), awaits=(1,)), "is not a meeting of this rank, and of those it awaits"),
    ],
)
def test_rounds(item, text):
    def schedule(rank, size):
        yield Meet(range(size))
        if rank == 0:
            yield item
        yield Meet(range(size))

    fails(schedule, f"rank 0, round 2.*{text}")


def test_deadlock_at_a_meeting():
    def absent(rank, size):
        yield Meet(range(size))
        if rank < 2:
            yield Meet(range(size))

    text = r"deadlock: rank 0 in round 2 waits in Meet\(group=range\(0, 3\).*\) for rank 2 "
    fails(absent, text + r"\(rank 2 has ended after round 1\); rank 1 in round 2", 3, "barrier")

    def crossed(rank, size):
        yield Meet((0, 1)) if rank == 0 else Meet((1, 0))

    fails(crossed, "deadlock: rank 0 in round 1 waits in Meet.* for rank 1; rank 1", 2, "barrier")

    def with_a_message(rank, size):
        if rank == 0:
            yield Meet(range(size))
            yield Send(1)
        else:
            yield Recv(0)
            yield Meet(range(size))

    text = r"deadlock: rank 0 in round 1 waits in Meet.* for rank 1; rank 1 in round 1 waits in Re"
    fails(with_a_message, text)


def test_ranks_meet_equally_often():
    def oftener(rank, size):
        yield Meet(range(size))
        if rank == 0:
            yield Meet(range(size), awaits=())

    text = r"rank 0, round 2: comes to meeting 2 of the ranks \(0, 1\), to which rank 1 does not"
    fails(oftener, text, collective="barrier")


def test_a_meeting_can_await_some_ranks_only():
    def gathered(awaits):
        def gather(rank, size):
            yield Meet(range(size))
            yield Put(0, blocks=rank, source="in") if rank else Copy(0, 0)
            yield Meet(range(size), awaits=() if rank else awaits)

        return gather

    assert prove("gather", gathered(None), 3, memory="mapped").meetings == 2
    text = "rank 2, round 2, block 2: race: writes 'out' of rank 0, which may have returned"
    fails(gathered((1,)), text, 3, "gather", blocks=3)


# -- strands and groups ---------------------------------------------------------------------------


def halves(block):
    """A broadcast of one block in shared memory, as a strand."""

    def strand(rank, size):
        yield Meet(range(size))
        yield Copy(block, block) if rank == 0 else Get(0, block, source="in")
        yield Meet(range(size))

    return strand


def test_strands_meet_apart():
    def side_by_side(rank, size):
        yield parallel(halves(0)(rank, size), halves(1)(rank, size))

    proof = prove("broadcast", side_by_side, 3, memory="mapped", blocks=2)
    assert (proof.meetings, proof.blocks_read) == (4, 4)

    def twice(rank, size):
        yield parallel(halves(0)(rank, size), halves(0)(rank, size))

    fails(twice, "is written in strand 1 or 0 and used in the other", 2, "broadcast", blocks=1)

    def unmet(rank, size):
        """Only the first strand meets: the other has no order."""
        yield parallel((Meet(range(size)), Meet(range(size))), list(halves(0)(rank, size))[1:2])

    fails(unmet, r"which may not have called yet.*\(strand 1\)", 2, "broadcast", blocks=1)


def test_strands_of_one_rank_store_in_one_block():
    def both(rank, size):
        stores = [[Put(1, 0, source="in")]] * 2 if rank == 0 else [[], []]
        yield Meet(range(size))
        yield parallel(*stores)
        yield Meet(range(size))

    text = "race: writes rank 1's 'out', which another strand of this rank writes in round 1"
    fails(both, text, 2, "broadcast", blocks=1)


def test_what_comes_after_a_parallel_is_after_it():
    def after(rank, size):
        yield parallel([Meet(range(size))], [Meet(range(size))])
        yield Copy(0, 0) if rank == 0 else Get(0, source="in")
        yield parallel([Meet(range(size))])

    prove("broadcast", after, 2, memory="mapped")


def test_relabelled_for_a_group():
    def whole(rank, size):
        """The ranks in reverse, the result of one part being the input of the next."""
        order = range(size - 1, -1, -1)
        mine = order.index(rank)
        scatter = [
            Meet(range(size)),
            Fold(range(size), blocks=mine, own="in"),
            Meet(range(size), awaits=range(size)),
        ]
        gather = [
            (Copy(mine, mine), *(Put(p, mine, source="in") for p in range(size) if p != mine)),
            Meet(range(size)),
        ]
        yield from on(order, scatter, lambda b: (2 * b, 2 * b + 1))
        yield from on(order, gather, lambda b: (2 * b, 2 * b + 1), {"in": "out"})

    proof = prove("allreduce", whole, 3, memory="mapped", blocks=6)
    assert (proof.blocks_read, proof.blocks_stored) == (12, 12)


@pytest.mark.parametrize("groups", [((0, 1), (2, 3)), ((0, 1, 2), (3,)), ((0, 2), (1, 3))])
def test_mixed_with_messages(groups):
    """Reduce to the first rank of a node, exchange, and fetch the result from it."""
    leaders = [group[0] for group in groups]

    def mixed(rank, size, *, groups):
        node = next(group for group in groups if rank in group)
        yield Meet(node)
        if rank == node[0]:
            yield Fold(node)
        yield Meet(node)
        if rank in leaders:
            other = leaders[1 - leaders.index(rank)]
            yield Send(other), Reduce(other)
        yield Meet(node)
        if rank != node[0]:
            yield Get(node[0])
        yield Meet(node)

    proof = prove("allreduce", mixed, 4, memory="published", groups=groups)
    assert (proof.messages, proof.blocks_read, proof.meetings) == (2, 4, 4)
