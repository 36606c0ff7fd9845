"""The trace of a step: clocks of several nodes."""

from types import SimpleNamespace

import pytest

from mpidist.pipeline.schedules import B, F, Placement, Span
from mpidist.pipeline.stats import LastStep, record


@pytest.mark.parametrize("nodes", (1, 2))
def test_record_aligns_the_clocks_of_nodes(tmp_path, nodes):
    """Between nodes the end of a barrier is the same moment; on one node the clock is one."""
    origin = 5000.0 * (nodes - 1)  # how far rank 1's clock is ahead
    first = (Span(F(0), 90.0, 91.0), Span(B(0), 94.0, 95.0))
    second = (Span(F(0), origin + 91.5, origin + 92.0), Span(B(0), origin + 92.0, origin + 93.5))
    last = LastStep(SimpleNamespace(name="gpipe", placement=Placement(2, 1, "loop")), first, 1, 1)
    comm = SimpleNamespace(
        rank=0,
        topology=SimpleNamespace(num_nodes=nodes),
        barrier=lambda: None,
        allgather_object=lambda mine: [(100.0, first, 1), (origin + 100.0, second, 1)],
        broadcast_object=lambda value: value,
    )
    trace = record(comm, last, 1, tmp_path / "run.json")
    begins = [[span.begin for span in part] for part in trace.measured.spans]
    assert begins == [[0.0, 4.0], [1.5, 2.0]]
