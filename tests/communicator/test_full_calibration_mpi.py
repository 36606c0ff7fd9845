"""The full calibration under mpiexec: curves of what no schedule of messages serves."""

import pytest

from mpidist.communicator.full_calibration import KERNELS, calibrate_fully
from mpidist.schedule.contract import COLLECTIVES
from mpidist.selection.estimates import CROWDED, MEASURED
from tests.support.pretended import on_nodes


@pytest.mark.one_node
@pytest.mark.mpi(min_size=2)
def test_every_executor_of_every_collective_has_a_curve(comm):
    tuned = comm.split(0)
    found = calibrate_fully(tuned, 0.0)
    assert comm.allgather_object(found) == [found] * comm.size
    chosen, every = tuned.explain("allreduce", 48 << 10)
    rows = {one.name: one for one in every}
    if tuned.backend.crowded:
        assert found.kernels == found.ranks_per_node == ()
        assert {one.seconds for one in every} == {None} and rows["ring"].basis == CROWDED
        return
    for name in COLLECTIVES:
        curve = found.kernel("native", name)
        assert curve.sizes == ((0,) if name == "barrier" else KERNELS) and curve.seconds[0] > 0
    lines = [found.kernel(name, "allreduce") for name in ("native", "staged")]
    assert rows["native"].seconds == lines[0].at(48 << 10) > 0
    assert rows["staged"].seconds == lines[1].at(48 << 10) and rows["staged"].basis == MEASURED
    assert rows["ring"].seconds > found.messages.call
    symmetric = tuned.explain("allreduce", 48 << 10, memory="symmetric")[1]
    assert next(one.seconds for one in symmetric if one.name == "symmetric") > 0


@pytest.mark.one_node
@pytest.mark.mpi(min_size=3)
def test_several_nodes_have_no_curves(comm):
    nodes = on_nodes(comm, 2)
    assert calibrate_fully(nodes, 0.0).kernels == ()
    nodes.free()
