"""Tables: forms of equal rounds, cells, and sends matched with receives."""

import numpy as np
import pytest

import mpidist  # noqa: F401  (registers the algorithms)
from mpidist.schedule import Algorithm, Recv, Send, find, parallel
from mpidist.schedule.ranks import Unfit
from mpidist.schedule.table import Table, forms_of, ranged


def broadcast(function, blocks=1):
    return Algorithm("broadcast", "tried", function, blocks=blocks, uses=frozenset({"root"}))


def table(algorithm, size, roots):
    forms = forms_of(algorithm, size, roots)
    count = algorithm.block_count(size)
    return Table(forms, size, size * len(roots), count)


def test_all_ranks_of_a_ring_are_one_form_made_in_one_call():
    (form,) = forms_of(find("allreduce", "ring").algorithm, 8, [0])
    assert len(form.parts) == 1 and form.numbers.shape == (14 * 4, 8)
    assert form.numbers[0].tolist() == [1, 2, 3, 4, 5, 6, 7, 0]  # the right neighbours


def test_all_roots_of_a_tree_have_few_forms():
    forms = forms_of(find("broadcast", "binomial").algorithm, 64, range(64))
    assert sum(len(form.seats) for form in forms) == 64 * 64
    assert len(forms) == 7  # 0 to 6 children; the root has 6, and nobody else


def test_sends_and_receives_are_matched_in_order():
    def twice(rank, size, *, root):
        if rank == root:
            yield tuple(Send(1 - rank, block) for block in (1, 0, 2))
        else:
            yield tuple(Recv(1 - rank, block) for block in (0, 2, 1))

    made = table(broadcast(twice, 3), 2, [0, 1])
    assert made.messages.tolist() == [3, 0, 0, 3]
    offset = made.count  # of "out" in the cells of a seat
    pairs = {
        (int(target) % made.width - offset, int(made.read[source]) % made.width - offset)
        for target, source in zip(made.target, made.source)
    }
    assert pairs == {(0, 1), (2, 0), (1, 2)}


def test_ranges_are_elements_of_rounds():
    made = table(find("scatter", "linear").algorithm, 4, [0])
    sends = ranged(made, made.sends, made.first)
    assert sorted(made.seat[made.sender[sends]].tolist()) == [0, 0, 0]
    received = ranged(made, made.receives, made.first)
    assert sorted(made.seat[made.receiver[made.received[received]]].tolist()) == [1, 2, 3]


@pytest.mark.parametrize(
    ("rounds", "reason"),
    [
        (lambda rank, size, root: [Send((rank + 1) % size)], "partner"),
        (lambda rank, size, root: [Send(rank)], "no other rank"),
        (lambda rank, size, root: [Send(size)], "no other rank"),
        (lambda rank, size, root: [Send(-1)], "does not exist"),
        (lambda rank, size, root: [(Send(1 - rank, 5), Recv(1 - rank, 5))], "does not exist"),
        (lambda rank, size, root: [(Send(1 - rank, (0, 0)), Recv(1 - rank))], "another length"),
        (lambda rank, size, root: [(Send(1 - rank), Recv(1 - rank, buffer="in"))], "input"),
        (lambda rank, size, root: [(Send(1 - rank, (0.5,)), Recv(1 - rank))], "whole number"),
        (
            lambda rank, size, root: [
                parallel([(Send(1 - rank), Recv(1 - rank))], [Recv(1 - rank)], window=1)
            ],
            "window",
        ),
        (
            lambda rank, size, root: [
                parallel(
                    [(Send(1 - rank), Recv(1 - rank, buffer="tmp"))],
                    [(Send(1 - rank), Recv(1 - rank))],
                )
            ],
            "two strands",
        ),
    ],
)
def test_what_a_table_cannot_have_is_unfit(rounds, reason):
    made = broadcast(lambda rank, size, *, root: rounds(rank, size, root))
    with pytest.raises(Unfit, match=reason):
        table(made, 2, [0])


def test_cells_of_every_seat_are_its_own():
    made = table(find("alltoall", "bruck").algorithm, 5, [0])
    assert np.array_equal(np.unique(made.target // made.width), np.arange(5))
    assert made.width == 5 + 5 + 5
