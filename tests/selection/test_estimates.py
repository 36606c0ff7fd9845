"""Times that the calibrated model predicts, and when the ranks calibrate."""

from dataclasses import replace

import numpy as np
import pytest

from mpidist import run_simulated
from mpidist.errors import DeadlockError
from mpidist.schedule.cost import Link, Sharing, cost
from mpidist.schedule.model import Curve
from mpidist.schedule.registry import find
from mpidist.selection.calibration import Calibration
from mpidist.selection.choose import Candidate, Candidates
from mpidist.selection.estimates import MEASURED, MODEL, MOST_RANKS, Estimates, Model
from mpidist.selection.segmentation import Segmentation
from mpidist.selection.tuning import TuningTable
from tests.support.choices import KNOWN, call_for, full, means_of


def test_predicted_times():
    model = Model(KNOWN, ((0, 1, 2, 3),), Segmentation())
    ring = find("allreduce", "ring")
    exact = cost("allreduce", ring, 4, 1 << 16, alpha=1e-5, beta=1e-9, gamma=1e-10).seconds
    assert model.seconds("allreduce", ring, 1 << 16) == exact
    half = cost("allreduce", ring, 4, 1 << 15, alpha=1e-5, beta=1e-9, gamma=1e-10).seconds
    between = model.seconds("allreduce", ring, 3 << 14)
    assert between == pytest.approx((exact + half) / 2), "between two powers of two"
    assert model.seconds("barrier", find("barrier", "dissemination"), 0) == pytest.approx(2e-5)
    many = Model(KNOWN, (tuple(range(MOST_RANKS + 1)),), Segmentation())
    assert many.seconds("allreduce", ring, 8) is None
    apart = Model(Calibration.straight(1e-5, 0, 0, Link(1e-3, 0)), ((0, 1), (2, 3)), Segmentation())
    assert apart.seconds("allreduce", ring, 8) > 1e-3


def test_predicted_times_in_shared_memory():
    """None where its constants were not measured; a slot's pieces are those of the executor."""
    near = Sharing.straight(1e-6, 1e-10, 1e-10, 0.0, 1e-9, 1 << 20)
    model = Model(replace(KNOWN, mapped=near), ((0, 1),), Segmentation())
    assert model.seconds("barrier", find("barrier", "in_place"), 0) == 1e-6
    in_place, slots = (find("allgather", name) for name in ("in_place", "slots"))
    assert model.seconds("allgather", in_place, 1 << 20) == pytest.approx(2e-6 + (1 << 19) * 1e-10)
    cut = cost(*("allgather", "slots", 2, 1 << 20), alpha=1e-5, beta=1e-9, segments=8, sharing=near)
    assert model.seconds("allgather", slots, 1 << 20) == cut.seconds
    published = find("allgather", "published")
    assert model.seconds("allgather", published, 8) is None
    both = replace(KNOWN, published=replace(near, read=Curve.line(1e-3, 1e-10)))
    assert Model(both, ((0, 1),), Segmentation()).seconds("allgather", published, 8) > 1e-3
    assert Model(both, ((0, 1),), Segmentation()).seconds("allgather", slots, 8) is None


def test_predicted_times_of_executors():
    near = Sharing.straight(1e-6, 1e-10, 1e-10, 0.0, 1e-9, 1 << 20)
    estimates = Estimates("a library", ((0, 1),), True, replace(KNOWN, mapped=near))
    call = call_for(1 << 16, size=2)

    def of(name, collective="allreduce"):
        return estimates.model.seconds(collective, find(collective, name), call.nbytes)

    candidates = Candidates(call, means_of(((0, 1),)))

    def expected(name):
        return candidates.predicted(Candidate(name, None, ""), estimates, "private")

    assert expected("symmetric").seconds == of("in_place") > 0
    assert expected("staged").seconds == min(of("slots"), of("slots_one_shot"))
    assert expected("native").seconds is None
    assert expected("single_copy").seconds is None, "it was not measured"
    assert expected("staged").basis == MODEL


def test_communicators_of_one_shape_share_their_predictions():
    """Each takes milliseconds, and many groups of a program have the same shape."""
    two, three = ((0, 1), (2, 3)), ((0, 1), (2, 3), (4, 5))
    first, second, other = (
        Estimates("a library", groups, True, KNOWN) for groups in (two, two, three)
    )
    assert first.model is second.model is not other.model
    assert (
        Estimates("a library", two, True, replace(KNOWN, far=Link(1.0, 0.0).messages)).model
        is not first.model
    )


def test_the_calibration_of_a_file_is_that_of_its_ranks():
    """Kernels of four ranks say nothing of two, but their messages do."""
    four, two = full({("native", "allreduce"): 1e-6}), full({("native", "allreduce"): 2e-6}, (2,))
    table = TuningTable(calibrations=[four, two])
    call, ring = call_for(64), find("allreduce", "ring")
    assert Estimates("simulated", ((0, 1, 2, 3),), tuning=table).calibration is four
    assert Estimates("simulated", ((0, 1),), tuning=table, calibration=four).calibration is two
    alone = TuningTable(calibrations=[four])
    split = Estimates("simulated", ((0, 1),), tuning=alone, calibration=four)
    assert split.calibration is four and not split.knows_all(call)
    assert split.expected(call, "native", []) is None
    assert split.expected(call, "ring", [ring])[2] == MODEL
    for other in (Estimates("another", ((0, 1, 2, 3),), tuning=table), split):
        assert other.unfit and "does not apply" in other.unfit
    whole = Estimates("simulated", ((0, 1, 2, 3),), tuning=table)
    assert whole.entry(call, "private") == (None, ""), "there are no entries to speak of"
    assert whole.expected(call, "native", []) == (1e-6, "native", MEASURED)


@pytest.mark.parametrize("size", [2, 4])
def test_simulated_ranks_calibrate_when_asked(size):
    def both(comm):
        before = comm.explain("allreduce", 1 << 20)[0].why
        total = comm.allreduce(np.ones(1 << 18, "float32"))
        after = comm.explain("allreduce", 1 << 20)[0].why
        inherited = comm.split(0).explain("allreduce", 1 << 20)[0].why
        return before, after, inherited, total.sum()

    found = run_simulated(size, both, calibrate=True)
    assert len(set(found)) == 1, "every rank has the same figures"
    before, after, inherited, total = found[0]
    assert "the first call will calibrate" in before and total == size << 18
    assert after.startswith("cost model: ") and inherited == after
    before, after, _, _ = run_simulated(size, both)[0]
    assert before == after == "shipped rule: ring from 32 KiB on"


def test_background_call_does_not_calibrate():
    """Its ranks need not meet: this one would wait for a message that comes later."""

    def cross(comm):
        data = np.ones(4, "float32")
        if comm.rank == 0:
            work = comm.iallreduce(data)
            comm.send(data, 1)
        else:
            comm.recv(data, 0)
            work = comm.iallreduce(data)
        return work.wait()[0]

    assert run_simulated(2, cross, calibrate=True, timeout=10) == [2.0, 2.0]


def test_missing_rank_in_calibrate():
    def absent(comm):
        if comm.rank == 0:
            with pytest.raises(DeadlockError) as caught:
                comm.allreduce(np.ones(2))
            assert "allreduce" in comm.broken and "calibrate" not in comm.broken
            raise caught.value

    with pytest.raises(DeadlockError, match="ranks 0 wait"):
        run_simulated(2, absent, calibrate=True)
