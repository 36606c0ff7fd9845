"""Tables: forms of equal rounds, cells, and sends matched with receives."""

from random import Random

import numpy as np
import pytest

import mpidist  # noqa: F401  (registers the algorithms)
from mpidist.schedule import Algorithm, Copy, Recv, Send, find, parallel
from mpidist.schedule.ranks import Unfit, choose
from mpidist.schedule.table import SEND, Table, between, forms_of, join, turning


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


def by_seat(forms):
    """Return the steps and numbers of each seat."""
    return {
        int(seat): (form.signature, form.numbers[:, column].tolist())
        for form in forms
        for column, seat in enumerate(form.seats)
    }


@pytest.mark.parametrize("size", [2, 3, 8, 11])
@pytest.mark.parametrize(
    "label",
    [
        *("broadcast binomial", "broadcast chain", "broadcast linear", "broadcast tree"),
        *("broadcast scatter_allgather", "gather binomial", "scatter binomial", "scatter linear"),
    ],
)
def test_what_turns_with_the_root_has_the_forms_of_each_root(label, size):
    algorithm = find(*label.split()).algorithm
    for root in range(size):
        assert by_seat(turning(algorithm, size, root)) == by_seat(forms_of(algorithm, size, [root]))


def expression(random, depth):
    """Return the text of a random number, of a rank, a root and the number of ranks."""
    if depth == 0 or random.random() < 0.2:
        return random.choice(["rank", "rank", "root", "size", str(random.randrange(5))])
    one, other = (expression(random, depth - 1) for _ in range(2))
    return random.choice(
        [
            *(f"(({one} + {other}) % size)", f"(({one} - {other}) % size)", f"({one} + {other})"),
            *(f"({one} - {other})", f"({one} % size)", f"({one} // 2)", f"({one} % 2)"),
            *(f"({one} * 2)", f"({one} == {other})", f"({one} < {other})", f"({one} != root)"),
            f"choose({one} == {other}, rank, root)",
        ]
    )


def test_whatever_turns_with_the_root_is_what_each_root_does():
    random, turned = Random(1), 0
    for _ in range(3000):
        if_, peer, block = (expression(random, depth) for depth in (2, 3, 2))
        made = eval(f"lambda rank, root, size: (({if_}) != 0, {peer}, {block})", {"choose": choose})

        def tried(rank, size, *, root, made=made):
            sends, peer, block = made(rank, root, size)
            yield Send(peer, block) if sends else Recv(peer, block)

        size, root = random.choice([3, 4, 6]), random.randrange(3)
        algorithm = broadcast(tried, random.choice([size, 2]))
        try:
            found = by_seat(turning(algorithm, size, root))
        except Exception:  # Unfit, or what it cannot do with such ranks
            continue
        turned += 1
        for rank in range(size):
            (step,) = tried(rank, size, root=root)
            ((signature,),), numbers = found[rank]
            assert numbers == [step.peer, step.blocks], (if_, peer, block)
            assert (signature[0] == SEND) == isinstance(step, Send), (if_, peer, block)
    assert turned > 30


@pytest.mark.parametrize("odd", ["root 2", "a higher rank", "peer", "block", "bits"])
def test_what_does_not_turn_with_the_root_is_unfit(odd):
    def tried(rank, size, *, root):
        if odd == "root 2" and root == 2:
            return
        if odd == "bits" and rank ^ root == size:
            return
        if rank == root:
            others = [(root + i) % size for i in range(1, size)]
            yield tuple(Send(3 if odd == "peer" else p, int(odd == "block")) for p in others)
        elif odd == "a higher rank" and rank < root:
            yield Recv(root, 1)
        else:
            yield Recv(rank - root if odd == "peer" else root, root if odd == "block" else 0)

    with pytest.raises((Unfit, TypeError)):
        turning(broadcast(tried, 2), 5, 0)


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


def test_messages_have_the_rounds_of_both_ends():
    made = table(find("scatter", "linear").algorithm, 4, [0])
    assert made.seat[made.sender].tolist() == [0, 0, 0]
    assert sorted(made.seat[made.receiver].tolist()) == [1, 2, 3]
    assert made.seat[made.read_round].tolist() == [0, 0, 0]


def times(rounds, size, start=None):
    """When the rounds of each rank begin and end, by rank."""
    made = table(broadcast(lambda rank, size, *, root: iter(rounds(rank, size))), size, [0])
    found = made.times(None if start is None else np.array(start))
    return [
        [tuple(int(when[r]) for when in found) for r in np.flatnonzero(made.seat == rank)]
        for rank in range(size)
    ]


def test_a_round_ends_when_its_last_partner_has_begun():
    def chain(rank, size):
        """Two rounds of rank 0, of which the second is for rank 2, which waits for rank 1."""
        if rank == 0:
            return [Send(1), Send(2)]
        if rank == 1:
            return [Recv(0), Send(2)]
        return [Recv(1), Recv(0)]

    assert times(chain, 3) == [[(0, 0), (1, 2)], [(0, 0), (1, 1)], [(0, 1), (2, 2)]]


def test_a_clock_stands_still_in_rounds_without_messages():
    def after_copies(rank, size):
        if rank:
            return [Recv(0), Copy(0, 0, "out", "tmp")]
        return [*[Copy(0, 0, "out", "tmp")] * 3, Send(1)]

    assert times(after_copies, 2) == [[(0, 0), (1, 1), (2, 2), (3, 3)], [(0, 3), (4, 4)]]
    assert times(after_copies, 2, [0, 0])[0][-1] == (0, 0)
    assert times(after_copies, 2, [5, 1]) == [[(5, 5)] * 4, [(1, 5), (6, 6)]]


def test_strands_begin_together_and_end_before_what_follows():
    def strands(rank, size):
        other = 1 - rank
        one, two = (Send, Recv) if rank == 0 else (Recv, Send)
        return [
            parallel([one(other), one(other)], [two(other, buffer="tmp")]),
            one(other),
        ]

    (first, *rest), _ = times(strands, 2)
    assert first == (0, 0) and max(rest)[0] == max(begin for begin, _ in rest) >= 3


def test_times_of_a_deadlock_do_not_settle():
    def waits(rank, size):
        return [Recv(1), Send(1)] if rank == 0 else [Recv(0), Send(0)]

    with pytest.raises(Unfit, match="deadlock"):
        times(waits, 2)


def test_joined_forms_are_one_if_their_steps_are():
    ring = find("allreduce", "ring").algorithm
    forms = [forms_of(ring, 4, [0]) for _ in range(3)]
    (made,) = join([(each, 4) for each in forms])
    assert made.seats.tolist() == list(range(12))
    assert np.array_equal(made.numbers, np.tile(forms[0][0].numbers, 3))
    (part,) = between([made], 4, 8)
    assert part.seats.tolist() == [0, 1, 2, 3]
    assert np.array_equal(part.numbers, forms[0][0].numbers)


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
