"""The state of a rank as text."""

import pytest

from mpidist.launcher.ranks import RankState, Seen


def test_state_real_time_signal_has_no_name():
    assert str(RankState(3, "n2", -40)) == "rank 3 on n2 was killed by signal 40"


@pytest.mark.parametrize(
    ("seen", "waits"),
    [
        (Seen(7, "S", call="in world #8 barrier", since="begun 10:00"), True),
        (Seen(7, "R", call="after world #7 barrier", since="waiting since 10:00 in a.py:3"), True),
        (Seen(7, "S", call="after md.elastic waits as a spare", since="begun 10:00"), True),
        (Seen(7, "R", call="after world #7 barrier", since="begun 10:00"), False),
        (Seen(7, "T (do_signal_stop)", call="in world #8 barrier"), False),
    ],
)
def test_who_waits_for_others(seen, waits):
    assert seen.waits is waits
