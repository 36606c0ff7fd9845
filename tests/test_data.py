"""Each rank's part of a data set."""

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mpidist import shard
from mpidist.errors import InvalidArgument


class Rank:
    """A rank that sends nothing."""

    def __init__(self, rank, size):
        self.rank, self.size = rank, size


def parts(data, size, **options):
    return [shard(data, Rank(rank, size), **options) for rank in range(size)]


@given(
    st.integers(0, 40),
    st.integers(1, 7),
    st.booleans(),
    st.sampled_from(["repeat", "drop", "keep"]),
    st.integers(0, 3),
)
def test_a_partition(count, size, shuffle, uneven, seed):
    shards = parts(range(100, 100 + count), size, shuffle=shuffle, seed=seed, uneven=uneven)
    for _ in range(2):
        lengths = [len(one) for one in shards]
        taken = [list(one) for one in shards]
        assert lengths == [len(one) for one in taken]
        together = sorted(x for one in taken for x in one)
        everything = list(range(100, 100 + count))
        if uneven == "keep":
            assert together == everything
        else:
            assert len(set(lengths)) == 1
        if uneven == "repeat":
            assert sorted(set(together)) == everything and len(together) < count + size
        if uneven == "drop":
            assert len(set(together)) == len(together) == count // size * size


@given(
    st.integers(0, 60),
    st.sampled_from([2, 3, 4, 6, 12]),
    st.booleans(),
    st.sampled_from(["repeat", "drop"]),
)
def test_microbatches_are_the_same_on_any_number_of_ranks(count, total, shuffle, uneven):
    """Each step's, in the order of the ranks; also after a resume on another number of ranks."""
    options = {"shuffle": shuffle, "uneven": uneven, "microbatches": total}

    def steps(shards):
        taken = [list(one) for one in shards]
        each = total // len(shards)
        of = range(0, len(taken[0]), each)
        return [[x for one in taken for x in one[k : k + each]] for k in of]

    expected = steps(parts(range(count), 1, **options))
    assert all(len(step) == total for step in expected)
    for ranks in (n for n in range(2, total + 1) if total % n == 0):
        assert steps(parts(range(count), ranks, **options)) == expected
        begun = parts(range(count), ranks, **options)
        if len(expected) > 1:
            for one in begun:
                items = iter(one)
                for _ in range(total // ranks):
                    next(items)
            (alone,) = parts(range(count), 1, **options)
            alone.load_state_dict(begun[-1].state_dict())
            assert steps([alone]) == expected[1:]


def test_microbatches_that_cannot_be_dealt_out():
    for data, options, words in (
        (range(10), {"microbatches": 3}, "3 on 2 ranks: expected a multiple of the ranks$"),
        (range(10), {"microbatches": 4, "uneven": "keep"}, "uneven='keep': expected 'repeat' or"),
        ((x for x in range(4)), {"microbatches": 4}, ""),
        (range(10), {"microbatches": -1}, "-1"),
    ):
        with pytest.raises(InvalidArgument, match=f"microbatches=.*{words}"):
            shard(data, Rank(0, 2), **options)


def test_the_number_of_the_epoch():
    one = shard(range(10), Rank(0, 2))
    assert one.epoch == 0
    begun = iter(one)
    next(begun)
    assert one.epoch == 0
    list(begun)
    assert one.epoch == 1
    other = shard(range(10), Rank(0, 3))
    other.load_state_dict(one.state_dict())
    assert other.epoch == 1


def test_epochs_and_seeds_differ():
    one = shard(range(50), Rank(0, 1), shuffle=True)
    first, second = list(one), list(one)
    assert first != second and sorted(first) == sorted(second) == list(range(50))
    assert list(shard(range(50), Rank(0, 1), shuffle=True)) == first
    assert list(shard(range(50), Rank(0, 1), shuffle=True, seed=1)) != first


@given(
    st.integers(0, 30),
    st.integers(1, 5),
    st.integers(0, 8),
    st.sampled_from(["repeat", "drop", "keep"]),
)
def test_resumes_with_the_same_samples(count, size, steps, uneven):
    """Those that are taken twice too, or an interrupted training would end with other bits."""
    options = {"shuffle": True, "uneven": uneven}
    for rank in range(size):
        whole = list(shard(range(count), Rank(rank, size), **options))
        one, other = (shard(range(count), Rank(rank, size), **options) for _ in range(2))
        begun = iter(one)
        taken = [next(begun) for _ in range(min(steps, len(whole)))]
        other.load_state_dict(one.state_dict())
        assert taken + list(other) == whole


@given(st.integers(1, 5), st.integers(1, 5), st.integers(0, 8))
def test_resumes_on_another_number_of_ranks(before, after, steps):
    """What was taken before and what is taken after is everything, once."""
    shards = parts(range(47), before, shuffle=True, seed=2, uneven="keep")
    taken = []
    for one in shards:
        samples = iter(one)
        taken += [next(samples) for _ in range(steps)]
    resumed = parts(range(47), after, shuffle=True, uneven="keep")
    for one in resumed:
        one.load_state_dict(shards[0].state_dict())
    rest = [x for one in resumed for x in one]
    assert sorted(taken + rest) == list(range(47))
    again = [x for one in resumed for x in one]  # the next epoch is whole
    assert sorted(again) == list(range(47))


@pytest.mark.parametrize(
    "uneven, expected",
    [("keep", [[0, 3, 6], [1, 4], [2, 5]]), ("drop", [[0, 3], [1, 4], [2, 5]])],
)
def test_a_stream(uneven, expected):
    assert [list(shard(iter(range(7)), Rank(r, 3), uneven=uneven)) for r in range(3)] == expected


def test_a_stream_is_filled_up():
    taken = [list(shard(iter(range(7)), Rank(r, 3))) for r in range(3)]
    assert taken == [[0, 3, 6], [1, 4, 6], [2, 5, 6]]
    # With more than one item left: the ranks without one begin again at the first of these.
    taken = [list(shard(iter(range(8)), Rank(r, 5))) for r in range(5)]
    assert taken == [[0, 5], [1, 6], [2, 7], [3, 5], [4, 6]]


def test_wrong_arguments():
    with pytest.raises(InvalidArgument, match="rank 1: uneven='cut': expected one of 'repeat'"):
        shard([1], Rank(1, 2), uneven="cut")
    with pytest.raises(InvalidArgument, match="rank 0: shuffle=True: .*no length"):
        shard(iter([1]), Rank(0, 2), shuffle=True)
    for data in ({"a": 1}, {1, 2}, 5, None):
        with pytest.raises(
            InvalidArgument, match=f"rank 1: data has type {type(data).__name__}: expected"
        ):
            shard(data, Rank(1, 2))
    for seed in (-1, "a", 1.5):
        with pytest.raises(InvalidArgument, match=f"rank 1: seed={seed!r}: expected a whole"):
            shard([1], Rank(1, 2), seed=seed)


def test_wrong_states():
    samples = shard([1, 2, 3], Rank(1, 2))
    for state in ({}, None, {"seed": 0, "epoch": 0, "position": -2}):
        with pytest.raises(
            InvalidArgument, match=f"rank 1: state={re.escape(repr(state))}: expected"
        ):
            samples.load_state_dict(state)
    with pytest.raises(
        InvalidArgument, match="'position': 4} comes from a longer .* has 3 samples"
    ):
        samples.load_state_dict({"seed": 0, "epoch": 0, "position": 4})
