"""The state of a rank as text."""

import pytest

from mpidist.launcher.ranks import RankState, Seen, hung


def test_state_real_time_signal_has_no_name():
    assert str(RankState(3, "n2", -40)) == "rank 3 on n2 was killed by signal 40"


INSIDE = Seen(7, "S", call="in world #8 barrier", since="begun 10:00")
LINE = Seen(7, "R", call="after world #7 barrier", since="waiting since 10:00 in a.py:3")
SPARE = Seen(7, "S", call="after md.elastic waits as a spare", since="begun 10:00")
BUSY = Seen(7, "R", call="after world #7 barrier", since="begun 10:00")
STOPPED = Seen(7, "T (do_signal_stop)", call="in world #8 barrier")


@pytest.mark.parametrize(
    ("seen", "waits"), [(INSIDE, True), (LINE, True), (BUSY, False), (STOPPED, False)]
)
def test_who_waits_for_others(seen, waits):
    assert seen.waits is waits


@pytest.mark.parametrize(
    ("seen", "found"),
    [
        ([INSIDE, BUSY, LINE], [1]),
        ([INSIDE, STOPPED, LINE, SPARE], [1]),
        ([STOPPED, INSIDE, STOPPED], [0, 2]),
        ([INSIDE, BUSY, BUSY], []),  # they do not wait for each other
        ([BUSY, SPARE], []),  # a spare waits for nobody
        ([STOPPED, SPARE], []),
        ([INSIDE, LINE, SPARE], []),
        ([INSIDE, INSIDE, Seen(7, why="ImportError: no such module")], []),
        ([INSIDE, INSIDE, Seen(7, "R", call="rank-00002.7: of another version")], []),
        ([INSIDE, BUSY, Seen(7, why="ImportError: no such module")], []),
    ],
)
def test_for_whom_all_others_wait(seen, found):
    assert hung(dict(enumerate(seen))) == found
