"""How much is tested: ``MPIDIST_TEST_PROFILE=stress``, of ``make stress``, has time for hours."""

import os

import pytest

STRESS = os.environ.get("MPIDIST_TEST_PROFILE") == "stress"
takes_minutes = pytest.mark.skipif(not STRESS, reason="takes minutes: make stress")
