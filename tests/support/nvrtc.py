"""CUDA's run-time compiler, which needs no GPU: what it makes of the source of a kernel."""

from __future__ import annotations

import ctypes
import os
from pathlib import Path

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


def source(kernel, dtype, arrays: int) -> str:
    """Give what cupy compiles of an elementwise kernel of so many arrays of a dtype."""
    from cupy._core import _kernel

    flat = _kernel._ArgInfo(1, dtype.type, dtype.type, 1, True, False)
    index = _kernel._ArgInfo(2, None, None, 1, True, False)
    types = _kernel._TypeMap((("T", dtype.type),))
    body = _kernel._get_elementwise_kernel_code(
        (*[flat] * arrays, index), types, kernel.params, kernel.operation, kernel.name,
        kernel.preamble,
    )  # fmt: skip
    return "".join(f"#include <cupy/{name}>\n" for name in HEADERS) + body


def compiled(text: str, options: tuple[str, ...] = ()) -> str:
    """Give the PTX of a source; RuntimeError with the compiler's words if it is wrong."""
    import cupy

    library = ctypes.CDLL(str(_found("lib/libnvrtc.so.*")[0]))
    own = os.path.join(os.path.dirname(cupy.__file__), "_core", "include")
    folders = [own, *_found("include")]
    given = [*options, *OPTIONS, "-arch=compute_70", *(f"-I{folder}" for folder in folders)]
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
