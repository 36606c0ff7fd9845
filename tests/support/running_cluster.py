"""An emulated cluster for the tests of a module or session, which skip where it cannot be."""

from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from tests.support.minicluster import Refused


@contextmanager
def running(cluster) -> Iterator:
    """Start it, and see in the end that it left nothing behind."""
    try:
        cluster.__enter__()
    except Refused as why:
        pytest.skip(f"needs network namespaces and a TUN device: {why}")
    yield cluster
    left = cluster.left_behind()
    cluster.stop()
    assert not left, "\n".join(left)
