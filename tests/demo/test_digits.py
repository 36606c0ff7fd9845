"""The digits of the demo."""

import sys

import numpy as np
import pytest

from mpidist import run_simulated
from mpidist.demo import load_digits, train
from mpidist.errors import Unsupported


def test_load_digits_splits_and_scales():
    digits = load_digits("float32")
    assert digits.train_images.shape == (1438, 64) and digits.test_images.shape == (359, 64)
    assert digits.train_images.dtype == np.float32 and digits.train_images.max() == 1.0
    assert set(digits.test_labels) == set(range(10))
    np.testing.assert_array_equal(load_digits().test_labels, digits.test_labels)


def test_train_without_scikit_learn_is_refused(monkeypatch):
    monkeypatch.setitem(sys.modules, "sklearn", None)

    def rank_main(comm):
        with pytest.raises(Unsupported, match="rank 0: .*scikit-learn"):
            train(comm)

    run_simulated(2, rank_main)
