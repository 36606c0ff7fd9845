"""Many ranks at once: their arithmetic is Python's, and a question splits them by its answer."""

import operator
from random import Random

import numpy as np
import pytest

from mpidist.schedule import Recv, Send
from mpidist.schedule.ranks import (
    Ranks,
    Span,
    Split,
    Turn,
    Unfit,
    by_value,
    cases,
    choose,
    pick,
    picker,
    span,
    without,
)

ARITHMETIC = [
    getattr(operator, f"__{name}__")
    for name in ("add", "sub", "mul", "floordiv", "mod", "and", "or", "xor", "lshift", "rshift")
]
COMPARISONS = [operator.eq, operator.ne, operator.lt, operator.le, operator.gt, operator.ge]


def listed(result, count):
    return result.values.tolist() if isinstance(result, Ranks) else [int(result)] * count


@pytest.mark.parametrize("function", [*ARITHMETIC, *COMPARISONS], ids=lambda f: f.__name__)
def test_operators_give_the_numbers_of_python(function):
    random = Random(1)
    for _ in range(50):
        left = [random.randrange(-40, 40) for _ in range(6)]
        right = [random.randrange(1, 12) for _ in range(6)]
        one, other = Ranks(np.array(left)), Ranks(np.array(right))
        assert listed(function(one, other), 6) == [function(a, b) for a, b in zip(left, right)]
        assert listed(function(one, 3), 6) == [function(a, 3) for a in left]
        assert listed(function(100, other), 6) == [function(100, b) for b in right]


def test_equal_results_are_a_plain_number():
    ranks = Ranks(np.arange(4))
    assert type(ranks - ranks) is int and type(ranks // 4) is int
    assert (ranks < 4) + (ranks < 5) == 2  # numpy's bools would give True


def test_two_comparisons_add_like_numbers():
    ranks = Ranks(np.arange(4))
    assert listed((ranks > 0) + (ranks > 1), 4) == [0, 1, 2, 2]


def test_a_question_splits_by_its_answer():
    ranks = Ranks(np.array([3, 0, 3, 1]))
    with pytest.raises(Split) as caught:
        bool(ranks)
    assert [part.tolist() for part in caught.value.parts] == [[0, 2, 3], [1]]
    with pytest.raises(Split) as caught:
        range(ranks)
    assert [part.tolist() for part in caught.value.parts] == [[1], [3], [0, 2]]
    with pytest.raises(Split):
        "abcd"[ranks]
    assert bool(Ranks(np.array([1, 2])))
    assert not isinstance(caught.value, Exception)


def test_by_value_has_every_index_once():
    parts = by_value(np.array([5, 2, 5, 2, 9]))
    assert [part.tolist() for part in parts] == [[1, 3], [0, 2], [4]]


@pytest.mark.parametrize(
    "wrong",
    [
        lambda r: r * (1 << 39),
        lambda r: 1 << (r + 60),
        lambda r: r << -1,
        lambda r: r + 2**70,
        lambda r: r >> -1,
        lambda r: (r * (1 << 30)) * (1 << 30),
    ],
)
def test_what_would_wrap_around_is_an_error(wrong):
    with pytest.raises(OverflowError, match="64 bits"):
        wrong(Ranks(np.arange(4, 8)))


@pytest.mark.parametrize("wrong", [lambda r: r / 2, lambda r: {r: 1}, lambda r: iter(r), len])
def test_what_numbers_cannot_do_is_an_error(wrong):
    with pytest.raises(TypeError):
        wrong(Ranks(np.arange(4)))


def test_cases_call_once_for_every_answer():
    calls = []

    def parity(n):
        calls.append(n)
        return ("odd", n * 2) if n % 2 else ("even", n)

    found = cases(parity, np.arange(7))
    assert len(calls) == 3  # for all, for the even and for the odd ones
    assert {(name, tuple(part), tuple(n.values)) for part, (name, n) in found} == {
        ("odd", (1, 3, 5), (2, 6, 10)),
        ("even", (0, 2, 4, 6), (0, 2, 4, 6)),
    }


def test_cases_go_one_by_one_where_arrays_fail():
    found = cases(lambda n: n.bit_length(), np.arange(5))
    assert sorted((int(part[0]), bits) for part, bits in found) == [
        (0, 0),
        (1, 1),
        (2, 2),
        (3, 2),
        (4, 3),
    ]
    with pytest.raises(ZeroDivisionError):
        cases(lambda n: 1 // n, np.arange(3))


def test_cases_that_set_one_apart_again_and_again_go_one_by_one():
    calls = []

    def first_above(n):
        calls.append(n)
        return next(k for k in range(40) if n < k)

    found = cases(first_above, np.arange(30))
    assert sorted((part.tolist(), k) for part, k in found) == [([n], n + 1) for n in range(30)]
    assert len(calls) < 40  # not once for each and once for all that are left


def test_too_many_cases_are_an_error():
    with pytest.raises(OverflowError, match="cases"):
        cases(range, np.arange(100), limit=20)


def test_choose_and_span_of_numbers_and_of_many_ranks():
    ranks = Ranks(np.arange(4))
    assert (choose(True, 1, 2), choose(0, 1, 2)) == (1, 2)
    assert listed(choose(ranks < 2, ranks, -ranks), 4) == [0, 1, -2, -3]
    assert span(2, 5) == range(2, 5)
    assert [listed(n, 4) for n in span(ranks, ranks + 2)] == [[0, 1, 2, 3], [1, 2, 3, 4]]


def test_pick_and_picker_look_up_the_index_of_each_rank():
    ranks = Ranks(np.array([2, 0, 1]))
    assert pick((7, 8, 9), 1) == 8
    assert listed(pick((7, 8, 9), ranks), 3) == [9, 7, 8]
    assert listed(picker(range(5))(ranks), 3) == [2, 0, 1]
    find = picker([ranks, ranks + 10, 5])
    assert find(2) == 5 and find(0) is ranks
    assert listed(find(Ranks(np.array([0, 1, 2]))), 3) == [2, 10, 5]


def test_without_leaves_out_the_step_of_each_rank():
    steps = [Send(3, (0, 1)), Send(4, (2, 3)), Send(5, (4, 5)), Recv(1)]
    assert without(steps, [0, 1, 0, 0]) == (steps[0], steps[2], steps[3])
    gone = Ranks(np.array([0, 2]))
    first, second, last = without(steps, [gone == 0, False, gone == 2, False])
    assert (listed(first.peer, 2), listed(second.peer, 2)) == ([4, 3], [5, 4])
    assert [listed(n, 2) for n in second.blocks] == [[4, 2], [5, 3]] and last is steps[3]
    with pytest.raises(Split):  # one rank has a step less than the other
        without(steps, [gone == 0, False, False, False])
    with pytest.raises(TypeError, match="several kinds"):
        without(steps, [False, False, gone == 2, gone == 0])


# -- turns: one number for all ranks of a circle --------------------------------------------------


def turn(count, lanes=1):
    """Return the rank of all ranks, `lanes` on each node, and a function with its numbers."""
    base = Ranks(np.arange(lanes)) if lanes > 1 else 0

    def numbers(value):
        if not isinstance(value, Turn):
            one = listed(value, lanes)
            return [one] * count
        ahead = np.array(listed(value.base, lanes)) + value.offset
        circle = value.stride * value.count
        plus = np.array(listed(value.plus, lanes))
        return [((ahead + value.stride * k) % circle + plus).tolist() for k in range(count)]

    return Turn(base, 0, lanes, count), numbers


@pytest.mark.parametrize(("count", "lanes"), [(7, 1), (6, 1), (3, 4), (2, 2)])
def test_a_turn_has_the_numbers_of_every_rank(count, lanes):
    size = count * lanes
    rank, numbers = turn(count, lanes)
    for function in (
        lambda r: (r + 3) % size,
        lambda r: (r - 5) % size,
        lambda r: ((r + 3) % size + 2) % size,
        lambda r: (2 + r) % size + 4,
        lambda r: r // lanes,
        lambda r: r % lanes,
        lambda r: (r // lanes + 1) % count * lanes + r % lanes,
        lambda r: (r // lanes - 1) % count * lanes,
        lambda r: r * 3,
        lambda r: r % size,
        lambda r: r // size,
        lambda r: (r < size) + (r >= 0) + (r == size) + (r != -1) + (r > size) + (r <= size - 1),
        lambda r: (r + 1) % size == r,
        lambda r: r - r,
    ):
        found = numbers(function(rank))
        assert found == [[function(k * lanes + i) for i in range(lanes)] for k in range(count)], (
            function
        )


@pytest.mark.parametrize(
    "ask",
    [
        lambda r: r == 3,
        lambda r: r < 3,
        lambda r: bool(r),
        lambda r: r % 4,
        lambda r: r // 2,
        lambda r: range(r),
        lambda r: [1, 2, 3][r],
        lambda r: r + r,
        lambda r: (r + 1) % 7 - r == 1,
        lambda r: bool(r - (r + 1) % 7),
        lambda r: ((r + 1) % 7 - r) % 3,
        lambda r: r * 0,
        lambda r: r * 2 == r,
    ],
)
def test_what_is_not_the_same_for_all_ranks_is_an_error(ask):
    rank, _ = turn(7)
    with pytest.raises(Unfit):
        ask(rank)


def test_the_difference_of_two_turns_is_known_by_the_circle():
    rank, other = Turn(0, 0, 1, 7), Turn(Ranks(np.array([0, 3, 6])), 0, 1, 7)
    assert ((other - rank) % 7).values.tolist() == [0, 3, 6]
    assert ((rank - other - 1 + 2) % 7).values.tolist() == [1, 5, 2]


@pytest.mark.parametrize("operation", [operator.and_, operator.xor, operator.lshift])
def test_a_turn_has_no_bits(operation):
    with pytest.raises(TypeError):
        operation(turn(8)[0], 1)


def test_a_span_is_its_numbers():
    ranks = Ranks(np.array([3, 0, 5]))
    several = span(ranks, ranks + 4)
    assert isinstance(several, Span) and len(several) == 4
    assert [listed(n, 3) for n in several] == [[3 + i, i, 5 + i] for i in range(4)]
    assert [listed(n, 3) for n in several[1:3]] == [[4, 1, 6], [5, 2, 7]]
    assert listed(picker(several)(Ranks(np.array([0, 1, 2]))), 3) == [3, 1, 7]
    with pytest.raises(IndexError):
        several[4]
    rank, numbers = turn(5)
    assert numbers(picker(range(2, 9))(rank)) == [[2], [3], [4], [5], [6]]
    assert [numbers(n) for n in span(rank, rank + 2)] == [numbers(rank), numbers(rank + 1)]
    assert span(2, 4) == range(2, 4)
