"""The trace of a step, and the counts of activations alive."""

from types import SimpleNamespace

import pytest

from mpidist.errors import InvalidArgument
from mpidist.pipeline import stats
from mpidist.pipeline.schedules import B, F, Placement, Span
from mpidist.pipeline.stats import LastStep, record
from tests.support.pipeline_kits import KITS, Run


@pytest.mark.parametrize("origin", (0.0, 5000.0))
def test_record_aligns_the_clocks_of_nodes(tmp_path, monkeypatch, origin):
    """All times are rank 0's; `origin` is how far the clock of rank 1's node is ahead."""
    monkeypatch.setattr(stats, "clock_offset", lambda comm: (0.0, 0.0))  # of rank 0
    first = (Span(F(0), 90.0, 91.0), Span(B(0), 94.0, 95.0))
    second = (Span(F(0), origin + 91.5, origin + 92.0), Span(B(0), origin + 92.0, origin + 93.5))
    last = LastStep(SimpleNamespace(name="gpipe", placement=Placement(2, 1, "loop")), first, 1, 1)
    comm = SimpleNamespace(
        rank=0,
        name="mpi",
        allgather_object=lambda mine: [mine, (origin, second, 1, "node")],
        broadcast_object=lambda value: value,
    )
    trace = record(comm, last, 1, tmp_path / "run.json")
    begins = [[span.begin for span in part] for part in trace.measured.spans]
    assert begins == [[0.0, 4.0], [1.5, 2.0]]
    assert '"rank 1 (node)"' in (tmp_path / "run.json").read_text()  # the host of each rank


@pytest.mark.ranks(2, 4)
@pytest.mark.mpi(min_size=2)
@pytest.mark.parametrize("kit", KITS)
def test_peak_live_is_what_1f1b_promises(comm, kit):
    for microbatches in (1, 2, 8):
        run = Run(comm, kit, "1f1b", microbatches, 16)
        run.step()
        stats = run.pipe.stats()
        assert stats.peak_live == min(comm.size - comm.rank, microbatches)
        with pytest.raises(InvalidArgument, match=r"rank 0: trace\('/none/a\.json'\)"):
            run.pipe.trace("/none/a.json")
        run.pipe.close()
