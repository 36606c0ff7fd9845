"""How a batch is cut into microbatches, and a gradient of their outputs."""

import numpy as np
import pytest

from mpidist.errors import InvalidArgument
from mpidist.pipeline.microbatches import bounds, cut_gradients, form_of


def test_bounds_give_the_remainder_to_the_last():
    assert bounds(11, 4) == [(0, 2), (2, 4), (4, 6), (6, 11)]
    assert bounds(4, 4) == [(0, 1), (1, 2), (2, 3), (3, 4)]


def test_cut_gradients_is_like_the_outputs():
    outputs = [form_of(np.ones((rows, 3))) for rows in (2, 2, 3)]
    whole = np.arange(21.0).reshape(7, 3)
    for given in (whole, [whole[:2], whole[2:4], whole[4:]]):
        found = cut_gradients(given, outputs, 1)
        assert np.array_equal(np.concatenate([part for (part,) in found]), whole)
    assert cut_gradients([None, whole[:2], None], outputs, 1)[0] == [None]
    for wrong, message in (
        (None, "grad=None: "),
        (np.ones((6, 3)), r"grad .*\b6 rows: .*\b7\b"),
        ([whole], r"grad .*\b1 entries: .*num_microbatches=3"),
        ([whole[:2]] * 3, r"grad of microbatch 2 .*\(2, 3\): .*\(3, 3\)"),
        ([whole[:2], 3, None], r"grad of microbatch 1 .*\bint: .*tensor"),
    ):
        with pytest.raises(InvalidArgument, match=f"rank 1: {message}"):
            cut_gradients(wrong, outputs, 1)
