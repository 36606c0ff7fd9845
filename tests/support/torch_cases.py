"""What only modules of PyTorch have: buffers, hooks of autograd, mixed dtypes, sparse gradients."""

import copy
import pickle
import threading
from contextlib import nullcontext

import numpy as np
import pytest

from mpidist import Checkpoint
from mpidist.errors import InvalidArgument, ReplicasDiffer, Unsupported
from mpidist.parallel import DDP, ZeroOptimizer
from tests.support.training_kits import torch

if torch:
    from torch.distributed.checkpoint.state_dict import get_model_state_dict, set_model_state_dict

    from mpidist.torch import SyncBatchNorm
    from tests.support.odd_arrays import Named, TwoTensor, odd_tensors, waiting
nn = torch.nn if torch else None
SMALL = {"bucket_bytes": 64, "first_bucket_bytes": 64}
ONE_AT_A_TIME = threading.Lock()  # TorchScript's compiler is not for the threads of simulated ranks


def inside(view, flat):
    begin = flat.__array_interface__["data"][0]
    return begin <= view.data_ptr() and (
        view.data_ptr() + view.numel() * view.element_size() <= begin + flat.nbytes
    )


def buckets_are_rebuilt_in_observed_order(comm):
    class Backwards(nn.Module):
        def __init__(self):
            super().__init__()
            self.third, self.first, self.second = (nn.Linear(4, 4, bias=False) for _ in range(3))

        def forward(self, x):
            return self.third(self.second(self.first(x)))

    model = DDP(Backwards(), comm, **SMALL)
    before = [name for bucket in model.buckets for name in bucket.names]
    assert before == ["second.weight", "first.weight", "third.weight"]
    previous = None
    for _ in range(3):
        model(torch.full((2, 4), float(comm.rank))).sum().backward()
        model.sync_gradients()
        order = [name for bucket in model.buckets for name in bucket.names]
        ready = ["third.weight", "second.weight", "first.weight"]
        assert order == (ready if comm.size > 1 else before)
        for bucket in model.buckets if comm.size > 1 else ():
            for p, view in zip(bucket.parameters, bucket.views, strict=True):
                assert p.grad is view and inside(view, bucket.flat)
        expected = [p.grad.clone() for p in model.parameters()]
        assert previous is None or all(map(torch.equal, expected, previous))
        previous = expected
        model.zero_grad()


class TwoHeads(nn.Module if torch else object):
    """Rank r uses head r % 2 only, and nobody the third one."""

    def __init__(self):
        super().__init__()
        self.body = nn.Linear(3, 3)
        self.heads = nn.ModuleList(nn.Linear(3, 1) for _ in range(3))

    def forward(self, x, head):
        return self.heads[head](self.body(x))


def unused_parameters_have_no_gradient(comm):
    """Unless another rank has used them; with unused="zero" they have zeros."""
    for unused in ("skip", "zero"):
        model = DDP(TwoHeads(), comm, overlap="polls", unused=unused, **SMALL)
        for _ in range(3):
            model.zero_grad()
            model(torch.ones(1, 3), comm.rank % 2).sum().backward()
            model.sync_gradients()
            for head in range(3):
                users = sum(rank % 2 == head for rank in range(comm.size))
                grad = model.module.heads[head].bias.grad
                if users or unused == "zero":
                    torch.testing.assert_close(grad, torch.full((1,), users / comm.size))
                else:
                    assert grad is None
        model.close()


def unused_parameters_are_named(comm):
    model = DDP(TwoHeads(), comm, unused="error", **SMALL)
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


def buffers_are_made_equal(comm):
    for how in ("broadcast", "average", "keep"):
        net = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))
        model = DDP(net, comm, buffers=how, sync="manual")
        running = net[1].running_mean
        model(torch.full((4, 2), float(comm.rank)) + torch.arange(4.0)[:, None]).sum().backward()
        mine = running.clone()
        model.sync_gradients()
        means = torch.from_numpy(comm.allgather(mine.numpy()[None]))
        expected = {"broadcast": means[0], "average": means.mean(0), "keep": mine}[how]
        torch.testing.assert_close(running, expected)
        assert net[1].running_mean is running and int(net[1].num_batches_tracked) == 1


def replaced_buffers_are_synced(comm):
    class Smoothed(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(2, 2)
            self.register_buffer("mean", torch.zeros(2))

        def forward(self, x):
            self.mean = 0.5 * self.mean + x.mean(0)  # not in place
            return self.layer(x)

    net = Smoothed()
    model = DDP(net, comm, sync="manual")
    for _ in range(2):
        model(torch.full((2, 2), comm.rank + 1.0)).sum().backward()
        model.sync_gradients()
    assert net.mean.tolist() == [1.5, 1.5]  # that of rank 0
    net.mean = torch.zeros(3)
    if comm.size > 1:
        with pytest.raises(InvalidArgument, match=rf"rank {comm.rank}: .*\bmean\b.*\(2,\).*\(3,\)"):
            model.sync_gradients()


def what_is_frozen_or_not_stays_so(comm):
    for before in (True, False):
        net = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
        net[0].requires_grad_(before)
        model = DDP(net, comm)
        model(torch.ones(1, 2)).sum().backward()
        model.sync_gradients()
        net[0].requires_grad_(not before)
        with pytest.raises(InvalidArgument, match=f"rank {comm.rank}: requires_grad of 0.weight, "):
            model(torch.ones(1, 2)).sum().backward()
            model.sync_gradients()


def what_is_replaced_is_told(comm):
    for change in (
        lambda net: net.load_state_dict(
            {k: v + 1 for k, v in net.state_dict().items()}, assign=True
        ),
        lambda net: net.__setitem__(1, nn.Linear(2, 2)),
        lambda net: net.append(nn.Linear(2, 2)),
        lambda net: net.pop(1),
        lambda net: net.append(nn.ReLU()),  # which is not learnt
    ):
        net = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
        model = DDP(net, comm, sync="manual")
        change(net)
        for _ in range(2):
            model(torch.ones(1, 2)).sum().backward()
            if len(net) == 3 and isinstance(net[2], nn.ReLU):
                model.sync_gradients()
                continue
            said = rf"rank {comm.rank}: .*\bmodule\b.*\bDDP\b"
            with pytest.raises(InvalidArgument, match=said):
                model.sync_gradients()


def a_copy_is_not_wrapped(comm):
    net = nn.Linear(2, 2)
    model = DDP(net, comm, overlap="polls")
    for other in (copy.deepcopy(net), pickle.loads(pickle.dumps(net))):
        other(torch.ones(1, 2)).sum().backward()
        assert net.weight.grad is None and not model.reducer.touched.any()
    for act in (copy.copy, copy.deepcopy, pickle.dumps):
        with pytest.raises(InvalidArgument, match=rf"rank {comm.rank}: .*deepcopy.model\.module"):
            act(model)


def what_has_no_shape_is_named(comm):
    net = nn.Sequential(nn.LazyLinear(2), nn.LazyBatchNorm1d())
    said = rf"rank {comm.rank}: .*0\.weight, 0\.bias, 1\.weight, .*1\.running_mean.*\bshape\b"
    with pytest.raises(InvalidArgument, match=said):
        DDP(net, comm)
    net(torch.ones(3, 4))
    DDP(net, comm)


def gradients_can_be_filled_with_zeros(comm):
    net = nn.Linear(2, 2)
    model = DDP(net, comm)
    model(torch.ones(1, 2)).sum().backward()
    model.sync_gradients()
    before = net.weight.grad
    model.zero_grad(set_to_none=False)
    assert net.weight.grad is before and not before.any()
    model.zero_grad()
    assert net.weight.grad is None


def any_dtype_and_sharing(comm):
    class Mixed(nn.Module):
        def __init__(self):
            super().__init__()
            self.wide = nn.Linear(3, 3).double()
            self.tied = self.wide
            self.short = nn.Linear(3, 2, bias=False).bfloat16()
            self.frozen = nn.Linear(3, 3).requires_grad_(False)
            self.words = nn.Embedding(5, 3, sparse=True)

        def forward(self, index):
            x = self.frozen(self.words(index)).double()
            return self.short(self.tied(self.wide(x)).bfloat16()).float()

    model = DDP(Mixed(), comm, overlap="polls", **SMALL)
    names = {name for name, _ in model.reducer.grouping.named}
    assert names == {"wide.weight", "wide.bias", "short.weight", "words.weight"}
    for _ in range(3):
        model.zero_grad()
        model(torch.tensor([comm.rank % 5])).sum().backward()
        model.sync_gradients()
        assert {str(p.grad.dtype) for _, p in model.reducer.grouping.named} == {
            "torch.float64",
            "torch.bfloat16",
            "torch.float32",
        }
        grad = model.module.words.weight.grad.to_dense()
        used = grad.abs().sum(1) > 0
        assert used.nonzero().flatten().tolist() == sorted({r % 5 for r in range(comm.size)})


def bag_of_words():
    """Embeddings with sparse gradients, the second only used on odd ranks, the third nowhere."""

    class Words(nn.Module):
        def __init__(self):
            super().__init__()
            self.words = nn.Embedding(40, 3, sparse=True)
            self.odd = nn.EmbeddingBag(20, 3, sparse=True, mode="sum")
            self.never = nn.Embedding(9, 3, sparse=True)
            self.head = nn.Linear(3, 2)

        def forward(self, index, odd):
            x = self.words(index).sum(0)
            return self.head(x + self.odd(index[None] % 20)[0] if odd else x)

    return Words().double()


def batches(size, step, parts=2):
    """Words of each rank, of which some are in no other's batch, for each part of a step."""
    words = torch.Generator().manual_seed(step)
    return [
        [torch.randint(40, (2 + r + part,), generator=words) for r in range(size)]
        for part in range(parts)
    ]


def sparse_gradients_stay_sparse(comm):
    """Equal to those of one process with all batches; the optimizers and clipping take them."""
    for overlap, sync, hook in (
        ("none", "auto", None),
        ("polls", "auto", None),
        ("polls", "manual", 1),
    ):
        net, alone = bag_of_words(), bag_of_words()
        hook = hook and (
            lambda bucket: bucket.comm.iallreduce(bucket.flat, op="mean", out=bucket.flat)
        )
        model = DDP(net, comm, overlap=overlap, sync=sync, hook=hook, **SMALL)
        alone.load_state_dict(net.state_dict())
        assert {n for bucket in model.buckets for n in bucket.names} == {"head.weight", "head.bias"}
        sparse, dense = ("words.weight", "odd.weight", "never.weight"), ("head.weight", "head.bias")
        steppers = []
        for module in (net, alone):
            of = dict(module.named_parameters())
            steppers.append(torch.optim.SparseAdam([of[name] for name in sparse], lr=0.1))
            steppers.append(torch.optim.Adam([of[name] for name in dense], lr=0.1))
        for step in range(4):
            model.zero_grad()
            alone.zero_grad(set_to_none=False)
            parts = batches(comm.size, step)
            for last, part in enumerate(parts):
                with nullcontext() if last else model.no_sync():
                    model(part[comm.rank], comm.rank % 2).sum().backward()
                for r, index in enumerate(part):
                    (alone(index, r % 2).sum() / comm.size).backward()
            model.sync_gradients()
            for name, p in net.named_parameters():
                other = alone.get_parameter(name).grad
                if p.grad is None:
                    assert name == "never.weight" or (name, comm.size) == ("odd.weight", 1)
                    assert other is None
                else:
                    assert p.grad.is_sparse == (name in sparse), name
                    torch.testing.assert_close(p.grad.to_dense(), other.to_dense())
            found = model.clip_gradients(0.5)
            grads = [p.grad.to_dense() for p in net.parameters() if p.grad is not None]
            assert found > 0.5
            assert sum(float((g * g).sum()) for g in grads) ** 0.5 == pytest.approx(0.5)
            for p in alone.parameters():
                if p.grad is not None:
                    p.grad.mul_(0.5 / found)
            for optimizer in steppers:
                optimizer.step()
        for p, other in zip(net.parameters(), alone.parameters(), strict=True):
            torch.testing.assert_close(p, other)
        assert not model.unlike_parameters()
        model.close()


def sparse_gradients_that_are_unused_or_dense(comm):
    """What `unused` says holds for them, too; one that is dense on a rank is dense on all."""
    index = torch.tensor([1, comm.rank + 2])
    model = DDP(bag_of_words(), comm, unused="zero")
    model(index, False).sum().backward()
    assert model.module.never.weight.grad.is_sparse and not model.module.never.weight.grad._nnz()
    model.close()
    model = DDP(bag_of_words(), comm, unused="error")
    with pytest.raises(InvalidArgument, match=f"rank {comm.rank}: .*never.weight .on rank 0"):
        model(index, True).sum().backward()
    model.close()

    model = DDP(bag_of_words(), comm, check_replicas=1)
    words = model.module.words.weight
    for dense_on in (0, comm.size - 1):
        model.zero_grad()
        loss = model(index, False).sum()
        if comm.rank == dense_on:
            loss = loss + words.sum() * comm.size
        if comm.rank or comm.size == 1:
            loss.backward()
        else:  # a batch that uses the dense way only, or nothing
            (words.sum() * comm.size * (dense_on == 0) + model.module.head.bias.sum()).backward()
        assert not words.grad.is_sparse and float(words.grad[30:].sum()) == 30.0
    model.zero_grad()
    rows = torch.ones(1, 3).double()
    words.grad = torch.sparse_coo_tensor([[comm.rank]], rows, (40, 3), check_invariants=True)
    model.sync_gradients()
    expected = torch.zeros(40, 3).double()
    expected[: comm.size] = 1 / comm.size
    torch.testing.assert_close(words.grad.to_dense(), expected)
    assert words.grad.is_sparse
    model.sync_gradients()  # nothing has changed
    torch.testing.assert_close(words.grad.to_dense(), expected)

    other = DDP(nn.Embedding(9, 2, sparse=True), comm)  # no bucket at all
    other(torch.tensor([comm.rank])).sum().backward()
    assert other.module.weight.grad._nnz() == comm.size and not other.buckets
    with pytest.raises(Unsupported, match=f"rank {comm.rank}: ZeroOptimizer: .*weight are sparse"):
        ZeroOptimizer(torch.optim.SGD, DDP(nn.Embedding(4, 2, sparse=True), comm), lr=0.1)
    if comm.size > 1:
        with pytest.raises(InvalidArgument, match=r"rank 1 has sparse gradients=\[\] where rank 0"):
            DDP(nn.Embedding(4, 2, sparse=not comm.rank), comm)


def an_optimizer_within_backward_is_refused(comm):
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


def a_gradient_with_a_graph_is_copied(comm):
    net = nn.Linear(3, 1, bias=False)
    model = DDP(net, comm)
    out = model(torch.full((1, 3), comm.rank + 1.0))
    (out**2).sum().backward(create_graph=True)
    model.sync_gradients()
    assert not net.weight.grad.requires_grad or comm.size == 1
    assert model.stats().copies == (comm.size > 1)
    weight = net.weight.detach()
    scale = np.mean([2 * (r + 1.0) ** 2 for r in range(comm.size)])
    torch.testing.assert_close(net.weight.grad.detach(), weight.sum() * torch.full((1, 3), scale))


def a_dead_wrapper_hears_nothing(comm):
    net = nn.Linear(2, 2)
    for _ in range(3):
        model = DDP(net, comm, overlap="polls")
        model(torch.ones(1, 2)).sum().backward()
        model.sync_gradients()
        torch.testing.assert_close(net.bias.grad, torch.ones(2))
        model.zero_grad()
        del model


def what_torchscript_made_is_refused(comm):
    """By name, on every rank, if only one has such a module."""
    last = comm.size - 1
    for make, kind in (
        (torch.jit.script, "RecursiveScriptModule"),
        (lambda net: torch.jit.trace(net, torch.ones(1, 2)), "TopLevelTracedModule"),
    ):
        for ranks in (range(comm.size), (last,)):
            net = nn.Linear(2, 2)
            with ONE_AT_A_TIME:
                net = make(net) if comm.rank in ranks else net
            with pytest.raises(InvalidArgument, match=rf"rank .: module: .*\b{kind}\b.*torch\.jit"):
                DDP(net, comm)
    assert float(comm.allreduce(1.0)) == comm.size


def frozen_parameters_start_equal(comm):
    """A replica is the whole model, also what of it is not learnt."""
    net = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    for p in net.parameters():
        nn.init.constant_(p, comm.rank + 1.0)
    net[0].requires_grad_(False)
    model = DDP(net, comm, check_replicas=1, sync="manual")
    assert all((p == 1).all() for p in net.parameters())
    net(torch.ones(1, 2)).sum().backward()
    model.sync_gradients()
    nn.init.constant_(net[0].weight, comm.rank + 1.0)
    every = ", ".join(map(str, range(1, comm.size)))
    told = pytest.raises(ReplicasDiffer, match=f"0.weight on ranks? {every};")
    with nullcontext() if comm.size == 1 else told:
        model.sync_gradients()


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


def adversaries_train(comm):
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


def gradients_of_inputs_are_no_step(comm):
    """A gradient penalty: torch.autograd.grad adds to no parameter, backward through it does."""
    net = nn.Sequential(nn.Linear(3, 3), nn.Tanh(), nn.Linear(3, 1)).double()
    model = DDP(net, comm, **SMALL)
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


def checkpointed_layers_are_averaged_once(comm):
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
        model = DDP(net, comm, overlap=overlap, **SMALL)
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


def a_failed_backward_leaves_the_next_one_whole(comm):
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


def no_forward_without_a_graph_makes_gradients(comm):
    model = DDP(nn.Linear(2, 1), comm)
    for context in (torch.no_grad, torch.inference_mode):
        with context():
            model(torch.ones(1, 2))
        assert all(p.grad is None for p in model.parameters())


def assigned_gradients_stop_an_optimizer(comm):
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


def a_wrapper_is_a_module(comm):
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


def states_load_both_ways(comm):
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


def a_compiled_module_is_averaged(comm, way):
    """Whether the wrapper is compiled, its module, or the module before it is wrapped."""
    torch._dynamo.reset()
    net = nn.Sequential(nn.Linear(3, 3), nn.Tanh(), nn.Linear(3, 1))
    alone = copy.deepcopy(net)
    if way == "inside":
        net = torch.compile(net, backend="aot_eager")
    model = run = DDP(net, comm, **SMALL)
    if way != "inside":
        run = torch.compile(model if way == "wrapper" else net, backend="aot_eager")
    every = [torch.full((2, 3), r + 1.0) for r in range(comm.size)]
    with torch.no_grad():
        for p, q in zip(net.parameters(), alone.parameters(), strict=True):
            q.copy_(p)
    (sum(alone(x).sum() for x in every) / comm.size).backward()
    for step in range(3):
        model.zero_grad()
        run(every[comm.rank]).sum().backward()
        assert model.stats().steps == step + 1
        for p, q in zip(net.parameters(), alone.parameters(), strict=True):
            torch.testing.assert_close(p.grad, q.grad, rtol=0, atol=1e-5)


def batch_normalisation_over_all_ranks(comm):
    """The whole batch on one process gives the same outputs, gradients and running statistics."""
    counts = [2 + (3 * rank) % 4 if rank else 3 for rank in range(comm.size)]
    counts[-1] = 0 if comm.size > 2 else counts[-1]  # a rank without samples
    starts = np.cumsum([0, *counts])
    part = slice(starts[comm.rank], starts[comm.rank + 1])
    x = torch.randn(sum(counts), 3, 5, generator=torch.Generator().manual_seed(1)).double() + 100
    for momentum, affine in ((0.1, True), (None, False)):
        alone = nn.Sequential(
            nn.BatchNorm1d(3, momentum=momentum, affine=affine), nn.Tanh()
        ).double()
        weights = alone[0].weight
        net = SyncBatchNorm.convert_sync_batchnorm(copy.deepcopy(alone), comm)
        assert isinstance(net[0], SyncBatchNorm)
        for module in (net, copy.deepcopy(net)):
            again = copy.deepcopy(alone)
            for _ in range(2):
                mine, whole = x[part].clone().requires_grad_(), x.clone().requires_grad_()
                out, reference = module(mine), again(whole)
                torch.testing.assert_close(out, reference[part], rtol=0, atol=1e-9)
                out.pow(3).sum().backward()
                reference.pow(3).sum().backward()
                torch.testing.assert_close(mine.grad, whole.grad[part], rtol=0, atol=1e-9)
                for p, q in zip(module.parameters(), again.parameters(), strict=True):
                    total = torch.from_numpy(comm.allreduce(p.grad.numpy()))
                    torch.testing.assert_close(total, q.grad, rtol=0, atol=1e-9)
                    p.grad = q.grad = None
            for mine, whole in zip(module.buffers(), again.buffers(), strict=True):
                torch.testing.assert_close(mine, whole, rtol=0, atol=1e-9)
            module.eval(), again.eval()
            torch.testing.assert_close(module(x), again(x), rtol=0, atol=1e-9)
            assert weights is None or module[0].weight.shape == weights.shape
    kept = pickle.loads(pickle.dumps(net)).train()
    with pytest.raises(InvalidArgument, match="set the attribute comm of the layer"):
        kept(x)
    with pytest.raises(InvalidArgument, match=r"input has shape \(2, 4\): expected \(n, 3, "):
        net.train()(torch.ones(2, 4))
    local = nn.SyncBatchNorm.convert_sync_batchnorm(nn.Sequential(nn.BatchNorm1d(3)))
    if not torch.distributed.is_initialized():
        with pytest.raises(InvalidArgument, match=f"rank {comm.rank}: .*0 is a .*SyncBatchNorm.*"):
            DDP(local, comm)
    DDP(SyncBatchNorm.convert_sync_batchnorm(local, comm), comm).close()


def options_of_distributed_data_parallel(comm):
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


def a_static_graph_is_agreed_upon_once(comm):
    model = DDP(TwoHeads(), comm, static_graph=True, overlap="none", **SMALL)
    for _ in range(3):
        model.zero_grad()
        model(torch.ones(1, 3), comm.rank % 2).sum().backward()
        assert model.module.heads[2].bias.grad is None
        assert (model.module.heads[1].bias.grad is None) == (comm.size == 1)
    if comm.size > 1:
        said = rf"rank {comm.rank}: static_graph=True, .* has used heads.{comm.rank % 2}.weight"
        with pytest.raises(InvalidArgument, match=said):
            model(torch.ones(1, 3), 2).sum().backward()


def a_hook_of_torch_is_called(comm):
    """With the attributes of GradBucket; its future's value is the gradient."""
    seen = []

    def hook(state, bucket):
        seen.append((bucket.index(), bucket.is_last(), len(bucket.parameters())))
        assert [g.shape for g in bucket.gradients()] == [p.shape for p in bucket.parameters()]
        mean = torch.from_numpy(comm.allreduce(bucket.buffer().numpy(), op="mean"))
        future = torch.futures.Future()
        future.set_result(state * mean)
        return future

    net = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2, bias=False)).to(torch.float32)
    for overlap in ("none", "polls"):
        model = DDP(net, comm, overlap=overlap, **SMALL)
        model.register_comm_hook(2.0, hook)
        with pytest.raises(InvalidArgument, match=f"rank {comm.rank}: this DDP has a hook"):
            model.register_comm_hook(2.0, hook)
        count = len(model.buckets)
        for _ in range(3):
            seen.clear()
            model.zero_grad()
            net[0](torch.full((1, 2), comm.rank + 1.0)).sum().backward()
            factor = 1 if comm.size == 1 else 2
            torch.testing.assert_close(
                net[0].weight.grad, torch.full((2, 2), factor * (comm.size + 1) / 2)
            )
            if comm.size > 1:
                assert [(i, last) for i, last, _ in seen] == [
                    (i, i == count - 1) for i in range(count)
                ]
        model.close()
    if comm.size > 1:
        model = DDP(net, comm)
        model.register_comm_hook(None, lambda state, bucket: bucket.buffer())
        with pytest.raises(
            InvalidArgument, match=f"rank {comm.rank}: .*returned a Tensor: expected"
        ):
            model(torch.ones(1, 2)).sum().backward()


def parameters_that_are_not_their_memory(comm):
    """Refused when a module is wrapped, on every rank, also where one rank alone has it."""
    for x, word, *_ in odd_tensors(4):
        module = nn.Linear(4, 4)
        if isinstance(x, torch.nn.Parameter) or not x.is_floating_point() or x.is_nested:
            continue
        module.register_buffer("odd", x if comm.rank == comm.size - 1 else torch.ones(4))
        with pytest.raises(InvalidArgument, match=f"module: odd is .*{word}"):
            DDP(module, comm)
    module = nn.Linear(4, 4)
    module.weight = nn.Parameter(TwoTensor(module.weight.detach(), module.weight.detach()))
    with pytest.raises(InvalidArgument, match="module: weight is .*TwoTensor"):
        DDP(module, comm)


def gradients_that_are_not_their_memory(comm):
    """Of a subclass: an unfinished result is waited for, another one refused by name."""
    model = DDP(nn.Linear(2, 1, bias=False), comm)
    p = model.module.weight
    want = comm.allreduce(float(comm.rank), op="mean")
    for make in (waiting, lambda x: x.as_subclass(Named)):
        model(torch.ones(1, 2))
        p.grad = make(torch.full((1, 2), float(comm.rank)))
        model.sync_gradients()
        if comm.size > 1:
            assert type(p.grad) is torch.Tensor
        assert p.grad.tolist() == [[want, want]]
    if comm.size == 1:
        pytest.skip("needs at least 2 ranks")
    p.grad = TwoTensor(torch.ones(1, 2), torch.ones(1, 2))
    with pytest.raises(InvalidArgument, match=r"the gradient of weight is .*TwoTensor"):
        model.sync_gradients()


def accumulation_by_the_flag_of_torch(comm):
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


def what_torch_ignores_is_ignored(comm, folder):
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
    model = DDP(net, comm, overlap="polls", **SMALL)
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
    checkpoint = Checkpoint(comm.broadcast_object(str(folder)), comm)
    checkpoint.save(1, model=model)
    other = make(0.0)
    again = DDP(other, comm, **SMALL)
    checkpoint.load(model=again)
    for name, value in net.state_dict().items():
        torch.testing.assert_close(other.state_dict()[name], value)
    with pytest.raises(InvalidArgument, match="ignores"):
        ZeroOptimizer(torch.optim.SGD, again, [{"params": [other[0].bias]}], lr=0.1)
    frozen = make(0.0, width=comm.rank + 1)
    DDP(frozen, comm, overlap="none", **SMALL)
    frozen[0].bias.requires_grad_(False)  # nobody averages it
    frozen[0](torch.ones(1, 2)).sum().backward()


CASES = [
    accumulation_by_the_flag_of_torch,
    parameters_that_are_not_their_memory,
    gradients_that_are_not_their_memory,
    batch_normalisation_over_all_ranks,
    options_of_distributed_data_parallel,
    a_static_graph_is_agreed_upon_once,
    a_hook_of_torch_is_called,
    adversaries_train,
    gradients_of_inputs_are_no_step,
    checkpointed_layers_are_averaged_once,
    a_failed_backward_leaves_the_next_one_whole,
    a_wrapper_is_a_module,
    no_forward_without_a_graph_makes_gradients,
    assigned_gradients_stop_an_optimizer,
    states_load_both_ways,
    what_torchscript_made_is_refused,
    frozen_parameters_start_equal,
    buckets_are_rebuilt_in_observed_order,
    unused_parameters_have_no_gradient,
    unused_parameters_are_named,
    buffers_are_made_equal,
    replaced_buffers_are_synced,
    what_is_frozen_or_not_stays_so,
    what_is_replaced_is_told,
    a_copy_is_not_wrapped,
    what_has_no_shape_is_named,
    gradients_can_be_filled_with_zeros,
    any_dtype_and_sharing,
    an_optimizer_within_backward_is_refused,
    sparse_gradients_stay_sparse,
    sparse_gradients_that_are_unused_or_dense,
    a_gradient_with_a_graph_is_copied,
    a_dead_wrapper_hears_nothing,
]
