"""The check of a backend."""

import pytest

from mpidist import SimulatedBackend
from mpidist.testing import check_backend


@pytest.mark.parametrize("size", [1, 2, 3, 5])
def test_conformance(size):
    assert len(check_backend(lambda: SimulatedBackend.create_group(size))) == 11


def test_conformance_finds_faults():
    """A backend that loses the order of messages, or their length, is not let pass."""

    class Careless(SimulatedBackend):
        def irecv(self, data, peer, tag):
            return super().irecv(data, peer, 0)

        def isend(self, data, peer, tag):
            return super().isend(data, peer, 0)

    with pytest.raises(AssertionError, match="order_and_tags, rank"):
        check_backend(lambda: Careless.create_group(2))

    class Unequal(SimulatedBackend):
        def split(self, color, key):
            return super().split(color, -key)

    with pytest.raises(AssertionError, match="splits, rank"):
        check_backend(lambda: Unequal.create_group(3))
