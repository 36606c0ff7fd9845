"""What ranks compare: options, used parameters, wrappers of a parameter."""

import copy
import pickle

import pytest

from mpidist.errors import InvalidArgument, UnknownName
from mpidist.parallel import DDP, ZeroOptimizer
from mpidist.parallel.hooks import TopK
from tests.support.training_kits import KITS, SMALL, batch


@pytest.mark.mpi(min_size=2)
@pytest.mark.parametrize("kit", KITS)
def test_check_alike_names_the_option_that_differs(comm, kit):
    for name, here, there in (
        ("overlap", "polls", "none"),
        ("bucket_bytes", 64, 128),
        ("buffers", "keep", "average"),
        ("algorithm", "ring", "linear"),
        ("hook", TopK(), None),
        ("init_sync", True, False),
    ):
        with pytest.raises(InvalidArgument, match=f"rank 1 has {name}=.* where rank 0 has"):
            DDP(kit.mlp(), comm, **{name: there if comm.rank else here})


@pytest.mark.parametrize("kit", KITS)
def test_check_used_names_the_last_rank(comm, kit):
    """An error on all ranks, also if rank 0 has used every parameter."""
    net, last, (x, labels) = kit.mlp(), comm.size - 1, batch()
    model = DDP(net, comm, unused="error", **SMALL)
    for _ in range(2):
        model.zero_grad()
        with pytest.raises(InvalidArgument) as caught:
            if comm.rank != last:
                kit.step(model, x, labels, 1.0)
            model.sync_gradients()
        assert f"rank {comm.rank}: parameters without a gradient" in str(caught.value)
        for name, _ in model.reducer.grouping.named:
            assert f"{name} (on rank {last})" in str(caught.value)


@pytest.mark.parametrize("kit", KITS)
def test_ownership_second_wrapper_is_refused(comm, kit):
    net = kit.mlp()
    model = DDP(net, comm)
    said = rf"rank {comm.rank}: .*0\.weight, 0\.bias, .*\bDDP\b"
    with pytest.raises(InvalidArgument, match=said):
        DDP(net, comm)
    if kit.name == "torch":
        with pytest.raises(
            InvalidArgument, match=rf"rank {comm.rank}: .*\bweight, bias\b.*\bDDP\b"
        ):
            DDP(net[2], comm)
    model.close()
    with pytest.raises(UnknownName) as failed:  # whose traceback holds what was not made
        DDP(net, comm, algorithm="rung")
    again = DDP(net, comm)
    assert failed.tb
    again.close()
    DDP(net, comm).close()


@pytest.mark.parametrize("kit", KITS)
def test_not_copyable_ddp_and_zero_are_refused(comm, kit):
    net = kit.mlp()
    model = DDP(net, comm, overlap="polls", **SMALL)
    x, labels = batch()
    kit.step(copy.deepcopy(net), x, labels, 1.0)
    assert not model.reducer.touched.any()
    optimizer = kit.optimizers()["sgd"]
    for whole in (model, ZeroOptimizer(optimizer[0], model, **optimizer[1])):
        for act in (copy.copy, copy.deepcopy, pickle.dumps):
            with pytest.raises(
                InvalidArgument, match=f"rank {comm.rank}: .*{type(whole).__name__}"
            ):
                act(whole)
