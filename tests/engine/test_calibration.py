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
    assert found[0].alpha > 0 and found[0].beta >= 0 and found[0].gamma > 0
    assert run_simulated(1, calibrate)[0].alpha == 0
    (link,), near = run_simulated(3, measure_links)[2]
    assert link.inside and near.alpha == link.alpha > 0 and near.gamma > 0
    times = run_simulated(3, lambda comm: ping_pong(comm, 2, 8, repeat=3, first=1))
    assert times[0] == 0 and times[1] > 0
