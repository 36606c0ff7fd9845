"""Schedules in shared memory by phase: meetings in one order, and rows of blocks."""

import pytest

from mpidist import ScheduleError
from mpidist.schedule import Copy, Fold, Get, Meet, Put, Recv, Send, parallel
from mpidist.schedule.phases import REST, phases_of


def phases(rounds, rank=0, size=2, count=2, results=None):
    """The phases of a rank, where ``rounds(rank)`` returns the rounds of each."""
    return phases_of(rounds, rank, [range(size)], count, results or (lambda peer: range(count)))


def rows(made):
    return [[(row.sources, row.targets, row.ranks) for row in part] for part in made.rows]


def test_a_combination_is_stored_where_it_is_copied_to():
    def rounds(rank):
        yield Meet((0, 1))
        yield Fold((rank, 1 - rank), blocks=rank, target="tmp")
        yield Put(1 - rank, rank, "tmp"), Copy(rank, rank, "tmp")
        yield Meet((0, 1))

    made = phases(rounds)
    sources = ((0, "in", 0), (1, "in", 0))
    assert rows(made) == [[], [(sources, [(1, "out", 0), (0, "out", 0)], (0, 1))], []]
    assert made.awaits == [(1,), (1,)] and made.complete
    assert made.reached == {(0, "in"), (1, "in"), (0, "out"), (1, "out")}
    assert made.stored == [{}, {("out", 1): 1}, {}]


def test_what_is_read_again_is_stored():
    """A sum in "tmp" that a Put gives away, and a Copy takes later: it has two targets."""

    def rounds(rank):
        yield Meet((0, 1))
        yield Fold((rank, 1 - rank), blocks=rank, target="tmp")
        yield Put(1 - rank, rank, "tmp")
        yield Meet((0, 1))
        yield Copy(rank, rank, "tmp")

    ((), (row,), (copy,)) = phases(rounds).rows
    assert row.targets == [(0, "tmp", 0), (1, "out", 0)]
    assert copy.sources == ((0, "tmp", 0),)


def test_what_others_reach_is_stored():
    def rounds(rank):
        yield Meet((0, 1))
        yield Fold((0, 1), blocks=rank, target="tmp")
        yield Copy(rank, rank, "tmp")
        yield Meet((0, 1))
        yield Get(1 - rank, 1 - rank, "tmp")
        yield Meet((0, 1))

    assert phases(rounds).rows[1][0].targets == [(0, "tmp", 0), (0, "out", 0)]


def test_a_copy_over_the_operands_of_another_combination_stays_behind_it():
    def rounds(rank):
        yield Meet((0, 1))
        if rank == 0:
            yield Fold((0, 1), blocks=0, target="tmp"), Fold((0, 1), blocks=1)
            yield Copy(0, 1, "tmp", "in")  # "in" of block 1 is an operand of the second one
        yield Meet((0, 1))

    first, second, copy = phases(rounds).rows[1]
    assert first.targets == [(0, "tmp", 0)] and second.targets == [(0, "out", 1)]
    assert copy.targets == [(0, "in", 1)]


def test_one_block_is_read_once_for_all_targets():
    def rounds(rank):
        yield Copy(rank, rank), *(Put(peer, rank, "in") for peer in range(3) if peer != rank)

    (row,) = phases(rounds, 1, 3, 3).rows[0]
    assert row.sources == ((1, "in", 1),)
    assert row.targets == [(1, "out", 1), (0, "out", 1), (2, "out", 1)]


def test_meetings_of_some_ranks_are_passed_by_the_others():
    def rounds(rank):
        if rank < 2:
            yield Meet((0, 1))
            yield Copy(0, 0)
        if rank > 0:
            yield Meet((1, 2), awaits=(2,) if rank == 1 else ())
        yield Meet((0, 1, 2))

    made = [phases(rounds, rank, 3) for rank in range(3)]
    assert [m.awaits for m in made] == [
        [(1,), (), (1, 2)],
        [(0,), (2,), (0, 2)],
        [(), (), (0, 1)],
    ]
    assert [[len(part) for part in m.rows] for m in made] == [[0, 1, 0, 0]] * 2 + [[0, 0, 0, 0]]


def test_strands_follow_each_other():
    """Strands that meet would run concurrently; as phases the second begins when the first ends."""

    def strand(rank, block):
        yield Meet((0, 1))
        yield Get(1 - rank, block, "in")
        yield Meet((0, 1))

    made = phases(lambda rank: [parallel(strand(rank, 0), strand(rank, 1))])
    assert [[row.targets for row in part] for part in made.rows] == [
        [],
        [[(0, "out", 0)]],
        [],
        [[(0, "out", 1)]],
        [],
    ]


def test_blocks_beyond_a_result_are_a_buffer_of_their_own():
    def rounds(rank):
        yield Meet((0, 1))
        yield Put(1 - rank, range(2), "in")
        yield Meet((0, 1))

    made = phases(rounds, results=lambda rank: range(rank, rank + 1))
    assert made.reached == {(rank, buffer) for rank in (0, 1) for buffer in ("out", REST)}


def test_a_part_of_the_operands_is_not_complete():
    def rounds(rank):
        yield Meet((0, 1, 2))
        yield Fold((0, 1), target="tmp")
        yield Meet((0, 1, 2))

    assert not phases(rounds, size=3).complete


def test_messages_stay_rounds_and_keep_combinations_apart():
    def rounds(rank):
        if rank == 2:
            yield tuple(kind(peer, peer) for peer in (0, 1) for kind in (Send, Recv))
            return
        yield Meet((0, 1))
        yield Fold((rank, 1 - rank), blocks=rank, target="tmp")
        yield Send(2, rank, "tmp"), Recv(2, rank)
        yield Copy(rank, rank, "tmp")
        yield Meet((0, 1))

    made = phases_of(rounds, 1, [(0, 1), (2,)], 2, lambda peer: range(2))
    fold, messages, copy = made.rows[1]
    assert messages == (Send(2, 1, "tmp"), Recv(2, 1))
    assert fold.targets == [(1, "tmp", 1)] and copy.targets == [(1, "out", 1)]
    assert made.has_messages and not made.messages_first


def test_one_sided_steps_beside_messages_come_after_them():
    made = phases(lambda rank: [(Send(1 - rank), Recv(1 - rank, 1), Get(1 - rank, 0, "tmp"))])
    (messages, row) = made.rows[0]
    assert messages == (Send(1), Recv(1, 1)) and row.sources == ((1, "tmp", 0),)
    assert made.messages_first


def test_blocks_of_slots_know_what_they_hold():
    def rounds(rank):
        for k in range(2):
            yield Copy(k, 0, target="slot0")
            yield Meet((0, 1))
            yield Get(1 - rank, 0, "slot0", to=2 + k)
            yield Meet((0, 1))

    made = phases(rounds, count=4)
    assert made.held == {(r, "slot0", 0): {(r, "in", 0), (r, "in", 1)} for r in (0, 1)}
    assert (1, "slot0") in made.reached


@pytest.mark.parametrize(
    ("peer", "why"),
    [(1, "rank 1: Send.* names this rank as its"), (4, "names rank 4; there are 2")],
)
def test_messages_to_no_other_rank(peer, why):
    """All ranks are told, so that none waits for one that has raised."""
    for rank in range(2):
        with pytest.raises(ScheduleError, match=why):
            phases(lambda r: [Send(peer) if r else Copy(0, 0)], rank)


def test_meetings_in_different_orders_never_take_place():
    def rounds(rank):
        groups = ((0, 1, 2), (0, 1)) if rank else ((0, 1), (0, 1, 2))
        yield from (Meet(group) for group in groups if rank in group)

    with pytest.raises(ScheduleError, match=r"rank 0: the meeting of ranks \(0, 1\) never takes"):
        phases(rounds, size=3)
