"""Curves of seconds over bytes, and the times of messages that they give."""

from itertools import combinations_with_replacement

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mpidist.schedule.model import Curve, Messages, rising


def test_a_curve_is_linear_between_its_points_and_goes_on_beyond():
    curve = Curve.through((8, 1000, 2000), (1.0, 2.0, 4.0))
    assert curve.at(0) == curve.at(8) == 1.0, "constant below the first"
    assert curve.at(504) == 1.5 and curve.at(1000) == 2.0 and curve.at(1500) == 3.0
    assert curve.at(3000) == 6.0, "as between the last two"


def test_a_curve_never_falls_and_is_never_negative():
    noisy = Curve.through((1, 2, 3, 4), (-1.0, 5.0, 3.0, 6.0))
    assert noisy.seconds == (0.0, 3.0, 3.0, 6.0)
    assert Curve.through((8,), (2.0,)).at(1 << 30) == 2.0


@pytest.mark.parametrize("factor", [0.0, 0.1, 10.0, 1000.0])
@pytest.mark.parametrize("at", range(8))
def test_one_outlier_stays_between_the_points_beside_it(at, factor):
    sizes, true = [1 << k for k in range(9)], [float(1 << k) for k in range(9)]
    measured = [each * factor if k == at else each for k, each in enumerate(true)]
    fitted = Curve.through(sizes, measured)
    for k, (found, expected) in enumerate(zip(fitted.seconds, true)):
        if k > at:
            assert found == expected, "those behind it stay"
        elif factor > 1:
            assert found == (true[at + 1] if k == at else expected), "it alone is moved"
        else:
            assert found <= expected
            assert k == at or found >= (true[k - 1] if k else 0.0)
    if at < 7 or factor > 1:
        assert fitted.slope == 1.0


@pytest.mark.parametrize(
    ("seconds", "slope"),
    [((1.0, 2.0, 4.0, 3.0), 0.5), ((1.0, 2.0, 3.0, 3.0), 0.5), ((2.0, 1.0), 0)],
)
def test_a_curve_whose_last_points_fall_goes_on_from_the_nearest_lower_one(seconds, slope):
    assert Curve.through(range(1, len(seconds) + 1), seconds).slope == slope


@settings(max_examples=200, deadline=None)
@given(st.lists(st.integers(0, 6), min_size=1, max_size=6))
def test_rising_numbers_differ_least_from_the_values(values):
    """No ascending numbers, of which some are always among the values, differ less."""
    best = min(
        sum(abs(a - b) for a, b in zip(values, other))
        for other in combinations_with_replacement(sorted(set(values)), len(values))
    )
    fitted = rising(values)
    assert list(fitted) == sorted(fitted)
    assert sum(abs(a - b) for a, b in zip(values, fitted)) == best


def test_a_line_is_the_model_of_papers():
    messages = Messages.straight(1e-6, 1e-9, 1e-10)
    for both_ways in (False, True):
        for written in (False, True):
            seconds, busy, onward = messages.message(1000, both_ways, written)
            assert seconds == busy == pytest.approx(2e-6), "latency occupies the port"
            assert onward == seconds, "a rank goes on once its message has arrived"
    for apart in (False, True):
        assert messages.combining(1000, apart) == pytest.approx(1e-7)
    assert messages.call == messages.strand.at(1 << 20) == messages.copy.at(1 << 20) == 0


def test_the_latency_of_a_message_does_not_occupy_its_port():
    line, free = Curve.line(5.0, 1.0), Curve.line(0.0, 0.0)
    further, onward = Curve.line(2.0, 1.0), Curve.line(3.0, 2.0)
    messages = Messages(0.0, free, further, onward, line, line, line, line, free, free, free)
    assert messages.message(1, both_ways=False, written=False) == (6.0, 3.0, 5.0)
    assert messages.message(10, both_ways=False, written=False) == (15.0, 12.0, 15.0)
