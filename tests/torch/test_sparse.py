"""Sparse gradients of embeddings."""

from contextlib import nullcontext

import pytest

from mpidist.errors import InvalidArgument, Unsupported
from mpidist.parallel import DDP, ZeroOptimizer
from tests.support.training_kits import NEEDS_TORCH, SMALLEST, torch

if torch is None:
    pytest.skip(NEEDS_TORCH, allow_module_level=True)

from torch import nn

pytestmark = pytest.mark.ranks(1, 2, 3)


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


def test_sparse_gradients_equal_those_of_one_process(comm):
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
        model = DDP(net, comm, overlap=overlap, sync=sync, hook=hook, **SMALLEST)
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


def test_unused_sparse_gradients_are_zeros_or_refused(comm):
    """As `unused` says; the zeros are sparse, too."""
    index = torch.tensor([1, comm.rank + 2])
    model = DDP(bag_of_words(), comm, unused="zero")
    model(index, False).sum().backward()
    assert model.module.never.weight.grad.is_sparse and not model.module.never.weight.grad._nnz()
    model.close()
    model = DDP(bag_of_words(), comm, unused="error")
    with pytest.raises(InvalidArgument, match=f"rank {comm.rank}: .*never.weight .on rank 0"):
        model(index, True).sum().backward()
    model.close()


def test_sparse_gradient_that_is_dense_on_one_rank(comm):
    """It is dense on all ranks, also where it is sparse or None; in the next step sparse again."""
    model = DDP(bag_of_words(), comm, check_replicas=1)
    words, bias = model.module.words.weight, model.module.head.bias
    for dense_on in (0, comm.size - 1):
        model.zero_grad()
        loss = model(torch.tensor([1, comm.rank + 2]), False).sum()
        if comm.rank == 0 and comm.size > 1:
            loss = bias.sum()  # no word: its gradient is None, or only dense
        if comm.rank == dense_on:
            loss = loss + words.sum() * comm.size
        loss.backward()
        assert not words.grad.is_sparse and (words.grad[comm.size + 2 :] == 1).all()
    model.zero_grad()
    rows = torch.ones(1, 3).double()
    words.grad = torch.sparse_coo_tensor([[comm.rank]], rows, (40, 3), check_invariants=True)
    expected = torch.zeros(40, 3).double()
    expected[: comm.size] = 1 / comm.size
    for _ in range(2):  # the second time nothing is left to average
        model.sync_gradients()
        torch.testing.assert_close(words.grad.to_dense(), expected)
        assert words.grad.is_sparse


def test_model_with_sparse_gradients_only(comm):
    """It has no bucket."""
    model = DDP(nn.Embedding(9, 2, sparse=True), comm)
    model(torch.tensor([comm.rank])).sum().backward()
    assert model.module.weight.grad._nnz() == comm.size and not model.buckets


def test_sparse_gradients_are_refused(comm):
    """By ZeroOptimizer; and by DDP if the ranks disagree on which are sparse."""
    with pytest.raises(Unsupported, match=f"rank {comm.rank}: ZeroOptimizer: .*weight are sparse"):
        ZeroOptimizer(torch.optim.SGD, DDP(nn.Embedding(4, 2, sparse=True), comm), lr=0.1)
    if comm.size > 1:
        with pytest.raises(InvalidArgument, match=r"rank 1 has sparse gradients=\[\] where rank 0"):
            DDP(nn.Embedding(4, 2, sparse=not comm.rank), comm)
