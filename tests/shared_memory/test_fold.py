"""Combinations of several arrays: the same bits compiled and in numpy."""

import numpy as np
import pytest

from mpidist.operations import find_op
from mpidist.shared_memory import compiled, fold
from tests.support.operands import NUMBERS, any_numbers, total

COUNT = 200_003  # several pieces


def folded(op, arrays, ranks, places, divisor, streamed):
    """The arrays after a fold of all of them into those at `places` and a new one."""
    arrays = [x.copy() for x in arrays]
    targets = [*(arrays[place] for place in places), np.zeros_like(arrays[0])]
    with np.errstate(all="ignore"):
        for action in fold.fold_in_order(
            find_op(op), arrays, ranks, targets, divisor, None, streamed
        ):
            action()
    return targets


@pytest.mark.parametrize("ranks", [(0, 1), (2, 3, 0, 1)], ids=str)
@pytest.mark.parametrize("places", [(), (0,), (1,)], ids=["apart", "first", "second"])
@pytest.mark.parametrize("dtype", NUMBERS)
def test_sums_and_means_have_the_same_bits_compiled_and_in_numpy(dtype, places, ranks, monkeypatch):
    arrays = any_numbers(dtype, COUNT, len(ranks), np.random.default_rng(7))
    for op, divisor in ("sum", 0), ("mean", len(ranks)):
        if divisor and arrays[0].dtype.kind in "iuc":
            continue
        for streamed in (False, True):
            one_pass = folded(op, arrays, ranks, places, divisor, streamed)
            with monkeypatch.context() as patch:
                patch.setattr(fold, "one_pass", lambda *arguments, **how: None)
                several = folded(op, arrays, ranks, places, divisor, streamed)
            expected = total(arrays, divisor).tobytes()
            assert [x.tobytes() for x in one_pass] == [expected] * len(one_pass)
            assert [x.tobytes() for x in several] == [expected] * len(several)


@pytest.mark.skipif(compiled.vector_width() < 32, reason="needs a C compiler for x86-64")
@pytest.mark.parametrize("dtype", NUMBERS)
def test_a_sum_is_one_action(dtype):
    arrays = [np.ones(COUNT, dtype) for _ in range(3)]
    (action,) = fold.fold_in_order(find_op("sum"), arrays, (0, 1, 2), arrays[:1], 0)
    action()
    assert (arrays[0] == np.asarray(3, dtype)).all()


@pytest.mark.parametrize("op", ["sum", "mean", "max", "exact_mean"])
@pytest.mark.parametrize("dtype", ["float16", "float32", "complex64"])
def test_one_term_is_its_own_result(op, dtype):
    """No more than a copy, and none in place: 4 MiB took 390 µs in memory that a GPU reads."""
    x = np.array([1, np.inf, -0.0, np.nan] * 100, dtype)
    if dtype == "complex64":
        x[1::4] = complex(np.inf, 0)  # that divided by 1 is no number
    before, other = x.copy(), np.zeros_like(x)
    assert fold.fold_in_order(find_op(op), [x], (0,), [x], 1) == []
    for action in fold.fold_in_order(find_op(op), [x], (0,), [x, other], 1):
        action()
    assert x.tobytes() == other.tobytes() == before.tobytes()


def of_tree(terms, function):
    """The terms combined as the fixed tree: it splits at the largest power of two below."""
    if len(terms) == 1:
        return terms[0]
    half = 1 << (len(terms) - 1).bit_length() - 1
    return function(of_tree(terms[:half], function), of_tree(terms[half:], function))


@pytest.mark.parametrize("size", [2, 3, 4, 5, 7, 9, 13])
@pytest.mark.parametrize("dtype", NUMBERS)
def test_a_tree_has_the_bits_of_numpy_compiled_and_not(dtype, size, monkeypatch):
    random = np.random.default_rng(size)
    arrays = any_numbers(dtype, 70_001, size, random)
    own = size // 2
    ranks = (own, *range(own - 1, -1, -1), *range(own + 1, size))  # in the order of "direct"
    inputs = [arrays[rank] for rank in ranks]
    for op, places, streamed in (("sum", (0,), False), ("mean", (1,), True), ("max", (), False)):
        if arrays[0].dtype.kind in {"mean": "iu", "max": "c"}.get(op, ""):
            continue
        divisor = size if op == "mean" else 0
        with np.errstate(all="ignore"):
            function = np.maximum if op == "max" else np.add
            if divisor and arrays[0].dtype.itemsize == 2:
                quotients = [(x / np.float32(size)).astype(dtype) for x in arrays]
                expected = of_tree(quotients, np.add)
            else:
                expected = of_tree(arrays, function)
                expected = expected / np.asarray(size, dtype) if divisor else expected
        for is_compiled in (True, False):
            with monkeypatch.context() as patch:
                if not is_compiled:
                    patch.setattr(fold, "one_pass", lambda *arguments, **how: None)
                by = find_op(op, order="tree")
                targets = folded(by, inputs, ranks, places, divisor, streamed)
            assert [x.tobytes() for x in targets] == [expected.tobytes()] * len(targets)


@pytest.mark.skipif(compiled.vector_width() < 32, reason="needs a C compiler for x86-64")
@pytest.mark.parametrize("dtype", ["int8", "float32", "float64", "complex64"])
def test_a_tree_is_one_action(dtype):
    arrays = [np.ones(COUNT, dtype) for _ in range(5)]
    op = find_op("sum", order="tree")
    (action,) = fold.fold_in_order(op, arrays, (2, 1, 0, 3, 4), arrays[:1], 0)
    action()
    assert (arrays[0] == np.asarray(5, dtype)).all()
