"""CUDA devices, by cupy (which otherwise only :mod:`mpidist.gpu.nccl.backend` imports)."""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import lru_cache
from typing import Any, NamedTuple

import cupy
import cupyx
import numpy as np
from cupy.cuda import runtime

from ..errors import Unsupported
from .cuda_kernels import DIGEST_THREADS, HALVES, digest_kernel, fold, wait_word, write_word

_REACHABLE = (2, 3)  # cudaMemoryTypeDevice, cudaMemoryTypeManaged
_CAN_FLUSH = 98  # cudaDevAttrCanFlushRemoteWrites
_MPS = 133  # cudaDevAttrMpsEnabled
_NO_MEMORY = 2  # cudaErrorMemoryAllocation
_CAPTURE_IMPLICIT = 906  # cudaErrorStreamCaptureImplicit


def _identity(number: int) -> str:
    """Return the text ``UUID@bus``: a device's UUID and PCI bus id, which together are unique.

    cupy truncates a UUID at its first zero byte, and the partitions of a GPU share a bus id.
    """
    uuid = runtime.getDeviceProperties(number).get("uuid") or b""
    return f"{bytes(uuid)[:16].hex()}@{runtime.deviceGetPCIBusId(number)}"


def _allocate(nbytes: int) -> int:
    try:
        return runtime.malloc(nbytes)
    except runtime.CUDARuntimeError as error:
        if error.status != _NO_MEMORY:
            raise
    cupy.get_default_memory_pool().free_all_blocks()  # unused memory that cupy caches
    return runtime.malloc(nbytes)


def _wrapped(
    pointer: int, shape: tuple[int, ...], dtype: np.dtype, number: int, owner: Any = None
) -> Any:
    """Return a cupy array at an address of a device, which keeps the owner of the memory alive."""
    nbytes = math.prod(shape) * dtype.itemsize
    memory = cupy.cuda.UnownedMemory(pointer, max(nbytes, 1), owner, number)
    return cupy.ndarray(shape, dtype, cupy.cuda.MemoryPointer(memory, 0))


# For kernels, which take nothing but the address: a new array takes as long as to queue the kernel.
_cached = lru_cache(maxsize=4096)(_wrapped)


class _Stream(NamedTuple):
    """A stream, as cupy's kernels take it."""

    ptr: int


# Of all devices: one that is deleted with what waits for its streams must not destroy them first.
_streams: dict[int, Any] = {}


class CudaEvent:
    """A CUDA event; see :class:`~mpidist.device.base.Event`."""

    def __init__(self) -> None:
        self._event = cupy.cuda.Event(disable_timing=True)

    def record(self, stream: int) -> None:
        """Put the event's mark at the end of a stream, in place of any earlier one."""
        runtime.eventRecord(self._event.ptr, stream)

    def synchronize(self) -> None:
        """Wait on the host until the event is complete."""
        self._event.synchronize()

    def done(self) -> bool:
        """Return whether the event is complete."""
        return self._event.done

    def block(self, stream: int) -> None:
        """Make later work of a stream wait for the event."""
        runtime.streamWaitEvent(stream, self._event.ptr)


class CudaDevice:
    """A CUDA device, which becomes the current one; without a `number`, the current device."""

    name, emulated, nccl = "cuda", False, True

    def __init__(self, number: int | None = None) -> None:
        if number is not None:
            runtime.setDevice(number)
        self.number = runtime.getDevice()
        self._properties = runtime.getDeviceProperties(self.number)
        self._flushes = bool(runtime.deviceGetAttribute(_CAN_FLUSH, self.number))
        try:
            self.side_by_side = bool(runtime.deviceGetAttribute(_MPS, self.number))
        except runtime.CUDARuntimeError:  # before CUDA 12.3
            self.side_by_side = False

    @staticmethod
    def why_not() -> str | None:
        """Return why there is no CUDA device, or None if there is one."""
        try:
            count = runtime.getDeviceCount()
        except runtime.CUDARuntimeError as error:
            return f"there is no CUDA device: {error}"
        return None if count else "there is no CUDA device: the driver shows none"

    @staticmethod
    def identities() -> tuple[str, ...]:
        """Return the identity of each device that CUDA_VISIBLE_DEVICES shows, by number."""
        return tuple(_identity(k) for k in range(runtime.getDeviceCount()))

    @staticmethod
    def current() -> int:
        """Return the number of this thread's current device."""
        return runtime.getDevice()

    def describe(self) -> str:
        """Return the device's number and name."""
        return f"GPU {self.number} ({self._properties['name'].decode()})"

    def identity(self) -> str:
        """Return the text ``UUID@bus``, which does not depend on CUDA_VISIBLE_DEVICES."""
        return _identity(self.number)

    def enter(self) -> None:
        """Make this the current device of this thread."""
        runtime.setDevice(self.number)

    def is_current(self) -> bool:
        """Return whether this is the current device of this thread."""
        return runtime.getDevice() == self.number

    def owns(self, pointer: int) -> bool:
        """Return whether the driver knows an address as this device's or as managed memory."""
        try:
            found = runtime.pointerGetAttributes(pointer)
        except runtime.CUDARuntimeError:
            return False
        return found.type in _REACHABLE and (found.type == 3 or found.device == self.number)

    def empty(self, shape: tuple[int, ...], dtype: np.dtype) -> Any:
        """Return a new cupy array, from cupy's memory pool."""
        return cupy.empty(shape, dtype)

    def pinned(self, nbytes: int) -> np.ndarray:
        """Return `nbytes` bytes of page-locked host memory."""
        return cupyx.empty_pinned(nbytes, np.uint8)

    def page_lock(self, memory: np.ndarray) -> None:
        """Page-lock host memory, also memory that other processes map."""
        try:
            runtime.hostRegister(memory.__array_interface__["data"][0], memory.nbytes, 0)
        except runtime.CUDARuntimeError as error:
            raise Unsupported(f"cannot page-lock {memory.nbytes} bytes: {error}") from None

    def page_unlock(self, memory: np.ndarray) -> None:
        """Undo :meth:`page_lock`."""
        runtime.hostUnregister(memory.__array_interface__["data"][0])

    def current_stream(self) -> int:
        """Return cupy's current stream; 1 for the default one, as in the CUDA Array Interface."""
        return cupy.cuda.get_current_stream().ptr or runtime.streamLegacy

    def new_stream(self) -> int:
        """Return a new stream that does not synchronize with the default one."""
        made = cupy.cuda.Stream(non_blocking=True)
        _streams[made.ptr] = made
        return made.ptr

    def release_stream(self, stream: int) -> None:
        """Release a stream of :meth:`new_stream`, which cupy destroys with its last reference."""
        runtime.streamSynchronize(stream)
        del _streams[stream]

    def is_capturing(self, stream: int) -> bool:
        """Return whether a stream is captured into a CUDA graph, or its work would be an error.

        That is so for the default stream while another one is captured, and after an error in a
        capture until its end.
        """
        try:
            return bool(runtime.streamIsCapturing(stream))
        except RuntimeError as error:  # without a status after an error in the capture
            if getattr(error, "status", _CAPTURE_IMPLICIT) != _CAPTURE_IMPLICIT:
                raise
            return True

    def event(self) -> CudaEvent:
        """Return a new event, which does not record times."""
        return CudaEvent()

    def copy(self, target: int, source: int, nbytes: int, stream: int) -> None:
        """Queue a copy; the driver knows which of the addresses are on a GPU."""
        runtime.memcpyAsync(target, source, nbytes, runtime.memcpyDefault, stream)

    def synchronize(self, stream: int) -> None:
        """Wait on the host until all work of a stream is complete."""
        runtime.streamSynchronize(stream)

    def finish(self) -> None:
        """Wait on the host until all work of the device is complete."""
        runtime.deviceSynchronize()

    # -- memory that several processes share ----------------------------------------------------

    def new_shared(self, nbytes: int) -> tuple[int, bytes]:
        """Allocate memory, not from a pool: a handle of CUDA IPC is of a whole allocation."""
        pointer = 0
        try:
            pointer = _allocate(nbytes)
            runtime.memset(pointer, 0, nbytes)
            runtime.deviceSynchronize()
            return pointer, runtime.ipcGetMemHandle(pointer)
        except runtime.CUDARuntimeError as error:
            if pointer:
                runtime.free(pointer)
            raise Unsupported(f"cannot allocate {nbytes} bytes for CUDA IPC: {error}") from None

    def open_shared(self, handle: bytes, nbytes: int) -> int:
        """Open another process's memory by CUDA IPC and return its address here."""
        try:
            return runtime.ipcOpenMemHandle(handle)
        except runtime.CUDARuntimeError as error:
            raise Unsupported(f"cannot open memory by CUDA IPC: {error}") from None

    def close_shared(self, pointer: int) -> None:
        """Close memory opened by CUDA IPC."""
        runtime.ipcCloseMemHandle(pointer)

    def release_shared(self, pointer: int) -> None:
        """Free memory of :meth:`new_shared`."""
        runtime.free(pointer)

    def wrap(self, pointer: int, shape: tuple[int, ...], dtype: np.dtype, owner: Any) -> Any:
        """Return a cupy array that keeps the owner of its memory alive."""
        return _wrapped(pointer, shape, dtype, self.number, owner)

    def write_word(self, pointer: int, value: int, stream: int) -> None:
        """Queue the write of a 32-bit word; the driver puts a memory barrier before it."""
        write_word(pointer, value, stream)

    def wait_word(self, pointer: int, value: int, stream: int) -> None:
        """Queue a wait until a 32-bit word is at least `value`, without a spinning kernel."""
        wait_word(pointer, value, stream, self._flushes)

    def digest(self, pointer: int, nbytes: int, sums: int, stream: int) -> None:
        """Queue a kernel that reads the array in the largest words at which it is aligned."""
        size = next(size for size in (8, 4, 2, 1) if not (pointer | nbytes) % size)
        x = _wrapped(pointer, (nbytes // size,), np.dtype(f"u{size}"), self.number)
        target = _wrapped(sums, (4,), np.dtype(np.uint64), self.number)  # of a digest
        words = -(-nbytes // 8)
        threads = min(words, DIGEST_THREADS)
        digest_kernel()(x, x.size, words, threads, target, size=threads, stream=_Stream(stream))

    def combines(self, dtype: np.dtype) -> bool:
        """Return whether the dtype is bfloat16 or one that cupy has, and in native byte order."""
        known = dtype.name in HALVES or (dtype.kind in "biufc" and dtype.char not in "gG")
        return known and dtype.isnative

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
        """Queue a kernel, which is built once for each operation, divisor and number of arrays."""
        half = dtype.name if dtype.name in HALVES else ""
        kernel = fold(op, len(sources), len(targets), divisor, half)
        seen = np.dtype(np.uint16) if half == "bfloat16" else dtype  # the kernel takes its bits
        arrays = [_cached(pointer, (count,), seen, self.number) for pointer in (*sources, *targets)]
        kernel(*arrays, stream=_Stream(stream))
