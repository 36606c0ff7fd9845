"""Buckets in memory that ranks share."""

import numpy as np
import pytest

from mpidist.backends import memory_file
from mpidist.nn import Linear
from mpidist.parallel import DDP
from tests.support.pretended import on_nodes


@pytest.mark.one_node
def test_buckets_lie_in_symmetric_memory(comm):
    """Their algorithm is pinned, and none whose bits might differ between ranks."""
    net = Linear(100, 400)
    model = DDP(net, comm)
    for _ in range(2):
        model(np.ones((1, 100), np.float32))
        model.backward(np.full((1, 400), comm.rank, np.float32))
        model.sync_gradients()
        model.zero_grad()
    if comm.size > 1:
        assert [bucket.algorithm for bucket in model.buckets] == ["symmetric"]
    small = DDP(Linear(2, 2), comm)
    assert not {"native", "staged"} & {bucket.algorithm for bucket in small.buckets}
    asked = DDP(Linear(2, 2), comm, algorithm="native")
    assert [bucket.algorithm for bucket in asked.buckets] == ["native"]


@pytest.mark.one_node
@pytest.mark.parametrize("shared", [True, False])
@pytest.mark.parametrize("per_node", [1, 2])
def test_buckets_on_several_nodes(comm, per_node, shared, monkeypatch):
    """They lie in the memory that each node shares, or where there is none in private memory."""
    if comm.size <= per_node:
        pytest.skip(f"needs at least {per_node + 1} ranks")
    with monkeypatch.context() as patched:
        if not shared:
            patched.setattr(memory_file, "attach", _refuse)
        nodes = on_nodes(comm, per_node)
    net = Linear(100, 400)
    model = DDP(net, nodes)
    for _ in range(3):
        model(np.ones((1, 100), np.float32))
        model.backward(np.full((1, 400), comm.rank, np.float32))
        model.sync_gradients()
        mean = (comm.size - 1) / 2
        assert all(np.allclose(p.grad, mean) for p in net.parameters())
        model.zero_grad()
    (bucket,) = model.buckets
    heap = nodes._service.heap
    assert shared == (heap is not None and heap.find(bucket.flat) is not None)
    assert bucket.algorithm not in ("native", "symmetric", "staged", "single_copy")
    nodes.free()


def _refuse(made, nbytes):
    raise FileNotFoundError(made)
