"""A DDP of a module of PyTorch: hooks of autograd, states, the options of its own DDP."""

import copy
import pickle
from contextlib import nullcontext

import pytest

from mpidist import Checkpoint
from mpidist.errors import InvalidArgument
from mpidist.parallel import DDP, ZeroOptimizer
from tests.support.training_kits import NEEDS_TORCH, SMALLEST, torch

if torch is None:
    pytest.skip(NEEDS_TORCH, allow_module_level=True)

from torch import nn
from torch.distributed.checkpoint.state_dict import get_model_state_dict, set_model_state_dict

pytestmark = pytest.mark.ranks(1, 2, 3)


def test_require_backward_grad_sync_is_no_sync(comm):
    """require_backward_grad_sync = False, as nanoGPT sets it, is no_sync()."""
    model = DDP(nn.Linear(2, 1, bias=False), comm, overlap="polls")
    grad, mine = model.module.weight, comm.rank + 1.0
    mean = (comm.size + 1) / 2
    for last in (False, True):
        model.require_backward_grad_sync = last
        assert model.require_backward_grad_sync is last
        model(torch.full((1, 2), mine)).sum().backward()
        assert grad.grad.tolist() == [[2 * mean if last else mine] * 2]
    with model.no_sync():
        assert not model.require_backward_grad_sync
    assert model.require_backward_grad_sync


def test_options_of_distributed_data_parallel_are_translated(comm):
    net, rank = nn.Linear(2, 2), comm.rank
    for name, value, kept in (
        ("find_unused_parameters", True, ("skip", "broadcast")),
        ("find_unused_parameters", False, ("error", "broadcast")),
        ("broadcast_buffers", False, ("skip", "keep")),
        ("gradient_as_bucket_view", True, ("skip", "broadcast")),
        ("process_group", None, ("skip", "broadcast")),
    ):
        model = DDP(net, comm, **{name: value})
        assert (model.reducer.unused, model.buffer_sync.how) == kept
        model.close()
    for options, said in (
        (
            {"gradient_as_bucket_view": False},
            "gradient_as_bucket_view=False: expected True: .*views",
        ),
        ({"find_unused_parameters": 1}, "find_unused_parameters=1: expected True or False"),
        ({"device_ids": [0]}, r"device_ids=\[0\]: expected None: .*move the module"),
        ({"process_group": 3}, "process_group=3: expected None: .*the argument comm"),
        ({"static_graph": 1}, "static_graph=1: expected one of True, False"),
        ({"bucket_cap": 3}, "DDP has no option bucket_cap: expected .*bucket_bytes"),
        (
            {"find_unused_parameters": True, "unused": "error"},
            "find_unused_parameters=True means unused='skip', .* unused='error'",
        ),
    ):
        with pytest.raises(InvalidArgument, match=f"rank {rank}: {said}"):
            DDP(net, comm, **options)
    model = DDP(net, comm)
    with pytest.raises(InvalidArgument, match=f"rank {rank}: join.divide_by_initial_world_size"):
        with model.join(divide_by_initial_world_size=False):
            pass
    with model.join(enable=False):
        model(torch.ones(1, 2)).sum().backward()
    early = comm.rank == comm.size - 1
    told = pytest.raises(InvalidArgument, match=f"rank {comm.size - 1} is the first to finish")
    with nullcontext() if comm.size == 1 else told:
        with model.join(throw_on_early_termination=True):
            for _ in range(1 if early else 2):
                model.zero_grad()
                model(torch.ones(1, 2)).sum().backward()


class Adversaries:
    """A discriminator of several buckets, and a generator."""

    def __init__(self):
        generator = torch.Generator().manual_seed(3)
        self.d = nn.Sequential(
            nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 6), nn.Linear(6, 1)
        ).double()
        self.g = nn.Linear(2, 6).double()
        with torch.no_grad():
            for p in (*self.d.parameters(), *self.g.parameters()):
                p.copy_(torch.randn(p.shape, generator=generator, dtype=p.dtype) / 2)

    def train(self, d, g, freeze, parts):
        """Train with the calls `d` and `g`, on parts of the batch whose gradients add up."""
        od, og = (torch.optim.Adam(x.parameters(), lr=0.01) for x in (self.d, self.g))
        for step in range(12):
            z = torch.randn(60, 2, generator=torch.Generator().manual_seed(step)).double()
            real = torch.randn(60, 6, generator=torch.Generator().manual_seed(99 + step)).double()
            od.zero_grad()
            for part in parts:
                (d(g(z[part]).detach()).mean() - d(real[part]).mean()).div(len(parts)).backward()
            od.step()
            og.zero_grad()
            self.d.requires_grad_(not freeze)
            for part in parts:
                (-d(g(z[part])).mean()).div(len(parts)).backward()
            self.d.requires_grad_(True)
            og.step()
        return [p.detach().clone() for p in (*self.d.parameters(), *self.g.parameters())]


def test_adversaries_train_as_on_one_process(comm):
    """The generator's backward adds to the gradients of the discriminator, too."""
    parts = [slice(r, None, comm.size) for r in range(comm.size)]
    for freeze in (False, True):
        for overlap in ("auto", "polls"):
            nets, alone = Adversaries(), Adversaries()
            d = DDP(nets.d, comm, overlap=overlap, bucket_bytes=200, first_bucket_bytes=200)
            g = DDP(nets.g, comm, overlap=overlap)
            assert len(d.buckets) > 1
            found = nets.train(d, g, freeze, parts[comm.rank : comm.rank + 1])
            for mine, one in zip(found, alone.train(alone.d, alone.g, freeze, parts), strict=True):
                torch.testing.assert_close(mine, one, rtol=0, atol=1e-12)
            d.close(), g.close()


def test_gradients_of_inputs_are_no_step(comm):
    """A gradient penalty: torch.autograd.grad adds to no parameter, backward through it does."""
    net = nn.Sequential(nn.Linear(3, 3), nn.Tanh(), nn.Linear(3, 1)).double()
    model = DDP(net, comm, **SMALLEST)
    alone = copy.deepcopy(net)
    every = [torch.full((2, 3), r + 1.0).double() for r in range(comm.size)]

    def penalty(module, x):
        x = x.clone().requires_grad_()
        return torch.autograd.grad(module(x).sum(), x, create_graph=True)[0].pow(2).sum()

    for step in range(3):
        model.zero_grad()
        loss = penalty(model, every[comm.rank])
        assert model.stats().steps == step
        loss.backward()
        assert model.stats().steps == step + 1
        alone.zero_grad()
        (sum(penalty(alone, x) for x in every) / comm.size).backward()
        for p, q in zip(net.parameters(), alone.parameters(), strict=True):
            assert (p.grad is None) == (q.grad is None)
            if p.grad is not None:
                torch.testing.assert_close(p.grad, q.grad, rtol=0, atol=1e-12)


def test_checkpointed_layers_are_averaged_once(comm):
    """A reentrant checkpoint has a backward pass of its own within the whole one."""

    class Deep(nn.Module):
        def __init__(self):
            super().__init__()
            self.layers = nn.ModuleList(nn.Linear(3, 3) for _ in range(4))
            self.reentrant = None

        def forward(self, x):
            x = x.clone().requires_grad_()
            for layer in self.layers:
                if self.reentrant is None:
                    x = layer(x).tanh()
                else:
                    act = lambda y, layer=layer: layer(y).tanh()  # noqa: E731
                    x = torch.utils.checkpoint.checkpoint(act, x, use_reentrant=self.reentrant)
            return {"out": [x]}

    every = [torch.full((2, 3), (r + 1) / 4) for r in range(comm.size)]
    for overlap in ("none", "polls", "thread"):
        net = Deep()
        alone = copy.deepcopy(net)
        model = DDP(net, comm, overlap=overlap, **SMALLEST)
        with torch.no_grad():
            for p, q in zip(net.parameters(), alone.parameters(), strict=True):
                q.copy_(p)
        alone.zero_grad()
        sum(alone(x)["out"][0].sum() for x in every).div(comm.size).backward()
        for step, reentrant in enumerate((False, True, True)):
            net.reentrant = reentrant
            model.zero_grad()
            model(every[comm.rank])["out"][0].sum().backward()
            assert model.stats().steps == step + 1
            for p, q in zip(net.parameters(), alone.parameters(), strict=True):
                torch.testing.assert_close(p.grad, q.grad, rtol=0, atol=1e-6)


def test_failed_backward_leaves_the_next_one_whole(comm):
    net = nn.Linear(2, 2)
    model = DDP(net, comm)
    out = model(torch.ones(1, 2))
    x = (out * 1.0).clone()
    x.register_hook(lambda g: (_ for _ in ()).throw(ValueError("once")))
    y = out.sum() + 0 * x.sum()
    with pytest.raises(ValueError, match="once"):
        y.backward()
    model.zero_grad()
    model(torch.full((1, 2), comm.rank + 1.0)).sum().backward()
    torch.testing.assert_close(net.weight.grad, torch.full((2, 2), (comm.size + 1) / 2))


def test_wrapper_is_a_module(comm):
    net = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))
    model = DDP(net, comm)
    assert isinstance(model, nn.Module) and isinstance(model, DDP)
    assert next(model.parameters()) is net[0].weight
    assert list(model.modules()) == [model, net, *net]
    names = [f"module.{name}" for name, _ in net.named_parameters()]
    assert [name for name, _ in model.named_parameters()] == names
    assert [name for name, _ in model.named_buffers()] == [
        f"module.{name}" for name, _ in net.named_buffers()
    ]
    assert model.eval() is model and not (model.training or net.training or net[1].training)
    assert model.train().training and net[1].training
    assert model.to("cpu") is model and model.float() is model
    for change in (model.double, model.half, lambda: model.to(torch.float64)):
        with pytest.raises(InvalidArgument, match=f"rank {comm.rank}: 0.weight is torch.float32"):
            change()
    assert net[0].weight.dtype == torch.float32
    seen = []
    model.register_forward_hook(lambda *_: seen.append(1))
    whole = nn.ModuleDict({"inner": model})
    whole["inner"](torch.ones(3, 2)).sum().backward()
    assert seen == [1] and whole.state_dict().keys() == {
        f"inner.{name}" for name in model.state_dict()
    }
    with pytest.raises(AttributeError, match="'DDP' object has no attribute 'nothing'$"):
        _ = model.nothing
    grads = [p.grad.clone() for p in net.parameters()]
    norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1e-3)
    torch.testing.assert_close(norm, torch.cat([g.reshape(-1) for g in grads]).norm())


def test_forward_without_a_graph_makes_no_gradients(comm):
    model = DDP(nn.Linear(2, 1), comm)
    for context in (torch.no_grad, torch.inference_mode):
        with context():
            model(torch.ones(1, 2))
        assert all(p.grad is None for p in model.parameters())


def test_states_of_module_and_wrapper_load_both_ways(comm):
    """Those of a module, of DistributedDataParallel, of this wrapper, and for a resumed run."""

    def make(value):
        net = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))
        net.module = nn.Linear(1, 1)  # whose names look like those of a wrapper
        with torch.no_grad():
            for p in net.parameters():
                p.fill_(value)
        return net

    model = DDP(make(1.0), comm)
    plain, prefixed = make(2.0).state_dict(), nn.ModuleDict({"module": make(3.0)}).state_dict()
    assert model.state_dict().keys() == prefixed.keys()
    other = DDP(make(4.0), comm)
    with torch.no_grad():
        for p in other.parameters():
            p.fill_(4.0)
    for state, value in (
        (plain, 2.0),
        (prefixed, 3.0),
        (other.state_dict(), 4.0),
        (plain, 2.0),
        (other.resume_state(), 4.0),
        (dict(plain), 2.0),
    ):
        before = next(model.parameters())
        model.load_state_dict(state_dict=state)
        assert next(model.parameters()) is before
        assert all((p == value).all() for p in model.parameters())
    set_model_state_dict(model, get_model_state_dict(other))
    nn.ModuleDict({"module": make(0.0)}).load_state_dict(model.state_dict())
    make(0.0).load_state_dict(model.module.state_dict())
    found = model.load_state_dict({"module.0.weight": torch.zeros(2, 2)}, strict=False)
    assert "0.bias" in found.missing_keys and not model.module[0].weight.any()
    with pytest.raises(RuntimeError, match="Missing key"):
        model.load_state_dict({})
    with pytest.raises(InvalidArgument, match=f"rank {comm.rank}: .*assign=True"):
        model.load_state_dict(plain, assign=True)


def test_copy_of_a_wrapped_module_is_not_wrapped(comm):
    net = nn.Linear(2, 2)
    model = DDP(net, comm, overlap="polls")
    for other in (copy.deepcopy(net), pickle.loads(pickle.dumps(net))):
        other(torch.ones(1, 2)).sum().backward()
        assert net.weight.grad is None and not model.reducer.touched.any()
    for act in (copy.copy, copy.deepcopy, pickle.dumps):
        with pytest.raises(InvalidArgument, match=rf"rank {comm.rank}: .*deepcopy.model\.module"):
            act(model)


def test_deleted_wrapper_lets_go_of_its_module(comm):
    """Kept alive by a hook of the module, it would make the next DDP refuse the module."""
    net = nn.Linear(2, 2)
    for _ in range(3):
        model = DDP(net, comm, overlap="polls")
        model(torch.ones(1, 2)).sum().backward()
        model.sync_gradients()
        torch.testing.assert_close(net.bias.grad, torch.ones(2))
        model.zero_grad()
        del model


def test_optimizer_within_backward_is_refused(comm):
    """In a hook of a gradient, which is registered before the module is wrapped, or after."""
    for after in (False, True):
        for sync in ("auto", "manual"):
            net = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 1))
            optimizers = {p: torch.optim.SGD([p], lr=0.1) for p in net.parameters()}
            model = DDP(net, comm, sync=sync) if after else None
            hooks = [
                p.register_post_accumulate_grad_hook(lambda p, of=optimizers: of[p].step())
                for p in net.parameters()
            ]
            model = model or DDP(net, comm, sync=sync)
            before = [p.clone() for p in net.parameters()]
            told = f"rank {comm.rank}: step.* within backward, .*gradients of 1.* step.. after it"
            with pytest.raises(InvalidArgument, match=told):
                model(torch.ones(1, 2)).sum().backward()
            assert all(map(torch.equal, before, net.parameters()))
            for hook in hooks:
                hook.remove()
            model.zero_grad()
            model(torch.ones(1, 2)).sum().backward()
            model.sync_gradients()
            for optimizer in optimizers.values():
                optimizer.step()
            assert not model.unlike_parameters()
            model.close()


def test_step_with_assigned_gradients_is_refused(comm):
    """Those of torch.autograd.grad; what was averaged may be replaced."""
    model = DDP(nn.Linear(2, 1), comm)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    x = torch.full((1, 2), comm.rank + 1.0)
    for _ in range(2):
        grads = torch.autograd.grad(model(x).sum(), list(model.parameters()))
        for p, grad in zip(model.parameters(), grads):
            p.grad = grad
        if comm.size > 1:
            with pytest.raises(InvalidArgument, match="gradients of weight and 1 more were not"):
                optimizer.step()
        model.sync_gradients()
        optimizer.step()
        assert len(set(comm.allgather_object(model.module.weight.sum().item()))) == 1
        optimizer.zero_grad()
        model(x).sum().backward()
        model.module.weight.grad = model.module.weight.grad * 0.5
        optimizer.step()
        optimizer.zero_grad()


def test_zero_grad_fills_with_zeros_if_asked(comm):
    net = nn.Linear(2, 2)
    model = DDP(net, comm)
    model(torch.ones(1, 2)).sum().backward()
    model.sync_gradients()
    before = net.weight.grad
    model.zero_grad(set_to_none=False)
    assert net.weight.grad is before and not before.any()
    model.zero_grad()
    assert net.weight.grad is None


@pytest.mark.ranks(1, 3)
def test_what_torch_ignores_is_ignored(comm, folder):
    """Own gradients and values on each rank, which a checkpoint saves; even their shapes differ."""
    torch_ddp = nn.parallel.DistributedDataParallel

    def make(value, width=1):
        net = nn.Sequential(nn.Linear(2, 1), nn.BatchNorm1d(1), nn.Linear(1, width))
        ignored = ["0.bias", "1.running_mean", "2.weight", "2.bias"]
        torch_ddp._set_params_and_buffers_to_ignore_for_model(net, ignored)
        with torch.no_grad():
            for x in (*net.parameters(), net[1].running_mean):
                x.fill_(value)
        return net

    net, mine = make(comm.rank + 1.0), comm.rank + 1.0
    model = DDP(net, comm, overlap="polls", **SMALLEST)
    assert (net[0].weight == 1).all() and net[1].weight.item() == 1  # rank 0's
    assert net[0].bias.item() == mine and net[1].running_mean.item() == mine
    assert not any(k in "".join(b.names) for b in model.buckets for k in ("0.bias", "2."))
    step = torch.optim.SGD(model.parameters(), lr=0.0)
    model.eval()
    net[1].running_mean.fill_(mine)
    (net[0](torch.ones(1, 2)) * mine).sum().backward()
    step.step()  # which does not ask for their averaging
    mean = (comm.size + 1) / 2
    assert net[0].weight.grad.tolist() == [[mean, mean]]
    assert net[0].bias.grad.item() == mine and net[1].running_mean.item() == mine
    model.broadcast_parameters()
    assert net[0].bias.item() == mine and not model.unlike_parameters()
    checkpoint = Checkpoint(folder, comm)
    checkpoint.save(1, model=model)
    other = make(0.0)
    again = DDP(other, comm, **SMALLEST)
    checkpoint.load(model=again)
    for name, value in net.state_dict().items():
        torch.testing.assert_close(other.state_dict()[name], value)
    with pytest.raises(InvalidArgument, match="ignores"):
        ZeroOptimizer(torch.optim.SGD, again, [{"params": [other[0].bias]}], lr=0.1)
    frozen = make(0.0, width=comm.rank + 1)
    DDP(frozen, comm, overlap="none", **SMALLEST)
    frozen[0].bias.requires_grad_(False)  # nobody averages it
    frozen[0](torch.ones(1, 2)).sum().backward()
