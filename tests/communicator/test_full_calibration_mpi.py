"""The full calibration under mpiexec: curves of what no schedule of messages serves."""

import numpy as np
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
@pytest.mark.mpi(min_size=2)
def test_the_library_between_nodes_has_curves_and_auto_goes_by_them(comm):
    nodes = on_nodes(comm, 1)
    if nodes.backend.crowded:
        assert calibrate_fully(nodes, 0.0).kernels == ()
        return
    found = calibrate_fully(nodes, 0.0)
    assert {name for name, _, _ in found.kernels} == {"native"}
    assert found.kernel("native", "allreduce").sizes == KERNELS[:-1], "16M takes long on a link"
    assert found.ranks_per_node == (1,) * comm.size and found.far is None
    for collective in ("allreduce", "broadcast", "reduce_scatter"):
        chosen, every = nodes.explain(collective, 1 << 16)
        assert chosen.why.startswith("cost model: ") and not chosen.missing
        assert next(one for one in every if one.name == "native").basis == MEASURED
    assert (nodes.allreduce(np.ones(1 << 12, np.float32)) == comm.size).all()
    nodes.free()


@pytest.mark.one_node
@pytest.mark.mpi(min_size=2)
def test_auto_by_the_calibration_serves_every_collective_alike_on_all_ranks(comm):
    tuned = comm.split(0)
    known = calibrate_fully(tuned, 0.0, 1 << 14)
    rank, size = tuned.rank, tuned.size
    for count in (size, 4096 * size):
        for x in (np.empty(count, np.float32), tuned.empty(count, np.float32)):
            x[:] = rank
            total = size * (size - 1) / 2
            assert (tuned.allreduce(x) == total).all()
            assert (tuned.iallreduce(x).wait() == total).all()
            assert (tuned.reduce_scatter(x) == total).all()
            assert (tuned.allgather(x) == np.repeat(np.arange(size), count)).all()
            assert (tuned.alltoall(x) == np.repeat(np.arange(size), count // size)).all()
            assert (tuned.scan(x) == rank * (rank + 1) / 2).all()
            assert (tuned.broadcast(x, root=size - 1) == size - 1).all()
    tuned.barrier()
    chosen = [tuned.explain(name, 1 << 14)[0] for name in COLLECTIVES if name != "barrier"]
    assert all(one.why.startswith("cost model: ") for one in chosen) == bool(known.kernels)
    assert len(set(comm.allgather_object(tuple(one.name for one in chosen)))) == 1
    assert not any(one.untried for one in chosen) or not known.kernels
    tuned.free()
