"""Meetings that nothing needs are named, and no others."""

import pytest

from mpidist.errors import ScheduleError
from mpidist.schedule import Copy, Fold, Get, Meet, Put, algorithm, algorithms, find, parallel
from mpidist.schedule.needless import Meeting, find_needless, needless_meetings
from mpidist.schedule.registry import unregister


@pytest.fixture
def planted():
    """An allreduce with one meeting too many, and a broadcast that has for one root."""

    @algorithm("allreduce", "planted", memory="mapped")
    def allreduce(rank, size):
        yield Meet(range(size))
        yield Fold(range(size), blocks=0, source="in", target="tmp")
        yield Meet(range(size))
        yield Copy(0, 0, source="tmp")
        yield Meet(range(size))

    @algorithm("broadcast", "planted", memory="published")
    def broadcast(rank, size, *, root):
        yield Meet(range(size))
        if rank == root == 1:
            yield Copy(0, 0, target="tmp")
        yield Meet(range(size))
        if rank != root:
            yield Get(root, source="tmp" if root == 1 else "in")
        yield Meet(range(size))

    yield
    unregister("allreduce", "planted")
    unregister("broadcast", "planted")


def in_strands(rank, size):
    """Two strands, of which the second meets once too often at its end."""

    def strand(block, more):
        yield Meet(range(size))
        if rank == block:
            yield Fold(range(size), blocks=block)
            yield Put(1 - rank, blocks=block)
        for _ in range(more):
            yield Meet(range(size))

    yield parallel(strand(0, 1), strand(1, 2))


def test_a_planted_meeting_is_named_with_its_sizes(planted):
    (found,) = find_needless("allreduce", "planted", range(1, 5))
    assert (found.collective, found.name) == ("allreduce", "planted")
    # After the second, all have read: what follows is each rank's own.
    assert (found.meeting, found.sizes) == ("meeting 3 of all ranks", (2, 3, 4))


def test_a_meeting_that_a_root_needs_is_not_named(planted):
    chosen = find("broadcast", "planted").algorithm
    either = [Meeting((), (0, 1, 2), 1), Meeting((), (0, 1, 2), 2)]  # one of them is needed
    assert needless_meetings(chosen, 3, (0,)) == either
    assert needless_meetings(chosen, 3, range(3)) == either[:1]


def test_meetings_of_strands_are_counted_apart():
    algorithm("allreduce", "planted_strands", blocks=2, memory="mapped")(in_strands)
    try:
        chosen = find("allreduce", "planted_strands").algorithm
        found = needless_meetings(chosen, 2)
    finally:
        unregister("allreduce", "planted_strands")
    assert [m.path for m in found].count((1,)) >= 1
    assert "meeting 2 of all ranks in strand 1" in [m.text(2) for m in found]


def test_what_is_wrong_has_a_counter_example_first(planted):
    @algorithm("allreduce", "planted", memory="mapped")
    def wrong(rank, size):
        yield Fold(range(size))
        yield Meet(range(size))

    with pytest.raises(ScheduleError, match="may not have called yet"):
        find_needless("allreduce", "planted", [2])


@pytest.mark.parametrize(
    "label", [a.label for a in algorithms(one_sided=True) if a.memory is not None]
)
def test_shipped_algorithms_meet_no_more_than_they_must(label):
    assert find_needless(*label.split(), (2, 3, 4, 5)) == []


def test_an_algorithm_by_messages_has_no_meeting():
    assert find_needless("allreduce", "ring", range(1, 5)) == []
