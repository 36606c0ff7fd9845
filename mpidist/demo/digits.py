"""The UCI handwritten digits, as scikit-learn ships them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from ..errors import Unsupported

TEST_SHARE = 5
"""One sample in so many is kept for the test."""


@dataclass(frozen=True)
class Digits:
    """1797 pictures of 8 × 8 pixels, as rows of 64 numbers in [0, 1], and the digits they show."""

    train_images: np.ndarray
    train_labels: np.ndarray
    test_images: np.ndarray
    test_labels: np.ndarray


def load_digits(dtype: Any = np.float64) -> Digits:
    """Load the digits, split at random but always alike: 1438 to learn from, 359 for the test.

    Parameters
    ----------
    dtype : dtype
        Of the images.

    Raises
    ------
    Unsupported
        If scikit-learn is not installed.

    Notes
    -----
    Alpaydin and Kaynak, *Optical recognition of handwritten digits*, UCI Machine Learning
    Repository, 1998 (its test part, which is what scikit-learn has).
    """
    try:
        from sklearn import datasets
    except ImportError as error:
        raise Unsupported(
            "the demo's data come with scikit-learn, which is not installed: "
            f"pip install 'mpidist[demo]' ({error})"
        ) from error
    bunch = datasets.load_digits()
    order = np.random.default_rng(0).permutation(len(bunch.target))
    images, labels = (bunch.data[order] / 16).astype(dtype), bunch.target[order]
    test = len(labels) // TEST_SHARE
    return Digits(images[test:], labels[test:], images[:test], labels[:test])
