"""What ranks compare: options, used parameters, wrappers of a parameter."""

import copy
import pickle

import pytest

from mpidist.errors import InvalidArgument, UnknownName
from mpidist.parallel import DDP, ZeroOptimizer
from mpidist.parallel.hooks import TopK
from tests.support.training_kits import KITS, SMALL, SMALLEST, batch, needs_torch, torch, two_heads


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


@needs_torch
@pytest.mark.ranks(1, 2, 3)
def test_check_used_names_parameters_and_ranks(comm):
    model = DDP(two_heads(), comm, unused="error", **SMALLEST)
    every = ", ".join(map(str, range(comm.size)))
    odd = ", ".join(map(str, range(0, comm.size, 2)))
    for _ in range(2):
        with pytest.raises(InvalidArgument) as error:
            model(torch.ones(1, 3), comm.rank % 2).sum().backward()
            model.sync_gradients()
        assert f"rank {comm.rank}: " in str(error.value)
        assert f"heads.2.weight (on rank {every})" in str(error.value)
        assert f"heads.1.bias (on rank {odd})" in str(error.value)
        even = ", ".join(map(str, range(1, comm.size, 2)))  # rank 0 has used it
        assert comm.size == 1 or f"heads.0.bias (on rank {even})" in str(error.value)
        assert "body" not in str(error.value)
        model.zero_grad()
    keep = torch.optim.SGD(model.parameters(), lr=0.0)
    for head in range(3):
        with model.no_sync():
            model(torch.ones(1, 3), head).sum().backward()
    model(torch.ones(1, 3), 0).sum().backward()
    model.sync_gradients()  # everything was used
    keep.zero_grad(set_to_none=False)  # which leaves no trace but that of the hooks
    for head in range(3):
        with model.no_sync():
            model(torch.ones(1, 3), head).sum().backward()
    model(torch.ones(1, 3), 0).sum().backward()
    model.sync_gradients()


@needs_torch
@pytest.mark.ranks(1, 2, 3)
def test_guard_changed_requires_grad_is_refused(comm):
    for before in (True, False):
        net = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Linear(2, 2))
        net[0].requires_grad_(before)
        model = DDP(net, comm)
        model(torch.ones(1, 2)).sum().backward()
        model.sync_gradients()
        net[0].requires_grad_(not before)
        with pytest.raises(InvalidArgument, match=f"rank {comm.rank}: requires_grad of 0.weight, "):
            model(torch.ones(1, 2)).sum().backward()
            model.sync_gradients()


@needs_torch
@pytest.mark.ranks(1, 2, 3)
def test_guard_replaced_parameters_are_told(comm):
    for change in (
        lambda net: net.load_state_dict(
            {k: v + 1 for k, v in net.state_dict().items()}, assign=True
        ),
        lambda net: net.__setitem__(1, torch.nn.Linear(2, 2)),
        lambda net: net.append(torch.nn.Linear(2, 2)),
        lambda net: net.pop(1),
        lambda net: net.append(torch.nn.ReLU()),  # which is not learnt
    ):
        net = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Linear(2, 2))
        model = DDP(net, comm, sync="manual")
        change(net)
        for _ in range(2):
            model(torch.ones(1, 2)).sum().backward()
            if len(net) == 3 and isinstance(net[2], torch.nn.ReLU):
                model.sync_gradients()
                continue
            said = rf"rank {comm.rank}: .*\bmodule\b.*\bDDP\b"
            with pytest.raises(InvalidArgument, match=said):
                model.sync_gradients()
