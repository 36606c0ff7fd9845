"""What calls cupy, as far as it goes without a GPU: kernels are compiled, errors are ours."""

from __future__ import annotations

import ctypes
import os
from pathlib import Path

import ml_dtypes  # noqa: F401, so that numpy knows bfloat16
import numpy as np
import pytest

from mpidist.errors import Unsupported
from mpidist.operations import OPS, kind_of

HEADERS = "complex.cuh", "carray.cuh", "atomics.cuh", "math_constants.h"  # as cupy includes them
OPTIONS = "--std=c++17", "--device-as-default-execution-space", "-ftz=true"  # as cupy gives them


def why_not() -> str | None:
    """Say what is missing, or nothing."""
    try:
        import cupy  # noqa: F401
        import nvidia  # noqa: F401
    except ImportError as error:
        return str(error)
    if not _found("lib/libnvrtc.so.*") or not _found("include/cuda_fp16.h"):
        return "no libnvrtc, or no headers of CUDA, are beside this Python"
    return None


def _found(name: str) -> list[Path]:
    """List files of NVIDIA's wheels."""
    import nvidia

    return [path for root in nvidia.__path__ for path in sorted(Path(root).glob(f"*/{name}"))]


def source(kernel, dtype) -> str:
    """Give what cupy compiles of an elementwise kernel whose arrays T have a dtype."""
    from cupy._core import _kernel

    infos = []
    for param in kernel.params[:-1]:  # without the index
        kind = {"T": dtype.type, "long long": np.int64, "unsigned long long": np.uint64}[
            param.ctype
        ]
        what = 1 if param.raw or param.ctype == "T" else 3  # an array, or a scalar
        infos.append(_kernel._ArgInfo(what, kind, kind, 1, True, False))
    index = _kernel._ArgInfo(2, None, None, 1, True, False)
    types = _kernel._TypeMap((("T", dtype.type),))
    body = _kernel._get_elementwise_kernel_code(
        (*infos, index), types, kernel.params, kernel.operation, kernel.name,
        kernel.preamble,
    )  # fmt: skip
    return "".join(f"#include <cupy/{name}>\n" for name in HEADERS) + body


def compiled(text: str, options: tuple[str, ...] = ()) -> str:
    """Give the PTX of a source; RuntimeError with the compiler's words if it is wrong."""
    import cupy

    for builtins in _found("lib/libnvrtc-builtins.so.*"):  # which it looks for by its name alone
        ctypes.CDLL(str(builtins))
    library = ctypes.CDLL(str(_found("lib/libnvrtc.so.*")[0]))
    own = os.path.join(os.path.dirname(cupy.__file__), "_core", "include")
    folders = [own, *Path(own, "cupy", "_cccl").glob("*/"), *_found("include")]
    given = [*options, *OPTIONS, "-arch=compute_75", *(f"-I{folder}" for folder in folders)]
    program = ctypes.c_void_p()
    status = library.nvrtcCreateProgram(
        ctypes.byref(program), text.encode(), b"kernel.cu", 0, None, None
    )
    assert status == 0
    array = (ctypes.c_char_p * len(given))(*(option.encode() for option in given))
    if library.nvrtcCompileProgram(program, len(given), array):
        raise RuntimeError(_text(library, "ProgramLog", program))
    return _text(library, "PTX", program)


def _text(library, what: str, program) -> str:
    size = ctypes.c_size_t()
    getattr(library, f"nvrtcGet{what}Size")(program, ctypes.byref(size))
    text = ctypes.create_string_buffer(size.value)
    getattr(library, f"nvrtcGet{what}")(program, text)
    return text.value.decode()


cupy = pytest.importorskip("cupy", reason="needs cupy: pip install cupy-cuda12x")

DTYPES = ("int8", "uint16", "int64", "float16", "float32", "float64", "complex64", "complex128")
WHY_NOT = why_not()
needs_compiler = pytest.mark.skipif(WHY_NOT is not None, reason=f"needs CUDA's compiler: {WHY_NOT}")


@needs_compiler
@pytest.mark.parametrize("op", [name for name, op in OPS.items() if op.builtin])
def test_kernels_compile(op):
    """Each operation of each dtype, as cupy has it compiled, and with numpy's way of rounding."""
    from mpidist.device.cuda_kernels import HALVES, fold

    for dtype in map(np.dtype, (*DTYPES, "bool", "bfloat16")):
        if kind_of(dtype) in OPS[op].kinds:
            half = dtype.name if dtype.name in HALVES else ""
            kernel = fold(op, 3, 2, 3 if op == "mean" else 1, half)
            seen = np.dtype("uint16") if half == "bfloat16" else dtype
            ptx = compiled(source(kernel, seen), kernel.kwargs["options"])
            assert ptx.count("ld.global") == 3 and ptx.count("st.global") == 2
            assert "fma." not in ptx, dtype
            if dtype != "float16":  # whose subnormal numbers are normal ones of 32 bits
                assert ".ftz" not in ptx.replace("setp.nan.ftz", ""), dtype


@needs_compiler
@pytest.mark.parametrize("size", [1, 2, 4, 8])
def test_kernel_of_digests_compiles(size):
    from mpidist.device.cuda_kernels import digest_kernel
    from mpidist.shared_memory.digest import SUMS

    kernel = digest_kernel()
    ptx = compiled(source(kernel, np.dtype(f"u{size}")))
    assert f"ld.global.u{8 * size}" in ptx and ptx.count(".global.add.u64") == SUMS


def test_dtypes_of_kernels():
    """Others would break a call that has begun; a name says nothing about the byte order."""
    from mpidist.device.cuda import CudaDevice

    combines = object.__new__(CudaDevice).combines
    assert all(combines(np.dtype(name)) for name in (*DTYPES, "bool", "bfloat16"))
    without = ">f2", ">f4", "float8_e4m3fn", "longdouble", "S2", "M8[s]"
    assert not any(combines(np.dtype(name)) for name in without)


@needs_compiler
def test_as_many_ranks_as_one_kernel_serves():
    """Its arguments are an array in and one out of each rank, and there is room for 4 KiB."""
    from mpidist.device.cuda_kernels import fold
    from mpidist.gpu.executors import IPC_RANKS

    compiled(source(fold("sum", IPC_RANKS, IPC_RANKS, 1), np.dtype("f4")))


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
    with pytest.raises(Unsupported, match="CUDA driver.* has no cuStreamWriteValue32_v2"):
        device.write_word(0, 1, 0)
