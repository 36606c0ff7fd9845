"""The state of a rank as text."""

from mpidist.launcher.ranks import RankState


def test_state_real_time_signal_has_no_name():
    assert str(RankState(3, "n2", -40)) == "rank 3 on n2 was killed by signal 40"
