"""The loss: stable, and a mean over the samples that there are."""

import numpy as np
import pytest

from mpidist.errors import InvalidArgument
from mpidist.nn import CrossEntropy


def test_cross_entropy_is_stable():
    loss = CrossEntropy()
    scores = np.array([[1e4, -1e4, 0.0], [-1e4, 1e4, 0.0]])
    assert loss(scores, np.array([0, 1])) == 0.0
    assert loss(scores, np.array([1, 0])) == 2e4
    assert np.isfinite(loss.backward()).all()
    assert loss(np.zeros((3, 10)), np.zeros(3, int)) == pytest.approx(np.log(10))


def test_no_samples_have_no_mean():
    scores, labels = np.zeros((0, 3)), np.zeros(0, int)
    with pytest.raises(InvalidArgument, match=r"labels=\[\]: .*reduction='sum'"):
        CrossEntropy()(scores, labels)
    loss = CrossEntropy("sum")
    assert loss(scores, labels) == 0 and loss.backward().shape == (0, 3)
