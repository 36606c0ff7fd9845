"""Which parameters share a bucket."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mpidist.parallel import DDP, assign_buckets
from tests.support.training_kits import SMALLEST, needs_torch, torch


@given(st.permutations(range(6)), st.integers(1, 20), st.integers(1, 20))
def test_assign_buckets_follows_an_observed_order(order, most, first):
    buckets = assign_buckets([3, 5, 1, 4, 2, 6], "ababab", most, first, order)
    assert sorted(i for bucket in buckets for i in bucket) == list(range(6))
    ready = [max(order.index(i) for i in bucket) for bucket in buckets]
    assert ready == sorted(ready)
    for bucket in buckets:
        assert [order.index(i) for i in bucket] == sorted(order.index(i) for i in bucket)


def test_assign_buckets_examples():
    assert assign_buckets([], [], 8, 4) == []
    assert assign_buckets([4] * 5, "aaaaa", 8, 4) == [(4,), (3, 2), (1, 0)]
    assert assign_buckets([4, 100, 4, 4], "aaaa", 8, 8) == [(3, 2), (1,), (0,)]
    assert assign_buckets([4] * 4, "abab", 8, 8) == [(3, 1), (2, 0)]
    assert assign_buckets([4] * 4, "abab", 4, 4) == [(3,), (2,), (1,), (0,)]
    assert assign_buckets([0, 0, 8, 0], "aaaa", 8, 8) == [(3, 2, 1, 0)]


@given(
    st.lists(st.tuples(st.integers(0, 50), st.sampled_from("ab")), max_size=30),
    st.integers(1, 60),
    st.integers(1, 60),
)
def test_assign_buckets_properties(parameters, most, first):
    sizes, kinds = [s for s, _ in parameters], [k for _, k in parameters]
    buckets = assign_buckets(sizes, kinds, most, first)
    assert sorted(i for b in buckets for i in b) == list(range(len(parameters)))
    for bucket in buckets:
        assert len({kinds[i] for i in bucket}) == 1
        assert list(bucket) == sorted(bucket, reverse=True)
        assert len(bucket) == 1 or sum(sizes[i] for i in bucket) <= max(most, first)
    ready = [min(bucket) for bucket in buckets]
    assert ready == sorted(ready, reverse=True)


def inside(view, flat):
    begin = flat.__array_interface__["data"][0]
    return begin <= view.data_ptr() and (
        view.data_ptr() + view.numel() * view.element_size() <= begin + flat.nbytes
    )


@needs_torch
@pytest.mark.ranks(1, 2, 3)
def test_buckets_are_rebuilt_in_observed_order(comm):
    class Backwards(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.third, self.first, self.second = (
                torch.nn.Linear(4, 4, bias=False) for _ in range(3)
            )

        def forward(self, x):
            return self.third(self.second(self.first(x)))

    model = DDP(Backwards(), comm, **SMALLEST)
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
