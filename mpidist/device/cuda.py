"""A CUDA device by cupy; it is imported here, and for NCCL in :mod:`mpidist.gpu.nccl.backend`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import cupy
import cupyx
import numpy as np
from cupy.cuda import runtime

from ..errors import Unsupported
from .cuda_kernels import fold, wait_word, write_word

_REACHABLE = (2, 3)  # cudaMemoryTypeDevice, cudaMemoryTypeManaged
_CAN_FLUSH = 98  # cudaDevAttrCanFlushRemoteWrites
_NO_MEMORY = 2  # cudaErrorMemoryAllocation


def current() -> int:
    """Give the number of the current device."""
    return runtime.getDevice()


def identities() -> tuple[str, ...]:
    """Give the UUIDs of the devices that CUDA_VISIBLE_DEVICES leaves, by their numbers."""
    return tuple(_identity(k) for k in range(runtime.getDeviceCount()))


def _identity(number: int) -> str:
    """Give UUID and place: cupy ends a UUID at its first byte of zero, and parts share a place."""
    uuid = runtime.getDeviceProperties(number).get("uuid") or b""
    return f"{bytes(uuid)[:16].hex()}@{runtime.deviceGetPCIBusId(number)}"


def why_not() -> str | None:
    """Say why there is no CUDA device, or give None."""
    try:
        count = runtime.getDeviceCount()
    except runtime.CUDARuntimeError as error:
        return f"there is no CUDA device: {error}"
    return None if count else "there is no CUDA device: the driver shows none"


def _allocate(nbytes: int) -> int:
    try:
        return runtime.malloc(nbytes)
    except runtime.CUDARuntimeError as error:
        if error.status != _NO_MEMORY:
            raise
    cupy.get_default_memory_pool().free_all_blocks()  # what cupy keeps and nobody uses
    return runtime.malloc(nbytes)


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
    """See :class:`~mpidist.device.base.Device`.

    Parameters
    ----------
    number : int, optional
        Which becomes the current one; by default the one that is current.
    """

    name, emulated = "cuda", False

    def __init__(self, number: int | None = None) -> None:
        if number is not None:
            runtime.setDevice(number)
        self.number = runtime.getDevice()
        self._properties = runtime.getDeviceProperties(self.number)
        self._flushes = bool(runtime.deviceGetAttribute(_CAN_FLUSH, self.number))
        self._streams: list[Any] = []

    def describe(self) -> str:
        """Give its number and name."""
        return f"GPU {self.number} ({self._properties['name'].decode()})"

    def identity(self) -> str:
        """Give the UUID, by which it is known whatever CUDA_VISIBLE_DEVICES says."""
        return _identity(self.number)

    def enter(self) -> None:
        """Make it the current device of this thread."""
        runtime.setDevice(self.number)

    def is_current(self) -> bool:
        """Ask the runtime."""
        return runtime.getDevice() == self.number

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
        """Give cupy's current stream; the default one by the name it has in arrays' interface."""
        return cupy.cuda.get_current_stream().ptr or runtime.streamLegacy

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
        pointer = 0
        try:
            pointer = _allocate(nbytes)
            runtime.memset(pointer, 0, nbytes)
            runtime.deviceSynchronize()
            return pointer, runtime.ipcGetMemHandle(pointer)
        except runtime.CUDARuntimeError as error:
            if pointer:
                runtime.free(pointer)
            raise Unsupported(f"{nbytes} bytes for CUDA IPC: {error}") from None

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
        write_word(pointer, value, stream)

    def wait_word(self, pointer: int, value: int, stream: int) -> None:
        """Queue; no kernel spins."""
        wait_word(pointer, value, stream, self._flushes)

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
        kernel = fold(op, len(sources), len(targets), divisor)
        arrays = [self.wrap(pointer, (count,), dtype) for pointer in (*sources, *targets)]
        with cupy.cuda.ExternalStream(stream, self.number):
            kernel(*arrays)
