"""Which parameters share a bucket."""

from hypothesis import given
from hypothesis import strategies as st

from mpidist.parallel import assign_buckets


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
