"""How much is tested: ``MPIDIST_TEST_PROFILE=stress``, of ``make stress``, has time for hours."""

import os

import pytest

STRESS = os.environ.get("MPIDIST_TEST_PROFILE") == "stress"
takes_minutes = pytest.mark.skipif(not STRESS, reason="takes minutes: make stress")


def roots(algorithm, size):
    """The roots to prove an algorithm with; of more than 16 ranks all only in ``make stress``."""
    if not algorithm.contract.rooted:
        return [0]
    return range(size) if STRESS or size <= 16 else [0, 1, size // 2, size - 1]
