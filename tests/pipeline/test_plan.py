"""The plan of a pipeline: proved, the same on all ranks, with a digest by which they compare."""

import pytest

from mpidist.errors import ScheduleError, Unsupported
from mpidist.pipeline.plan import make_plan, plan_of
from mpidist.pipeline.schedules import as_schedule


def test_make_plan_is_proved():
    plan = make_plan("1f1b", 3, 4, 1)
    assert (plan.name, plan.peaks, plan.first, plan.last) == ("1f1b", (3, 2, 1), 0, 2)
    turn = make_plan("zb-v", 2, 4, 2)
    assert turn.first == turn.last == 0  # the stages go down and come back
    with pytest.raises(Unsupported, match="chunks=2"):
        make_plan("1f1b", 3, 4, 2)
    known = as_schedule("1f1b")
    parts = [list(known.actions(rank, 2, 2, 1)) for rank in range(2)]
    parts[1].pop()
    with pytest.raises(ScheduleError):
        plan_of("short", known.place(2, 1), parts, 2)


def test_digest_is_of_the_actions_of_all_ranks():
    plans = [make_plan(name, 2, 4, 1) for name in ("1f1b", "gpipe", "1f1b")]
    first, other, again = [plan.digest() for plan in plans]
    assert first == again != other
