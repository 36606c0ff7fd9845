"""The measured speeds of memory and messages."""

from mpidist import run_simulated
from mpidist.communicator.layers import calibrate
from mpidist.engine.calibration import measure_links
from mpidist.measure import (
    add_cost,
    ping_pong,
)


def test_calibrate_speeds_are_positive_and_alike():
    assert add_cost(1 << 16) > 0
    found = run_simulated(3, calibrate)
    assert found[0] == found[1] == found[2]
    line, combine = found[0].messages.one_way, found[0].messages.combine
    assert line.at(0) > 0 and line.slope >= 0 and combine.slope > 0
    assert run_simulated(1, calibrate)[0].messages.one_way.at(0) == 0
    (link,), near = run_simulated(3, measure_links)[2]
    assert link.inside and near.messages.one_way.at(0) == link.alpha > 0
    assert near.messages.combine.slope > 0 and near.far is None
    times = run_simulated(3, lambda comm: ping_pong(comm, 2, 8, repeat=3, first=1))
    assert times[0] == 0 and times[1] > 0
