"""What calls cupy, as far as it goes without a GPU: kernels are compiled, errors are ours."""

import numpy as np
import pytest

from mpidist.errors import Unsupported
from mpidist.operations import OPS, kind_of
from tests.support import nvrtc

cupy = pytest.importorskip("cupy", reason="needs cupy: pip install cupy-cuda12x")

DTYPES = ("int8", "uint16", "int64", "float16", "float32", "float64", "complex64", "complex128")
WHY_NOT = nvrtc.why_not()
needs_compiler = pytest.mark.skipif(WHY_NOT is not None, reason=f"needs CUDA's compiler: {WHY_NOT}")


@needs_compiler
@pytest.mark.parametrize("op", OPS)
def test_kernels_compile(op):
    """Each operation of each dtype, as cupy has it compiled, and with numpy's way of rounding."""
    from mpidist.device.cuda_kernels import fold

    kernel = fold(op, 3, 2, 3 if op == "mean" else 1)
    for dtype in map(np.dtype, (*DTYPES, "bool")):
        if kind_of(dtype) in OPS[op].kinds:
            ptx = nvrtc.compiled(nvrtc.source(kernel, dtype, 5), kernel.kwargs["options"])
            assert ptx.count("ld.global") == 3 and ptx.count("st.global") == 2
            assert "fma." not in ptx, dtype
            if dtype != "float16":  # whose subnormal numbers are normal ones of 32 bits
                assert ".ftz" not in ptx.replace("setp.nan.ftz", ""), dtype


@needs_compiler
def test_as_many_ranks_as_one_kernel_serves():
    """Its arguments are an array in and one out of each rank, and there is room for 4 KiB."""
    from mpidist.device.cuda_kernels import fold
    from mpidist.gpu.paths import IPC_RANKS

    nvrtc.compiled(
        nvrtc.source(fold("sum", IPC_RANKS, IPC_RANKS, 1), np.dtype("f4"), 2 * IPC_RANKS)
    )


def test_errors_of_the_driver_are_ours():
    """Were they cupy's, the other ranks would wait for one that could not allocate."""
    if cupy.cuda.is_available():
        pytest.skip("needs a machine without a GPU")
    from mpidist.device.cuda import CudaDevice

    assert "there is no CUDA device: cudaError" in CudaDevice.why_not()
    device = object.__new__(CudaDevice)
    with pytest.raises(Unsupported, match="4096 bytes for CUDA IPC: cudaErrorInsuff"):
        device.new_shared(4096)
    with pytest.raises(Unsupported, match="CUDA IPC: cudaErrorInsuff"):
        device.open_shared(bytes(64), 4096)
    with pytest.raises(Unsupported, match="the CUDA driver has no cuStreamWriteValue32_v2"):
        device.write_word(0, 1, 0)
