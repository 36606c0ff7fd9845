"""What the paths reach on a real GPU, printed; and what two of them must reach."""

import numpy as np
import pytest

from mpidist.bench.gpu import measure_copies, measure_paths
from mpidist.device.find import find_device
from tests.support import gpu_needed

pytestmark = gpu_needed.MARK

MIB = 1 << 20
SIZES = (4096, MIB, 64 * MIB, 256 * MIB)
IPC, STAGED = 0.6, 0.7  # of what copies alone would take


@pytest.mark.timeout(300)
def test_figures(comm, capsys):
    comm.use_gpu()
    copies = measure_copies(comm, 64 * MIB)
    rows = measure_paths(comm, ("allreduce",), SIZES, np.dtype("float32"), 10, copies)
    by_path = {r.path: r for r in rows if r.bytes == 64 * MIB and r.time_us}
    if comm.rank == 0:
        with capsys.disabled():
            print(f"\n{comm.size} ranks, {find_device().describe()}, {copies}")
            for row in rows:
                print(row.as_json())
            if "nccl" in by_path:
                for name, row in by_path.items():
                    print(f"{name}: {row.time_us / by_path['nccl'].time_us:.2f} x NCCL's time")
    assert all(row.correct for row in rows)
    assert by_path["staged"].of_copies >= STAGED
    if comm.size > 1:
        assert "ipc" in by_path, [row.why_not for row in rows if row.path == "ipc"]
        assert by_path["ipc"].of_copies >= IPC
