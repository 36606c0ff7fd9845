"""What the prover must reject, each with rank, round and block; the seeds' faults first."""

from itertools import zip_longest

import pytest

import mpidist  # noqa: F401  (registers the algorithms)
from mpidist.errors import InvalidArgument, InvalidRank, ScheduleError, UnknownName
from mpidist.schedule import (
    Copy,
    Recv,
    Reduce,
    Send,
    algorithm,
    algorithms,
    parallel,
    prove,
    segmented,
)
from mpidist.schedule.registry import unregister
from mpidist.schedule.rounds import Fold, Meet, steps_of


def rejected(collective, schedule, size, match, where, **more):
    """The schedule is rejected for this reason, at (rank, round, block)."""
    with pytest.raises(ScheduleError, match=match) as caught:
        prove(collective, schedule, size, **more)
    error = caught.value
    assert (error.rank, error.round, error.block) == where, str(error)
    for name, value in zip(("rank", "round", "block"), where):
        if value is not None:
            assert f"{name} {value}" in str(error)


def ring_from_the_seeds(first):
    """Reduce-scatter after which rank r has block r + 1; the allgather begins with r + `first`."""

    def ring(rank, size):
        left, right = (rank - 1) % size, (rank + 1) % size
        for step in range(size - 1):
            yield Send(right, (rank - step) % size), Reduce(left, (rank - step - 1) % size)
        for step in range(size - 1):
            block = (rank + first - step) % size
            yield Send(right, block), Recv(left, (block - 1) % size)

    return ring


@pytest.mark.parametrize("size", range(2, 9))
def test_the_seeds_ring_is_rejected(size):
    """Rank r ends the first phase with block r + 1, so sending block r gathers unreduced blocks."""
    with pytest.raises(ScheduleError, match="lacks rank") as caught:
        prove("allreduce", ring_from_the_seeds(0), size, blocks=size)
    error = caught.value
    assert None not in (error.rank, error.round, error.block)
    proof = prove("allreduce", ring_from_the_seeds(1), size, blocks=size)
    assert proof.rounds == 2 * (size - 1)


def test_deadlock():
    def both_receive_first(rank, size):
        yield Recv(1 - rank, 1 - rank)
        yield Send(1 - rank, rank)

    rejected("allgather", both_receive_first, 2, "deadlock: rank 0 in round 1 waits", (0, 1, 1))


def test_buffering_cycle_is_a_deadlock():
    def everyone_sends_first(rank, size):
        yield Send((rank + 1) % size, rank)
        yield Recv((rank - 1) % size, (rank - 1) % size)

    rejected("allgather", everyone_sends_first, 3, "deadlock", (0, 1, 0))


def test_a_message_that_nobody_receives():
    def chatty(rank, size):
        if rank == 0:
            yield Send(1)
            yield Send(1)
        else:
            yield Recv(0)

    rejected("broadcast", chatty, 2, r"deadlock.*Send\(1", (0, 2, 0))


def test_a_message_that_nobody_sends():
    def hopeful(rank, size):
        if rank:
            yield Recv(0)

    rejected("broadcast", hopeful, 2, r"deadlock.*Recv\(0", (1, 1, 0))


def test_sent_and_overwritten_in_one_round():
    def swap(rank, size):
        yield Send(1 - rank, 0), Recv(1 - rank, 0)

    rejected("allreduce", swap, 2, "sent and overwritten", (0, 1, 0))


def test_send_and_reduce_in_one_round():
    def swap(rank, size):
        yield Send(1 - rank, 0), Reduce(1 - rank, 0)

    assert prove("allreduce", swap, 2).identical


def test_reduced_and_overwritten_in_one_round():
    def mixed(rank, size):
        if rank:
            yield Send(0)
        else:
            yield Reduce(1), Recv(2)

    rejected("reduce", mixed, 3, "reduced and overwritten", (0, 1, 0))


def test_received_twice_in_one_round():
    def twice(rank, size):
        if rank:
            yield Send(0, rank)
        else:
            yield Recv(1, 1), Recv(2, 1)

    rejected("gather", twice, 3, "received twice", (0, 1, 1))


def test_counted_twice():
    def again(rank, size):
        for _ in range(2):
            yield Send(1 - rank), Reduce(1 - rank)

    rejected("allreduce", again, 2, "counts the contribution of ranks 0, 1 twice", (0, 2, 0))


def test_barrier_may_count_twice():
    def again(rank, size):
        for _ in range(2):
            yield Send(1 - rank), Reduce(1 - rank)

    assert prove("barrier", again, 2).messages == 4


def test_a_contribution_that_is_missing():
    def lazy(rank, size):
        if rank == 1:
            yield Send(0)
        if rank == 0:
            yield Reduce(1)

    rejected("reduce", lazy, 3, "ends with a value that lacks rank 2", (0, 1, 0))


def test_contributions_of_a_scan():
    """Of each rank those of the ranks before it, in their order, and no others."""

    def total(rank, size):
        if rank == 0:
            yield Reduce(1)
            yield Send(1)
        else:
            yield Send(0)
            yield Recv(0)

    rejected("scan", total, 2, "ends with a value with the contribution of rank 1 too", (0, 1, 0))

    def own_data_only(rank, size):
        return iter(())

    rejected("scan", own_data_only, 2, "ends with a value that lacks rank 0", (1, None, 0))
    rejected("exscan", own_data_only, 2, "the result is never written", (1, None, 0))

    def one_too_many(rank, size):
        if rank:
            yield Copy(0, 0)
            yield Reduce(rank - 1)
        if rank + 1 < size:
            yield Send(rank + 1, buffer="out" if rank else "in")

    text = "ends with a value with the contribution of rank 1 too"
    rejected("exscan", one_too_many, 2, text, (1, 2, 0))


def test_order_of_a_scan():
    """Rank 2 combines 0 after 1: right for the sum, and not in rank order."""

    def later_first(rank, size):
        if rank == 0:
            yield Send(1)
            yield Send(2)
        elif rank == 1:
            yield Copy(0, 0, "out", "tmp")
            yield Reduce(0)
            yield Send(2, buffer="tmp")
        else:
            yield Reduce(0)
            yield Reduce(1)

    proof = prove("scan", later_first, 3)
    assert not proof.ordered and proof.identical


def test_messages_of_other_length():
    def short(rank, size):
        if rank:
            yield Send(0, (1,))
        else:
            yield Recv(1, (0, 1))

    rejected("gather", short, 2, "expects a message of 2 blocks from rank 1.*1", (0, 1, 0))


def test_blocks_in_places_of_other_length():
    def shifted(rank, size):
        yield Send(1 - rank, rank), Recv(1 - rank, (1 - rank, 5)[rank])

    rejected("allgather", shifted, 2, "out has blocks 0 … 1", (1, 1, 5))

    def crossed(rank, size):
        yield Send(1 - rank, rank), Recv(1 - rank, 1 - rank, "tmp")
        yield Copy(1 - rank, rank, "tmp", "out")

    rejected("allgather", crossed, 2, "may differ in length", (1, 2, 1))


def test_wrong_block_of_the_right_length():
    def mine(rank, size):
        yield Copy(rank, rank)
        yield Send(1 - rank, 1 - rank, "in"), Recv(1 - rank, 1 - rank)
        yield Copy(rank, 1 - rank)

    rejected(
        "alltoall",
        mine,
        2,
        "ends with block 0 of rank 0 where block 0 of rank 1 belongs",
        (0, 3, 1),
        equal_blocks=True,
    )


def test_a_result_that_is_never_written():
    rejected("broadcast", lambda rank, size: (), 2, "never written", (1, None, 0))


def test_reading_nothing():
    def forward(rank, size):
        if rank:
            yield Send(0, 0)
        else:
            yield Recv(1, 0)

    rejected("broadcast", forward, 2, "reads 'out'", (1, 1, 0))


def test_writing_the_input():
    def trample(rank, size):
        yield Send(1 - rank, 1 - rank, "in"), Recv(1 - rank, rank, "in")

    rejected("alltoall", trample, 2, "writes to the input", (1, 1, 1))


def test_strands_that_share_a_block():
    def racing(rank, size):
        def strand():
            yield Send(1 - rank), Reduce(1 - rank)

        yield parallel(strand(), strand())

    rejected("allreduce", racing, 2, r"written in strand 1 or 0.*\(strand 1\)", (1, 1, 0))


def test_strands_share_read_only_blocks():
    def reading(rank, size):
        if rank == 0:
            yield parallel([Send(1)], [Send(2)])
        else:
            yield parallel(*([Recv(0)] if rank == s else () for s in (1, 2)))

    assert prove("broadcast", reading, 3).messages == 2


def test_messages_of_other_strands_do_not_match():
    def crossed(rank, size):
        strands = [[Send(1)], ()] if rank == 0 else [(), [Recv(0)]]
        yield parallel(*strands)

    rejected("broadcast", crossed, 2, "deadlock", (0, 1, 0))


def test_segments_merged_into_one_sequence_deadlock():
    """Why segmentation is ``parallel`` over segments: their rounds merged make trees deadlock."""
    tree = next(a for a in algorithms("allreduce") if a.name == "tree")

    def merged(rank, size):
        """Round t of a segment goes with round t - 1 of the next, in one round."""
        (strands,) = segmented(lambda: tree.function(rank, size, arity=2), size, 3)
        late = [[()] * k + [steps_of(r) for r in s] for k, s in enumerate(strands.strands)]
        for together in zip_longest(*late, fillvalue=()):
            yield sum(together, ())

    assert prove("allreduce", tree, 15, segments=3).messages == 3 * 28
    with pytest.raises(ScheduleError, match="deadlock") as caught:
        prove("allreduce", merged, 15, blocks=3)
    assert None not in (caught.value.rank, caught.value.round, caught.value.block)


@pytest.mark.parametrize(
    ("step", "match"),
    [
        (Send(2), "peer 2 is not a rank of 2"),
        (Send(-1), "peer -1 is not a rank"),
        (Send(0), "Send names this rank as its peer; use Copy"),
        (Send(1, 0, "oút"), "'oút' is not a buffer: .*in, out, tmp"),
        (Copy(0, 0, "inn"), "'inn' is not a buffer"),
        (Copy(range(2), 0, "out", "tmp"), "copies 2 blocks to 1"),
        ("Send", "'Send' is not a step"),
        (None, "None is not a step"),
    ],
)
def test_what_is_no_step(step, match):
    with pytest.raises(ScheduleError, match=match) as caught:
        prove("allreduce", lambda rank, size: [step] if rank == 0 else (), 2)
    assert (caught.value.rank, caught.value.round) == (0, 1)


def test_a_false_claim_of_order():
    def downward(rank, size):
        """Takes in 2 before 1: 0 (2) (1)."""
        if rank:
            yield Send(0)
        else:
            yield Reduce(2)
            yield Reduce(1)

    assert not prove("reduce", downward, 3).ordered
    algorithm("reduce", "downward", ordered=True)(downward)
    try:
        rejected("reduce", downward, 3, "reduce downward claims.*rank order", (0, 2, 0))
    finally:
        unregister("reduce", "downward")


def test_a_false_claim_to_combine_at_once():
    def in_turn(rank, size):
        """Takes in 1 before 2: (0 1) 2."""
        if rank:
            yield Send(0)
        else:
            yield Reduce(1)
            yield Reduce(2)

    def at_once(rank, size, between=()):
        yield Send(0) if rank else (Reduce(1), *between, Reduce(2))

    def parted(rank, size):
        """A Copy comes between the two: what it reads is one term, or two."""
        return at_once(rank, size, between=[Copy(0, 0, "out", "tmp")])

    assert prove("reduce", at_once, 3).at_once
    for schedule, number in ((in_turn, 2), (parted, 1)):
        assert not prove("reduce", schedule, 3).at_once
        algorithm("reduce", "claimed", at_once=True)(schedule)
        try:
            rejected("reduce", schedule, 3, "reduce claimed claims.*at once", (0, number, 0))
        finally:
            unregister("reduce", "claimed")


@pytest.mark.parametrize("size", [3, 4, 7])
def test_all_that_combines_at_once_says_so(size):
    """But for scans, which are no sums of all ranks, and two levels on one node."""
    for known in algorithms(one_sided=True):
        whole = known.contract.averages and not known.contract.idempotent
        if whole and not known.local and known.unsupported(size) is None:
            assert prove(known.collective, known, size).at_once == known.at_once, known.label


@pytest.mark.parametrize("size", [1, 2, 3, 4, 5, 6, 7, 8, 11, 12, 16, 29])
def test_a_claim_to_combine_as_the_fixed_tree_is_right(size):
    """Where others do they need not say so; at 5 ranks of 8 algorithms only what says so does."""
    for known in algorithms(one_sided=True):
        whole = known.contract.averages and not known.contract.idempotent
        if whole and not known.local and known.unsupported(size) is None:
            is_tree = prove(known.collective, known, size).tree
            assert is_tree or not known.combines_as_tree(size), known.label
            if known.tree or (size == 5 and known.name not in ("binomial", "direct")):
                assert is_tree == known.combines_as_tree(size), known.label


def test_a_false_claim_of_a_tree():
    """(0 1) 2 is the tree of 3 ranks: not 0 (1 2), nor of 4 ranks ((0 1) 2) 3."""

    def upper_first(rank, size):
        if rank == 2:
            yield Send(1)
        elif rank == 1:
            yield Reduce(2)
            yield Send(0)
        else:
            yield Reduce(1)

    def in_turn(rank, size):
        if rank:
            yield Send(0)
        else:
            for peer in range(1, size):
                yield Reduce(peer)

    assert prove("reduce", in_turn, 3).tree and not prove("reduce", upper_first, 3).tree
    for schedule, size, where in ((upper_first, 3, (1, 1, 0)), (in_turn, 4, (0, 2, 0))):
        algorithm("reduce", "claimed", tree=True)(schedule)
        try:
            rejected("reduce", schedule, size, "reduce claimed claims.*fixed tree", where)
        finally:
            unregister("reduce", "claimed")


def test_partial_results_of_one_length_combined_in_one_round_are_subtrees():
    """((0 1) (2 3)) (4 5) of three pairs, which are combined as a tree; not of 2, 1 and 2 ranks."""

    def in_pairs(rank, size, first=(0, 2, 4)):
        if rank not in first:
            yield Send(max(one for one in first if one < rank))
            return
        if rank + 1 < size and rank + 1 not in first:
            yield Reduce(rank + 1)
        yield Send(0) if rank else tuple(map(Reduce, first[1:]))

    assert prove("reduce", in_pairs, 6).tree and prove("reduce", in_pairs, 5).tree
    assert not prove("reduce", lambda rank, size: in_pairs(rank, size, (0, 2, 3)), 5).tree


def test_a_fold_of_aligned_ranks_is_a_subtree():
    """Of 8 ranks on two nodes: (0 … 3) and (4 … 7) by Folds, then by a message; not 3 and 5."""

    def by_nodes(rank, size, *, groups):
        (group,) = (g for g in groups if rank in g)
        yield Meet(group)
        if rank == group[0]:
            yield Fold(group, blocks=0)
            yield Send(0) if rank else Reduce(groups[1][0])
        yield Meet(group)

    every = tuple(range(8))
    algorithm("reduce", "by_nodes", memory="published")(by_nodes)
    try:
        for at in (3, 4, 5):
            proof = prove("reduce", "by_nodes", 8, groups=(every[:at], every[at:]))
            assert proof.tree == (at == 4)
    finally:
        unregister("reduce", "by_nodes")


def test_wrong_number_of_blocks():
    with pytest.raises(ScheduleError, match="allgather needs a multiple of 3 blocks, not 4"):
        prove("allgather", lambda rank, size: (), 3, blocks=4)


def test_bad_arguments():
    with pytest.raises(UnknownName, match="did you mean 'allreduce'"):
        prove("alreduce", "ring", 2)
    with pytest.raises(InvalidRank, match="root=2"):
        prove("reduce", "linear", 2, 2)
    with pytest.raises(InvalidArgument, match="segments=0"):
        prove("allreduce", "ring", 2, segments=0)
    for size in (0, -1, "3", 2.0, True):
        with pytest.raises(InvalidArgument, match=f"size={size!r}: .*>= 1"):
            prove("allreduce", "ring", size)
    for root in ("0", 1.0):
        with pytest.raises(InvalidRank, match=f"root={root!r}"):
            prove("reduce", "linear", 2, root)
    with pytest.raises(InvalidArgument, match="arity=1"):
        prove("allreduce", "tree", 3, arity=1)
    with pytest.raises(InvalidArgument, match="schedule=3: .*generator function"):
        prove("allreduce", 3, 2)


def test_a_function_that_yields_nothing():
    with pytest.raises(ScheduleError, match="rank 0: allreduce forgot returned None"):

        def forgot(rank, size):
            (Send(1, blocks=0),)

        prove("allreduce", forgot, 3)
