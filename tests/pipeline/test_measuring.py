"""schedule="auto": a schedule from measured costs."""

import pytest

import mpidist
from mpidist.errors import InvalidArgument
from tests.support.pipeline_kits import KITS, Run


@pytest.mark.ranks(2, 4)
@pytest.mark.mpi(min_size=2)
@pytest.mark.parametrize("kit", KITS)
def test_measured_schedule_equals_the_unsplit_model(comm, kit):
    """schedule="auto": right before and after the schedule was computed, and within the cap."""
    for cap in (2, None):
        run = Run(comm, kit, "1f1b", 6, 12)
        run.pipe.close()
        run.pipe = mpidist.Pipeline(run.chunks[0], comm, 6, "auto", max_live=cap)
        for _ in range(6):
            run.forget()
            run.check(run.step())
            stats = run.pipe.stats()
            assert stats.peak_live == stats.predicted_live <= (cap or comm.size)
        assert stats.costs is not None and min(stats.costs.F) > 0
        run.pipe.close()
    run = Run(comm, kit, "zb-v", 6, 12)
    run.pipe.close()
    run.pipe = mpidist.Pipeline(run.chunks, comm, 6, "auto", placement="v")
    for _ in range(6):
        run.forget()
        run.check(run.step())
    run.pipe.close()
    with pytest.raises(InvalidArgument, match="placement='v' with schedule='1f1b'"):
        mpidist.Pipeline(run.chunks[0], comm, 2, "1f1b", placement="v")
    with pytest.raises(InvalidArgument, match="max_live=2 .*schedule='auto'"):
        mpidist.Pipeline(run.chunks[0], comm, 2, "1f1b", max_live=2)
