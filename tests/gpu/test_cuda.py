"""On a real GPU: mpiexec -n 1, 2 or 4 python -m pytest tests/gpu; skipped where there is none."""

import collective_cases as cases
import numpy as np
import pytest

from mpidist.device.find import why_no_device

cupy = pytest.importorskip("cupy", reason="needs a GPU")
if why_no_device() is not None:
    pytest.skip("needs a GPU", allow_module_level=True)

from gpu_cases import OnDevice  # noqa: E402

from mpidist.device.find import find_device  # noqa: E402
from mpidist.device.recognise import describe  # noqa: E402
from mpidist.errors import InvalidArgument  # noqa: E402


class OnGpu(OnDevice):
    """Arrays of cupy."""

    def __init__(self, comm, background=False):
        super().__init__(comm, background)
        self.device = cupy


@pytest.mark.parametrize("collective", list(cases.CHECKS))
def test_every_collective(comm, collective):
    for number, n in enumerate([*cases.lengths(comm.size), 3_000_017]):
        for in_place in (False, True):
            root = (number + in_place) % comm.size
            for background in (False, True):
                case = cases.CHECKS[collective]
                case(OnGpu(comm, background), "auto", n, "int64", root, in_place)


def test_on_a_stream_of_ones_own(comm):
    with cupy.cuda.Stream(non_blocking=True):
        x = cupy.zeros(5_000_000, "f4")
        x += comm.rank + 1
        comm.allreduce(x, out=x)
        x *= 2
        assert (x.get() == 2 * cases.total(comm.size)).all()


@pytest.mark.parametrize("dtype", ["float16", "float32", "float64", "complex64", "int64"])
def test_symmetric_memory(comm, dtype):
    """The bits of `direct` on the host; several ranks may share a GPU."""
    for n in (0, 1, comm.size + 1, 3_000_017):
        x = comm.empty(n, dtype, device="cuda")
        host = (np.random.default_rng(comm.rank).integers(0, 9, n)).astype(dtype)
        for op in ("sum", "prod"):
            x.set(host)
            assert comm.allreduce(x, op, out=x) is x
            assert x.get().tobytes() == comm.allreduce(host, op, algorithm="direct").tobytes()
        x.set(host)
        comm.broadcast(x, comm.size - 1)
        assert np.array_equal(x.get(), comm.broadcast(host, comm.size - 1))
        comm.free(x)


def test_what_is_refused(comm):
    x = cupy.zeros((4, 4))
    with pytest.raises(InvalidArgument, match="C-contiguous"):
        comm.allreduce(x[:, :2])
    with pytest.raises(InvalidArgument, match="host memory"):
        comm.allreduce(x, out=np.zeros((4, 4)))
    assert find_device().owns(describe(x, 0).pointer)


def test_tensors_of_torch(comm):
    torch = pytest.importorskip("torch", reason="needs PyTorch")
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        x = torch.full((1000,), comm.rank + 1.0, dtype=dtype, device="cuda")
        got = comm.allreduce(x)
        assert got.is_cuda and got.dtype == dtype
        assert (got.float().cpu() == cases.total(comm.size)).all()
