"""The beginning that all roots share: how long it is, and that proofs are the machine's."""

from dataclasses import replace

import numpy as np
import pytest

import mpidist  # noqa: F401  (registers the algorithms)
from mpidist.errors import MpidistError
from mpidist.schedule import Copy, Recv, Reduce, Send, find, parallel, prove
from mpidist.schedule.beginning import cut
from mpidist.schedule.table import forms_of
from mpidist.schedule.wave import proofs

DIRECT = find("reduce", "direct").algorithm


def rounds_of(forms, seats):
    """The number of rounds of each seat."""
    numbers = np.full(seats, -1)
    for form in forms:
        numbers[form.seats] = form.own
    return numbers.tolist()


def parts(algorithm, size, roots):
    found = cut(forms_of(algorithm, size, roots), size, algorithm.block_count(size))
    if found is None:
        return None
    return rounds_of(found[0], size), rounds_of(found[1], size * len(roots))


def reduced(rounds, size, roots):
    """Compare the proofs of a reduce, ``rounds(rank, size, root)``, with the machine's."""
    made = replace(
        find("reduce", "linear").algorithm,
        function=lambda rank, size, *, root: iter(rounds(rank, size, root)),
        ordered=False,
    )
    found = proofs(made, size, roots)
    try:
        wanted = [replace(prove("reduce", made, size, r), at_once=None, tree=None) for r in roots]
    except MpidistError:
        wanted = None
    assert found == wanted
    return parts(made, size, roots), found


def test_a_reduce_that_combines_without_regard_to_the_root_begins_with_that():
    begun, rest = parts(DIRECT, 5, [0, 1, 4])
    assert begun == [1] * 5 and rest == [1] * 15


def test_a_tree_from_the_root_has_no_beginning_of_all_roots():
    assert parts(find("reduce", "binomial").algorithm, 8, [0, 3]) is None


def test_recursive_halving_is_the_beginning_before_a_gather():
    halving = find("reduce", "reduce_scatter_gather").algorithm
    assert parts(halving, 8, [0, 5])[0] == [3] * 8  # recursive halving


def test_a_message_that_ends_in_a_later_round_is_not_in_it():
    def rounds(rank, size, root):
        if rank < 3:  # around the ring: 0 to 2 exchange with their right and left
            right, left = (rank + 1) % 3, (rank - 1) % 3
            yield Send(right), Reduce(left)
            yield Send(right), Reduce(left)
        else:
            yield (Send(4), Reduce(4)) if rank == 3 else (Send(3), Reduce(3))
            block = 1 if rank == 4 and root else 0  # only this round depends on the root
            yield (Send(7 - rank, block), Reduce(7 - rank, 0))

    made = replace(DIRECT, function=lambda rank, size, *, root: rounds(rank, size, root), blocks=2)
    assert parts(made, 5, [0, 1])[0] == [2, 2, 2, 1, 1]


def test_a_fault_behind_the_beginning_of_one_root_is_no_proof():
    def rounds(rank, size, root, forgotten=()):
        yield from find("reduce_scatter", "direct").algorithm.function(rank, size)
        if rank == root:
            yield tuple(Recv(p, p) for p in range(size) if p not in (root, *forgotten))
        elif rank not in forgotten:
            yield Send(root, rank)

    made = replace(DIRECT, at_once=False, ordered=False)
    roots = list(range(6))
    assert proofs(replace(made, function=lambda r, n, *, root: rounds(r, n, root)), 6, roots)
    late = replace(
        made,
        function=lambda rank, size, *, root: rounds(rank, size, root, (0,) if root == 4 else ()),
    )
    assert cut(forms_of(late, 6, roots), 6, 6) is not None
    assert proofs(late, 6, roots) is None


def test_a_fault_in_the_beginning_is_no_proof():
    def twice(rank, size, root):
        yield (Send(1 - rank), Reduce(1 - rank)) if rank < 2 else ()
        yield (Send(1 - rank), Reduce(1 - rank)) if rank < 2 else ()

    begun, proved = reduced(twice, 2, [0, 1])
    assert begun == ([2, 2], [0] * 4) and proved is None  # each contribution counts twice


def test_clocks_scratch_and_figures_go_on_behind_the_beginning():
    def rounds(rank, size, root):
        """Keep what there is in "tmp", and send it from there."""
        yield Copy(0, 0, "out", "tmp")
        yield (Send(rank ^ 1, 0, "tmp"), Reduce(rank ^ 1, 0))
        yield Copy(0, 0, "out", "tmp")
        if rank == root:
            yield Reduce(3 - root)
        elif rank == 3 - root:
            yield Send(root, 0, "tmp")

    (begun, rest), proved = reduced(rounds, 4, [0, 3])
    assert begun == [3] * 4 and rest == [1, 0, 0, 1] * 2
    assert [proof.depth for proof in proved] == [2, 2]
    assert [proof.written for proof in proved] == [(2, 2, 2, 2)] * 2
    assert [proof.rounds for proof in proved] == [4, 4]


def test_schedules_with_strands_are_run_whole():
    made = replace(DIRECT, function=lambda rank, size, *, root: [parallel([], [])])
    assert parts(made, 3, [0, 1]) is None


@pytest.mark.parametrize("size", [2, 5, 8, 12])
@pytest.mark.parametrize("name", ["direct", "reduce_scatter_gather", "hierarchical"])
def test_proofs_with_a_beginning_are_the_machines(name, size):
    algorithm = find("reduce", name).algorithm
    for groups in (None, (tuple(range(size)),)) if "groups" in algorithm.uses else (None,):
        roots = sorted({0, 1, size - 1})
        found = proofs(algorithm, size, roots, groups=groups)
        for root, proof in zip(roots, found, strict=True):
            wanted = prove("reduce", algorithm, size, root, groups=groups)
            if not algorithm.combines_as_tree(size, groups):
                wanted = replace(wanted, at_once=None, tree=None)
            assert proof == wanted
