"""Arrays of other libraries: which packages they need, and that none is imported for nothing."""

import subprocess
import sys

import numpy as np
import pytest

import mpidist
from mpidist.calls.arrays import check_shape
from mpidist.errors import InvalidArgument
from tests.support.training_kits import NEEDS_TORCH, torch


def run(program):
    """Run a program in a fresh interpreter."""
    subprocess.run([sys.executable, "-c", program], check=True, timeout=200)


def test_torch_is_imported_by_the_user_only():
    run(
        "import sys, numpy, mpidist\n"
        "got = mpidist.run_simulated(2, lambda c: (c.allreduce(bytearray(2)), c.scatter([1, 2])))\n"
        "assert 'torch' not in sys.modules and got[1][1] == [2]\n"
    )


@pytest.mark.long
@pytest.mark.skipif(torch is None, reason=NEEDS_TORCH)
def test_bfloat16_without_its_package():
    run(
        "import sys, torch, mpidist\n"
        "sys.modules['ml_dtypes'] = None\n"
        "x = torch.ones(2, dtype=torch.bfloat16)\n"
        "def on_rank(comm):\n"
        "    try:\n"
        "        comm.allreduce(x)\n"
        "    except mpidist.UnsupportedDtype as error:\n"
        "        return str(error)\n"
        "for rank, said in enumerate(mpidist.run_simulated(2, on_rank)):\n"
        "    for word in (f'rank {rank}: x is', 'bfloat16', \"pip install ml_dtypes\"):\n"
        "        assert word in said, said\n"
    )


@pytest.mark.skipif(torch is None, reason=NEEDS_TORCH)
def test_scatter_of_a_tensor_gives_tensors():
    """Also where the other ranks give nothing, and learn from the root what it has."""

    def on_rank(comm):
        x = torch.arange(6).to(torch.bfloat16).view(3, 2)
        return comm.scatter(x if comm.rank == 1 else None, root=1)

    for rank, got in enumerate(mpidist.run_simulated(3, on_rank)):
        assert got.dtype is torch.bfloat16 and got.tolist() == [[2 * rank, 2 * rank + 1]]


def test_structured_arrays_and_matrices():
    """Subclasses are read and filled as arrays; what is given as `out` is returned."""
    record = np.rec.array([(1, 2.0), (3, 4.0)], dtype=[("a", "i4"), ("b", "f8")])

    def on_rank(comm):
        out = np.rec.array(np.zeros(4, record.dtype))
        assert comm.allgather(record, out=out) is out
        matrix = np.asmatrix(np.zeros((2, 2)))
        assert comm.allreduce(np.asmatrix(np.ones((2, 2))), out=matrix) is matrix
        return out.b.tolist(), matrix.tolist()

    for got in mpidist.run_simulated(2, on_rank):
        assert got == ([2.0, 4.0] * 2, [[2.0, 2.0]] * 2)


@pytest.mark.parametrize(
    "shape, dtype, fact",
    [
        ((1 << 62, 4), "uint8", "shape="),
        ((1 << 60, 0), "float64", "shape="),  # as numpy: also where there is no element
        ((1 << 61,), "(4,)i1", "shape="),
        ((1,) * 65, "uint8", "65"),
        ((2, -1), "uint8", r"shape=\(2, -1\)"),
        (2.5, "uint8", r"shape=2\.5"),
        (3, "int33", "dtype='int33'"),
        (3, object, "object"),
        (3, "S0", "dtype='S0'"),
    ],
)
def test_impossible_arrays(shape, dtype, fact):
    with pytest.raises(InvalidArgument, match=f"rank 3: .*{fact}"):
        check_shape(shape, dtype, 3)


def test_check_shape():
    assert check_shape(3, "uint8", 0) == ((3,), np.uint8)
    assert check_shape((), "f4", 0) == ((), np.float32)
    assert check_shape((np.int32(2), 0), "(4,5)f8", 0) == ((2, 0, 4, 5), np.float64)
    assert check_shape(((1 << 63) - 1,), "uint8", 0)[0] == ((1 << 63) - 1,)
