"""Meetings that nothing needs are named, and no others."""

import pytest

from mpidist.errors import ScheduleError
from mpidist.schedule import (
    Copy,
    Fold,
    Get,
    Meet,
    Put,
    Recv,
    Send,
    algorithm,
    algorithms,
    find,
    parallel,
)
from mpidist.schedule.needless import Meeting, Word, find_needless, needless_steps
from mpidist.schedule.registry import unregister
from mpidist.schedule.rounds import Combine, Signal, Wait


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
    assert (found.what, found.sizes) == ("meeting 3 of all ranks", (2, 3, 4))


def test_a_meeting_that_a_root_needs_is_not_named(planted):
    chosen = find("broadcast", "planted").algorithm
    either = [Meeting((), (0, 1, 2), 1), Meeting((), (0, 1, 2), 2)]  # one of them is needed
    assert needless_steps(chosen, 3, (0,)) == either
    assert needless_steps(chosen, 3, range(3)) == either[:1]


def test_meetings_of_strands_are_counted_apart():
    algorithm("allreduce", "planted_strands", blocks=2, memory="mapped")(in_strands)
    try:
        chosen = find("allreduce", "planted_strands").algorithm
        found = needless_steps(chosen, 2)
    finally:
        unregister("allreduce", "planted_strands")
    assert [m.path for m in found].count((1,)) >= 1
    assert "meeting 2 of all ranks in strand 1" in [m.text(2) for m in found]


def test_words_that_nothing_needs_are_named():
    """Rank 0 tells rank 1 by a message without blocks that it may read, twice."""

    @algorithm("broadcast", "planted_word", memory="published", requires=two_ranks)
    def told(rank, size, *, root):
        yield Meet(range(size))
        if rank == root:
            yield Copy(0, 0, target="tmp")
            yield Send(1 - root, ())
            yield Send(1 - root, ())
        else:
            yield Recv(root, ())
            yield Recv(root, ())
            yield Get(root, source="tmp")
        yield Meet(range(size))

    try:
        chosen = find("broadcast", "planted_word").algorithm
        found = needless_steps(chosen, 2, (0,))
        texts = {step.text(2) for step in found if isinstance(step, Word)}
        assert texts == {f"message, number {n} of rank 0 to rank 1" for n in (1, 2)}
        assert needless_steps(chosen, 2, (0, 1)) == [m for m in found if isinstance(m, Meeting)]
    finally:
        unregister("broadcast", "planted_word")


def two_ranks(size):
    return None if size == 2 else f"{size} ranks: expected 2 ranks"


def test_signals_that_nothing_needs_are_named():
    @algorithm("allreduce", "planted_signal", memory="kernels", blocks=2)
    def signals(rank, size):
        yield Copy(range(2), range(2))
        yield Signal(1 - rank, "begun"), Signal(1 - rank, "again")
        yield Wait(1 - rank, "begun"), Wait(1 - rank, "again")
        both = ((rank, "out", rank), (1 - rank, "out", rank))
        yield Combine(both, both)
        yield Signal(1 - rank, "done")
        yield Wait(1 - rank, "done")

    try:
        found = needless_steps(find("allreduce", "planted_signal").algorithm, 2)
    finally:
        unregister("allreduce", "planted_signal")
    assert {(s.source, s.where) for s in found} == {
        (rank, f"signal on {name}, number") for rank in (0, 1) for name in ("begun", "again")
    }


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
