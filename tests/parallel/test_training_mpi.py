"""Training under mpiexec."""

import numpy as np
import pytest

from mpidist.backends import memory_file
from mpidist.errors import InvalidArgument
from mpidist.nn import Linear
from mpidist.parallel import DDP
from tests.support import training_cases as cases
from tests.support.pretended import on_nodes
from tests.support.training_kits import KITS, skip_if_too_few


@pytest.mark.parametrize("kit", KITS)
@pytest.mark.parametrize("case", cases.CASES, ids=lambda case: case.__name__)
def test_training(comm, case, kit):
    skip_if_too_few(case, comm.size)
    case(comm, kit)


@pytest.mark.parametrize("kit", KITS)
@pytest.mark.parametrize("optimizer, overlap, passes, options", cases.ONE_PROCESS)
def test_equals_one_process(comm, kit, optimizer, overlap, passes, options):
    cases.equals_one_process(comm, kit, optimizer, overlap, passes, **options)


@pytest.mark.parametrize("zero", (False, True))
@pytest.mark.parametrize("overlap", ("none", "polls", "thread"))
@pytest.mark.parametrize("kit", KITS)
@pytest.mark.parametrize("optimizer", ("momentum", "adam"))
def test_a_mixture_of_experts(comm, kit, optimizer, overlap, zero):
    cases.a_mixture_of_experts(comm, kit, optimizer, overlap, zero)


@pytest.mark.parametrize("overlap", ("auto", "none", "polls", "thread"))
@pytest.mark.parametrize("kit", KITS)
def test_backward_averages(comm, kit, overlap):
    cases.backward_averages(comm, kit, overlap)


@pytest.mark.parametrize("overlap", ("auto", "none", "polls", "thread"))
@pytest.mark.parametrize("kit", KITS)
def test_backward_passes_add_up(comm, kit, overlap):
    cases.backward_passes_add_up(comm, kit, overlap)


@pytest.mark.parametrize("overlap", ("polls", "thread"))
@pytest.mark.parametrize("kit", KITS)
def test_early_buckets(comm, kit, overlap):
    cases.early_buckets_are_launched_in_backward(comm, kit, overlap)


@pytest.mark.parametrize("kit", KITS)
@pytest.mark.parametrize("optimizer", ("sgd", "momentum", "adam"))
def test_uneven_inputs(comm, kit, optimizer):
    cases.uneven_inputs(comm, kit, optimizer)


@pytest.mark.parametrize("kit", KITS)
def test_a_forgotten_sync(comm, kit, caplog):
    cases.a_forgotten_sync_is_told(comm, kit, caplog)


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


def test_ways_can_be_left_out(comm):
    """Of what "explain" chooses; training leaves out what may differ in bits between ranks."""
    every = ("native", "staged", "single_copy", "symmetric")
    for nbytes in (8, 64 << 10, 4 << 20, 64 << 20):
        assert comm.explain("allreduce", nbytes, without=every)[0].choice is not None
    with pytest.raises(InvalidArgument, match=r"without=\('ring',\): .*\bnative, "):
        comm.explain("allreduce", 8, without=("ring",))
