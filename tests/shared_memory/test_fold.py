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
                patch.setattr(fold, "one_pass", lambda *arguments: None)
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
