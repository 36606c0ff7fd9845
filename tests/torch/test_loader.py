"""Loaders of PyTorch, divided among the ranks."""

from types import SimpleNamespace

import pytest

from mpidist import shard
from mpidist.errors import Unsupported
from tests.support.training_kits import NEEDS_TORCH, torch


def rank_of(rank, size):
    """A rank that sends nothing."""
    return SimpleNamespace(rank=rank, size=size)


def parts(data, size, **options):
    return [shard(data, rank_of(rank, size), **options) for rank in range(size)]


@pytest.mark.skipif(torch is None, reason=NEEDS_TORCH)
def test_loader():
    data = torch.utils.data.TensorDataset(torch.arange(22))
    make = torch.utils.data.DataLoader
    shards = parts(make(data, batch_size=3, shuffle=True), 2, seed=4, uneven="keep")
    epochs = [[[x.tolist() for (x,) in one] for one in shards] for _ in range(2)]
    for epoch in epochs:
        assert [len(batch) for batch in epoch[0]] == [3, 3, 3, 2]
        assert sorted(x for one in epoch for batch in one for x in batch) == list(range(22))
    assert epochs[0] != epochs[1] and len(shards[0]) == 4
    again = parts(make(data, batch_size=3, shuffle=True), 2, seed=4, uneven="keep")
    for _ in zip(range(2), again[0], strict=False):
        state = again[0].state_dict()
    assert state == {"seed": 4, "epoch": 0, "position": 12}
    resumed = parts(make(data, batch_size=3), 3, shuffle=True, uneven="keep")
    rest = []
    for one in resumed:
        one.load_state_dict(state)
        rest += [x for (batch,) in one for x in batch.tolist()]
    before = [x for one in epochs[0] for batch in one[:2] for x in batch]
    assert sorted(before + rest) == list(range(22))
    sampler = torch.utils.data.WeightedRandomSampler([1.0] * 22, 22)
    with pytest.raises(Unsupported, match="rank 0: .*WeightedRandomSampler"):
        shard(make(data, sampler=sampler), rank_of(0, 2))
    for options in ({"num_samples": 4}, {"replacement": True}):
        sampler = torch.utils.data.RandomSampler(data, **options)
        with pytest.raises(Unsupported, match="rank 0: the loader's RandomSampler takes"):
            shard(make(data, sampler=sampler), rank_of(0, 2))


@pytest.mark.skipif(torch is None, reason=NEEDS_TORCH)
def test_resumed_epoch_leaves_the_generator_as_it_was():
    data = torch.utils.data.TensorDataset(torch.arange(12))
    (whole,) = parts(torch.utils.data.DataLoader(data, batch_size=3), 1)
    torch.manual_seed(3)
    states, drawn = [], []
    for _ in whole:
        drawn.append(float(torch.rand(())))
        states.append((whole.state_dict(), torch.get_rng_state()))
    for _ in whole:
        drawn.append(float(torch.rand(())))
    for at, (state, generator) in enumerate(states):
        (resumed,) = parts(torch.utils.data.DataLoader(data, batch_size=3), 1)
        resumed.load_state_dict(state)
        torch.set_rng_state(generator)
        again = [float(torch.rand(())) for _ in range(2) for _ in resumed]
        assert again == drawn[at + 1 :]
