"""The state of the fast proofs: its terms are those of the Python machine."""

from random import Random

import numpy as np
import pytest

from mpidist.schedule.contract import COLLECTIVES
from mpidist.schedule.ranks import Unfit
from mpidist.schedule.state import State, TermArrays
from mpidist.schedule.terms import Terms


def array(*numbers):
    return np.array(numbers, np.int64)


@pytest.mark.parametrize("size", [3, 70])
def test_terms_are_those_of_the_machine(size):
    random = Random(size)
    terms, arrays = Terms(size), TermArrays(1, size, False)
    pool = []  # pairs of one term in both
    for rank in range(size):
        (number,) = terms.leaves(rank, range(4, 5)).values()
        pool.append((number, int(arrays.leaves(array(rank), array(4))[0])))
    for _ in range(300):
        (one, a), (other, b) = random.choice(pool), random.choice(pool)
        try:
            expected = terms.combine(one, other)
        except ValueError:
            with pytest.raises(Unfit):
                arrays.combine(array(a), array(b))
            continue
        pool.append((expected, int(arrays.combine(array(a), array(b))[0])))
    for number, mine in pool:
        mask = sum(int(word[mine]) << 64 * k for k, word in enumerate(arrays.mask))
        assert mask == terms._mask[number]
        assert (arrays.low[mine], arrays.high[mine]) == (terms._low[number], terms._high[number])
        assert arrays.sorted[mine] == terms._sorted[number]
    for one, a in pool:
        for other, b in pool:
            assert (one == other) == (arrays.hash[a] == arrays.hash[b])


@pytest.mark.parametrize("size", [6, 70])
def test_folds_are_those_of_the_machine(size):
    terms, arrays = Terms(size), TermArrays(1, size, False)
    leaves = [next(iter(terms.leaves(rank, range(1)).values())) for rank in range(size)]
    mine = arrays.leaves(np.arange(size), np.zeros(size, np.int64))
    orders = [
        [first, *Random(first).sample([*range(first), *range(first + 1, size)], 4)]
        for first in range(2, size)
    ]
    orders += [[0, 1, 2, 3, 4], [1, 0, 2, 3, 4]]
    columns = np.array(orders * 3).T  # so that most are equal to another
    found = arrays.fold(columns, mine[columns])
    assert len(np.unique(found)) == len({*map(tuple, orders)})  # each is combined once
    for column, number in zip(orders * 3, found):
        expected = terms.fold(tuple(column), [leaves[rank] for rank in column])
        mask = sum(int(word[number]) << 64 * k for k, word in enumerate(arrays.mask))
        assert mask == terms._mask[expected]
        assert (arrays.low[number], arrays.high[number]) == (
            terms._low[expected],
            terms._high[expected],
        )
        assert arrays.sorted[number] == terms._sorted[expected]
    assert len({*arrays.hash[found].tolist()}) == len({*map(tuple, orders)})
    for wrong in ([0, 1, 0, 2, 3], [0, 1, 2, 3, 0]):
        with pytest.raises(Unfit, match="twice"):
            arrays.fold(np.arange(5)[:, None], mine[np.array(wrong)][:, None])


def test_sets_of_ranks_are_equal_however_they_are_combined():
    arrays = TermArrays(8, 4, True)
    a, b, c = (arrays.leaves(array(rank), array(0)) for rank in range(3))
    one, other = arrays.combine(arrays.combine(a, b), c), arrays.combine(c, arrays.combine(b, a))
    assert arrays.hash[one] == arrays.hash[other] == arrays.hash[arrays.combine(one, other)]


def test_the_start_is_the_contracts():
    state = State(COLLECTIVES["broadcast"], 3, [0, 2], 2, 6, False)
    held = np.flatnonzero(state.memory >= 0).tolist()
    assert held == [2, 3, 5 * 6 + 2, 5 * 6 + 3]  # "out" of rank 0 of one, of rank 2 of the other
    state = State(COLLECTIVES["alltoall"], 2, [0], 2, 6, False)
    assert np.flatnonzero(state.memory >= 0).tolist() == [0, 1, 6, 7]  # "in"


def test_a_result_that_is_missing_or_wrong_is_unfit():
    state = State(COLLECTIVES["broadcast"], 2, [0], 1, 3, False)
    with pytest.raises(Unfit, match="never written"):
        state.proofs(np.zeros(1, int))
    state.memory[3 + 1] = state.memory[1]
    (proof,) = state.proofs(np.ones(1, int))
    assert (proof.depth, proof.ordered, proof.identical) == (1, True, True)
    state.memory[1] = state.memory[4] = state.terms.leaves(array(1), array(0))[0]
    with pytest.raises(Unfit, match="wrong"):
        state.proofs(np.zeros(1, int))
