"""What the executors reach on a real GPU, printed; and what two of them must reach."""

import numpy as np
import pytest

from mpidist.bench.gpu import measure_copies, measure_executors
from mpidist.device.find import find_device
from tests.support.gpu_kits import NEEDS_GPU

pytestmark = NEEDS_GPU

MIB = 1 << 20
SIZES = (4096, MIB, 64 * MIB, 256 * MIB)
GOALS = {"ipc": 0.6, "staged": 0.7}  # of what copies alone would take, for 64 MiB
LEAST = {"ipc": 0.1, "staged": 0.3}  # an H100 and an H200 had 0.14 to 0.21, and 0.37 to 0.55


@pytest.mark.timeout(300)
def test_figures(comm, capsys):
    comm.use_gpu()
    copies = measure_copies(comm, 64 * MIB)
    results = measure_executors(comm, ("allreduce",), SIZES, np.dtype("float32"), 10, copies)
    by_name = {row.candidate: row for row in results.rows if row.bytes == 64 * MIB}
    if comm.rank == 0:
        with capsys.disabled():
            print(f"\n{comm.size} ranks, {find_device().describe()}, {copies}")
            for row in (*results.rows, *results.unsupported):
                print(row)
            if "nccl" in by_name:
                for name, row in by_name.items():
                    print(f"{name}: {row.time_us / by_name['nccl'].time_us:.2f} x NCCL's time")
    assert results.correct
    wanted = ("ipc", "staged") if comm.size > 1 else ("staged",)
    assert set(wanted) <= set(by_name), [r.reason for r in results.unsupported]
    reached = {name: by_name[name].figures["of_copies"] for name in wanted}
    assert all(share >= LEAST[name] for name, share in reached.items()), reached
    short = [name for name, share in reached.items() if share < GOALS[name]]
    if short:  # so that the goal stays in sight
        pytest.xfail(f"short of its goal: {', '.join(short)}")
