"""A CUDA device by cupy; it is imported here, and for NCCL in :mod:`mpidist.gpu.nccl`."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from functools import lru_cache
from typing import Any

import cupy
import cupyx
import numpy as np
from cupy.cuda import runtime

from ..errors import Unsupported

_AT_LEAST = 0  # CU_STREAM_WAIT_VALUE_GEQ
_COMBINES = {
    "sum": "a + b",
    "mean": "a + b",
    "prod": "a * b",
    "max": "(a != a || a >= b) ? a : b",  # as numpy: of NaN and of zeros, the first
    "min": "(a != a || a <= b) ? a : b",
    "and": "a & b",
    "or": "a | b",
    "xor": "a ^ b",
}
_REACHABLE = (2, 3)  # cudaMemoryTypeDevice, cudaMemoryTypeManaged


def why_not() -> str | None:
    """Say why there is no CUDA device, or give None."""
    try:
        count = runtime.getDeviceCount()
    except runtime.CUDARuntimeError as error:
        return f"there is no CUDA device: {error}"
    return None if count else "there is no CUDA device: the driver shows none"


class CudaEvent:
    """See :class:`~mpidist.device.base.Event`."""

    def __init__(self) -> None:
        self._event = cupy.cuda.Event(disable_timing=True)

    def record(self, stream: int) -> None:
        """Put the mark at the end of a stream."""
        runtime.eventRecord(self._event.ptr, stream)

    def synchronize(self) -> None:
        """Wait on the host."""
        self._event.synchronize()

    def done(self) -> bool:
        """Tell whether it is over."""
        return self._event.done

    def block(self, stream: int) -> None:
        """Have a stream wait."""
        runtime.streamWaitEvent(stream, self._event.ptr)


class CudaDevice:
    """See :class:`~mpidist.device.base.Device`; the one that is current when it is made."""

    name, emulated = "cuda", False

    def __init__(self) -> None:
        self.number = runtime.getDevice()
        self._properties = runtime.getDeviceProperties(self.number)
        self._streams: list[Any] = []

    def describe(self) -> str:
        """Give its number and name."""
        return f"GPU {self.number} ({self._properties['name'].decode()})"

    def identity(self) -> str:
        """Give the UUID, by which it is known whatever CUDA_VISIBLE_DEVICES says."""
        uuid = self._properties.get("uuid")
        return bytes(uuid).hex() if uuid else runtime.deviceGetPCIBusId(self.number)

    def owns(self, pointer: int) -> bool:
        """Ask the driver."""
        try:
            found = runtime.pointerGetAttributes(pointer)
        except runtime.CUDARuntimeError:
            return False
        return found.type in _REACHABLE and (found.type == 3 or found.device == self.number)

    def empty(self, shape: tuple[int, ...], dtype: np.dtype) -> Any:
        """Make a cupy array, from its memory pool."""
        return cupy.empty(shape, dtype)

    def pinned(self, nbytes: int) -> np.ndarray:
        """Give page-locked memory."""
        return cupyx.empty_pinned(nbytes, np.uint8)

    def current_stream(self) -> int:
        """Give cupy's current stream."""
        return cupy.cuda.get_current_stream().ptr

    def new_stream(self) -> int:
        """Make a stream that does not wait for the default one."""
        made = cupy.cuda.Stream(non_blocking=True)
        self._streams.append(made)
        return made.ptr

    def event(self) -> CudaEvent:
        """Make an event without a time."""
        return CudaEvent()

    def copy(self, target: int, source: int, nbytes: int, stream: int) -> None:
        """Queue a copy of any direction: the addresses tell which."""
        runtime.memcpyAsync(target, source, nbytes, runtime.memcpyDefault, stream)

    def synchronize(self, stream: int) -> None:
        """Wait on the host."""
        runtime.streamSynchronize(stream)

    def finish(self) -> None:
        """Wait for the whole device."""
        runtime.deviceSynchronize()

    # -- memory that several processes have open ------------------------------------------------

    def new_shared(self, nbytes: int) -> tuple[int, bytes]:
        """Allocate outside of any pool: a handle stands for a whole allocation."""
        pointer = runtime.malloc(nbytes)
        runtime.memset(pointer, 0, nbytes)
        runtime.deviceSynchronize()
        return pointer, runtime.ipcGetMemHandle(pointer)

    def open_shared(self, handle: bytes, nbytes: int) -> int:
        """Open by CUDA IPC."""
        try:
            return runtime.ipcOpenMemHandle(handle)
        except runtime.CUDARuntimeError as error:
            raise Unsupported(f"CUDA IPC: {error}") from None

    def close_shared(self, pointer: int) -> None:
        """Close by CUDA IPC."""
        runtime.ipcCloseMemHandle(pointer)

    def release_shared(self, pointer: int) -> None:
        """Free."""
        runtime.free(pointer)

    def wrap(self, pointer: int, shape: tuple[int, ...], dtype: np.dtype) -> Any:
        """Make a cupy array."""
        nbytes = int(np.prod(shape, dtype=np.int64)) * dtype.itemsize
        memory = cupy.cuda.UnownedMemory(pointer, max(nbytes, 1), None, self.number)
        return cupy.ndarray(shape, dtype, cupy.cuda.MemoryPointer(memory, 0))

    def write_word(self, pointer: int, value: int, stream: int) -> None:
        """Queue; the driver puts a memory barrier before the word."""
        _driver("cuStreamWriteValue32_v2", stream, pointer, value, 0)

    def wait_word(self, pointer: int, value: int, stream: int) -> None:
        """Queue; no kernel spins."""
        _driver("cuStreamWaitValue32_v2", stream, pointer, value, _AT_LEAST)

    def combines(self, dtype: np.dtype) -> bool:
        """Tell whether cupy has the dtype, in the machine's order of bytes."""
        return dtype.kind in "biufc" and dtype.isnative and dtype.char not in "gG"

    def combine(
        self,
        op: str,
        dtype: np.dtype,
        sources: Sequence[int],
        targets: Sequence[int],
        count: int,
        divisor: int,
        stream: int,
    ) -> None:
        """Launch one elementwise kernel, made once for the operation and the number of arrays."""
        kernel = _kernel(op, len(sources), len(targets), divisor)
        arrays = [self.wrap(pointer, (count,), dtype) for pointer in (*sources, *targets)]
        with cupy.cuda.ExternalStream(stream, self.number):
            kernel(*arrays)


@lru_cache(maxsize=64)
def _kernel(op: str, sources: int, targets: int, divisor: int) -> Any:
    """Make the kernel that folds s0, s1, … in this order and stores into t0, t1, …."""
    lines = ["T a = s0;"]
    for k in range(1, sources):
        lines.append(f"{{ T b = s{k}; a = {_COMBINES[op]}; }}")
    lines += [f"a = a / T({divisor});"] * (divisor > 1)
    lines += [f"t{k} = a;" for k in range(targets)]
    incoming = ", ".join(f"T s{k}" for k in range(sources))
    outgoing = ", ".join(f"T t{k}" for k in range(targets))
    return cupy.ElementwiseKernel(incoming, outgoing, " ".join(lines), f"mpidist_{op}")


def _driver(name: str, stream: int, pointer: int, value: int, flags: int) -> None:
    function = getattr(ctypes.CDLL("libcuda.so.1"), name)
    status = function(
        ctypes.c_void_p(stream),
        ctypes.c_uint64(pointer),
        ctypes.c_uint32(value),
        ctypes.c_uint(flags),
    )
    if status:
        raise Unsupported(f"{name}: the driver reports status {status}")
