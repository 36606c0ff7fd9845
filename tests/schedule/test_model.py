"""Curves of seconds over bytes, and the times of messages that they give."""

import pytest

from mpidist.schedule.model import Curve, Messages


def test_a_curve_is_linear_between_its_points_and_goes_on_beyond():
    curve = Curve.through((8, 1000, 2000), (1.0, 2.0, 4.0))
    assert curve.at(0) == curve.at(8) == 1.0, "constant below the first"
    assert curve.at(504) == 1.5 and curve.at(1000) == 2.0 and curve.at(1500) == 3.0
    assert curve.at(3000) == 6.0, "as between the last two"


def test_a_curve_never_falls_and_is_never_negative():
    noisy = Curve.through((1, 2, 3, 4), (-1.0, 5.0, 3.0, 6.0))
    assert noisy.seconds == (0.0, 5.0, 5.0, 6.0)
    assert Curve.through((8,), (2.0,)).at(1 << 30) == 2.0


def test_a_line_is_the_model_of_papers():
    messages = Messages.straight(1e-6, 1e-9, 1e-10)
    for both_ways in (False, True):
        for written in (False, True):
            seconds, busy = messages.message(1000, both_ways, written)
            assert seconds == busy == pytest.approx(2e-6), "latency occupies the port"
    for apart in (False, True):
        assert messages.combining(1000, apart) == pytest.approx(1e-7)
    assert messages.call == messages.strand.at(1 << 20) == messages.copy.at(1 << 20) == 0


def test_the_latency_of_a_message_does_not_occupy_its_port():
    line, free = Curve.line(5.0, 1.0), Curve.line(0.0, 0.0)
    messages = Messages(0.0, free, 2.0, line, line, line, line, free, free, free)
    assert messages.message(10, both_ways=False, written=False) == (15.0, 12.0)
