"""The sweep: what is proved, how it is reported, and that users' algorithms take part."""

import gc

import pytest

import mpidist  # noqa: F401  (registers the algorithms)
from mpidist.errors import InvalidArgument, UnknownName
from mpidist.schedule import Get, Meet, Recv, Send, algorithm, algorithms
from mpidist.schedule.registry import unregister
from mpidist.schedule.sweep import groupings, sweep


@pytest.fixture
def wrong():
    @algorithm("broadcast", "wrong")
    def wrong(rank, size, *, root):
        """Right for up to three ranks, and then it forgets the last."""
        if rank == root:
            yield tuple(Send(peer) for peer in range(min(size, 3)) if peer != root)
        elif rank < 3:
            yield Recv(root)

    @algorithm("broadcast", "faulty")
    def faulty(rank, size):
        """It has a bug in Python."""
        yield Send([1, 2][rank])

    yield
    unregister("broadcast", "wrong")
    unregister("broadcast", "faulty")


def test_one_row_for_every_algorithm():
    rows = sweep(range(1, 7))
    assert [(r.collective, r.name) for r in rows] == [
        (a.collective, a.name) for a in algorithms(one_sided=True)
    ]
    assert all(row.proved and row.counterexample is None and row.seconds > 0 for row in rows)
    by_name = {(row.collective, row.name): row for row in rows}
    assert by_name["allreduce", "ring"].proofs == 6
    assert by_name["broadcast", "binomial"].proofs == 21 == by_name["broadcast", "binomial"].roots
    assert by_name["broadcast", "tree"].proofs == 84
    odd = by_name["allgather", "neighbor_exchange"]
    assert (odd.sizes, odd.refused) == ((2, 4, 6), (1, 3, 5))
    leaders = by_name["allreduce", "hierarchical_leaders"].proofs
    assert leaders == sum(len(groupings(size)) for size in range(1, 7))


@pytest.mark.long
def test_processes_give_the_same(wrong):
    here = sweep(range(1, 13), collectives=["broadcast", "barrier"], jobs=1)
    done = []
    there = sweep(
        range(1, 13),
        collectives=["broadcast", "barrier"],
        jobs=2,
        progress=lambda *args: done.append(args),
    )
    for a, b in zip(here, there, strict=True):
        assert (a.name, a.sizes, a.roots, a.proofs, a.messages, a.counterexample) == (
            b.name,
            b.sizes,
            b.roots,
            b.proofs,
            b.messages,
            b.counterexample,
        )
    assert [k for k, _, _ in done] == list(range(1, done[-1][1] + 1))
    assert {label for _, _, label in done} > {"broadcast wrong", "barrier tree"}


def test_a_counterexample_names_the_smallest_size(wrong):
    row, faulty = sweep(range(1, 9), ["broadcast"], ["wrong", "faulty"])
    assert row.counterexample.startswith("4 ranks, root 0: rank 3")
    assert "never written" in row.counterexample and not row.proved
    assert row.sizes == tuple(range(1, 9)) and row.proofs == 7  # 1 + 2 + 3, and root 3 of 4
    assert "IndexError: list index out of range" in faulty.counterexample or (
        "not a rank" in faulty.counterexample
    )


def test_names_and_arities():
    rows = sweep(5, ["allreduce", "reduce"], ["tree:3", "ring"])
    assert {(r.collective, r.name): r.proofs for r in rows} == {
        ("allreduce", "ring"): 1,
        ("allreduce", "tree"): 1,
        ("reduce", "tree"): 5,
    }
    (row,) = sweep([4], ["barrier"], ["tree"], arities=(2, 5))
    assert row.proofs == 2


def test_groupings():
    assert groupings(1) == [((0,),)]
    assert ((0, 1), (2, 3), (4,)) in groupings(5)
    assert ((0,), (1, 2, 3, 4)) in groupings(5)
    for size in range(1, 20):
        for groups in groupings(size):
            assert sorted(rank for group in groups for rank in group) == list(range(size))


@pytest.mark.parametrize("collects", [True, False])
def test_garbage_is_collected_after_a_sweep_as_before(collects):
    before = gc.isenabled()
    (gc.enable if collects else gc.disable)()
    try:
        sweep(3, ["broadcast"], jobs=1)
        assert gc.isenabled() == collects
    finally:
        (gc.enable if before else gc.disable)()


def test_bad_arguments():
    with pytest.raises(InvalidArgument, match=r"ranks=\[.*>= 1"):
        sweep([])
    with pytest.raises(InvalidArgument, match=r"ranks=\[.*>= 1"):
        sweep([0, 1])
    with pytest.raises(UnknownName, match="did you mean 'ring'"):
        sweep(3, algorithms=["rin"])
    with pytest.raises(UnknownName, match="did you mean 'allreduce'"):
        sweep(3, ["alreduce"])


def test_shared_memory_is_swept_in_pieces_and_by_some_roots():
    (row,) = sweep([3, 17], ["broadcast"], ["slots"], jobs=1)
    assert row.proved and row.messages == 0
    assert (row.roots, row.proofs) == (3 + 3, 3 * 2 + 3)  # 1 and 3 pieces of few ranks
    (row,) = sweep([4], ["allreduce"], ["hierarchical/in_place/ring"])
    assert row.proved and row.proofs == 4 and row.messages > 0


def test_a_race_is_a_counterexample():
    @algorithm("broadcast", "racy", memory="published")
    def racy(rank, size, *, root, pieces):
        yield Meet(range(size))
        if rank != root:
            yield Get(root, blocks=range(pieces), source="in")

    try:
        (row,) = sweep([2], ["broadcast"], ["racy"])
    finally:
        unregister("broadcast", "racy")
    assert row.counterexample is not None and not row.proved
    assert row.counterexample.startswith("2 ranks, root 0: rank 1, round 2, block 0: race: reads")
