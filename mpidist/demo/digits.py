"""The UCI handwritten digits of scikit-learn."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from ..errors import Unsupported

TEST_SHARE = 5
"""One of this many samples is a test sample."""


@dataclass(frozen=True)
class Digits:
    """1797 images of 8 × 8 pixels, as rows of 64 numbers in [0, 1], and their labels."""

    train_images: np.ndarray
    train_labels: np.ndarray
    test_images: np.ndarray
    test_labels: np.ndarray


def load_digits(dtype: Any = np.float64) -> Digits:
    """Load the digits in a fixed order: 1438 training samples and 359 test samples.

    Unsupported if scikit-learn is not installed.  They are the test part of Alpaydin and Kaynak,
    *Optical recognition of handwritten digits*, UCI Machine Learning Repository, 1998.
    """
    try:
        from sklearn import datasets
    except ImportError as error:
        raise Unsupported(
            "the demo's data come with scikit-learn, which is not installed: "
            f"pip install scikit-learn ({error})"
        ) from error
    bunch = datasets.load_digits()
    order = np.random.default_rng(0).permutation(len(bunch.target))
    images, labels = (bunch.data[order] / 16).astype(dtype), bunch.target[order]
    test = len(labels) // TEST_SHARE
    return Digits(images[test:], labels[test:], images[:test], labels[:test])
