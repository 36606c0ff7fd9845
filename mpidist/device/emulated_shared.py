"""Memory that several emulated devices share, as GPUs do by CUDA IPC, and what is done in it."""

from __future__ import annotations

import ctypes
import mmap
import os
import time
from collections.abc import Callable, Iterable, Sequence

import numpy as np

from ..errors import Unsupported
from ..operations import OPS, accumulator, division, is_half, narrow, widen

PATIENCE = 60.0  # seconds; a GPU would wait for ever


class Shared:
    """What :class:`~mpidist.device.base.Device` asks for, with numpy in place of kernels."""

    launch: Callable[[Callable[[], object], int], None]
    holders: Callable[[Iterable[int]], list[np.ndarray]]

    def __init__(self) -> None:
        self._mapped: dict[int, tuple[mmap.mmap, int, int]] = {}  # with its file, if it is ours

    def shared_extents(self) -> list[tuple[int, int]]:
        """Give where shared memory begins, and how long it is."""
        return [(start, length) for start, (_, length, _) in self._mapped.items()]

    def new_shared(self, nbytes: int) -> tuple[int, bytes]:
        """Map an anonymous file, which others find by its number in this process."""
        file = os.memfd_create("mpidist-emulated-device")
        os.ftruncate(file, nbytes)
        return self._map(file, nbytes, file), f"/proc/{os.getpid()}/fd/{file}".encode()

    def open_shared(self, handle: bytes, nbytes: int) -> int:
        """Map another process's file."""
        try:
            file = os.open(handle, os.O_RDWR)
        except OSError as error:
            raise Unsupported(f"memory of another process cannot be opened: {error}") from None
        try:
            return self._map(file, nbytes, -1)
        finally:
            os.close(file)

    def _map(self, file: int, nbytes: int, ours: int) -> int:
        mapping = mmap.mmap(file, nbytes)
        start = ctypes.addressof(ctypes.c_char.from_buffer(mapping))
        self._mapped[start] = (mapping, nbytes, ours)
        return start

    def close_shared(self, pointer: int) -> None:
        """Forget a mapping; it goes with the last view of it."""
        del self._mapped[pointer]

    def release_shared(self, pointer: int) -> None:
        """Close our file."""
        os.close(self._mapped.pop(pointer)[2])

    def view(self, pointer: int, count: int, dtype: np.dtype) -> np.ndarray:
        """Give the elements at an address."""
        if not count:
            return np.empty(0, dtype)
        memory = (ctypes.c_char * (count * dtype.itemsize)).from_address(pointer)
        return np.ndarray((count,), dtype, memory)  # type: ignore[arg-type]

    def combines(self, dtype: np.dtype) -> bool:
        """Tell whether there is arithmetic for a dtype: numpy has it for all."""
        return True

    def write_word(self, pointer: int, value: int, stream: int) -> None:
        """Queue that a word of 32 bits is written."""
        self.launch(lambda: setattr(_word(pointer), "value", value), stream)

    def wait_word(self, pointer: int, value: int, stream: int) -> None:
        """Queue a wait until a word has reached a value, counting round as the hardware does."""

        def wait() -> None:
            word, end = _word(pointer), time.monotonic() + PATIENCE
            while (word.value - value) % (1 << 32) >= 1 << 31:
                os.sched_yield()
                if time.monotonic() > end:
                    raise TimeoutError(f"a word at {pointer:#x} stays at {word.value} < {value}")

        self.launch(wait, stream)

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
        """Queue that the sources are combined, in their order, and stored in all targets."""
        held = self.holders((*sources, *targets))

        def run() -> None:
            assert held is not None
            views = [self.view(pointer, count, dtype) for pointer in sources]
            wide = accumulator(OPS[op], dtype)
            total, other = np.empty(count, wide), np.empty(count, wide)
            first = divisor if is_half(dtype) else 0  # what each source is divided by
            for number, view in enumerate(views):
                widen(view, other if number else total, first)
                if number:
                    OPS[op].function(total, other, out=total)
            if divisor > 1 and not first:
                division(total, divisor)()
            for pointer in targets:
                narrow(total, self.view(pointer, count, dtype))

        self.launch(run, stream)


def _word(pointer: int) -> ctypes.c_uint32:
    return ctypes.c_uint32.from_address(pointer)
