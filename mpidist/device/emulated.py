"""A device emulated in host memory, by which the code for GPUs runs where there is none.

It is for tests, and never chosen unless ``MPIDIST_GPU_DEVICE=host`` asks for it.  Its streams are
lazy: what is queued is done when someone waits for it, and no sooner.  So whoever relies on a copy
for which nobody waited sees it missing, every time, where on a GPU that would be luck.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import time
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import takewhile
from typing import Any

import numpy as np
from numpy.lib.mixins import NDArrayOperatorsMixin

from ..errors import InvalidArgument, Unsupported
from ..operations import OPS, accumulator, division, is_half, narrow, widen

Action = Callable[[], object]


class Stream:
    """What is queued, in order."""

    def __init__(self) -> None:
        self._queue: deque[Action] = deque()
        self.queued = self.done = 0

    def put(self, action: Action) -> None:
        """Queue an action."""
        self._queue.append(action)
        self.queued += 1

    def run(self, until: int) -> None:
        """Do what was queued, up to that number of actions since the beginning."""
        while self.done < until:
            action = self._queue.popleft()
            self.done += 1
            action()


class EmulatedEvent:
    """See :class:`~mpidist.device.base.Event`."""

    def __init__(self, streams: dict[int, Stream]):
        self._streams = streams
        self._mark: tuple[Stream, int] | None = None

    def record(self, stream: int) -> None:
        """Remember how much is queued."""
        found = self._streams[stream]
        self._mark = (found, found.queued)

    def synchronize(self) -> None:
        """Do what was queued before."""
        if self._mark is not None:
            self._mark[0].run(self._mark[1])

    def done(self) -> bool:
        """Tell whether it was done; asking does it, or no one who only asks would see an end."""
        self.synchronize()
        return True

    def block(self, stream: int) -> None:
        """Queue on a stream that the other one is brought forward so far."""
        if self._mark is not None:
            marked, until = self._mark
            self._streams[stream].put(lambda: marked.run(until))


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


class EmulatedArray(NDArrayOperatorsMixin):
    """An array in the emulated device's memory, as a GPU library would give it.

    Arithmetic is queued on the current stream, and done when someone waits for that.  As with
    cupy, nothing becomes host memory unless :meth:`get` is called, and host arrays do not mix in.

    Parameters
    ----------
    memory : ndarray
        Where it lies.
    device : EmulatedDevice
        Whose memory that is.
    """

    def __init__(self, memory: np.ndarray, device: EmulatedDevice):
        self._memory, self.device = memory, device
        self.shape, self.dtype, self.size = memory.shape, memory.dtype, memory.size
        self.ndim, self.nbytes, self.itemsize = memory.ndim, memory.nbytes, memory.itemsize

    @property
    def __cuda_array_interface__(self) -> dict[str, Any]:
        told = self._memory.__array_interface__
        return {
            "shape": self.shape,
            "typestr": self.dtype.str,
            "data": told["data"],
            "strides": told["strides"],
            "stream": self.device.current_stream(),
            "version": 3,
        }

    def get(self) -> np.ndarray:
        """Wait for the current stream and give a copy on the host."""
        self.device.synchronize(self.device.current_stream())
        return self._memory.copy()

    def set(self, values: Any) -> None:
        """Queue on the current stream that the array takes these values."""
        kept = np.array(values, self.dtype)
        self._launch(lambda: np.copyto(self._memory, kept))

    # -- as cupy's ------------------------------------------------------------------------------

    def __array__(self, *arguments: Any, **options: Any) -> Any:
        raise TypeError("an array of the emulated device is not on the host: call get()")

    def __array_ufunc__(self, ufunc: Any, method: str, *inputs: Any, **options: Any) -> Any:
        out = options.pop("out", None)
        function = getattr(ufunc, method)
        if out is None:
            return self._make(lambda *x: function(*x, **options), *inputs)
        operands, target = [_memory(x) for x in inputs], out[0]
        self._launch(lambda: function(*operands, out=target._memory, **options))
        return target

    def __array_function__(self, function: Any, types: Any, arguments: Any, options: Any) -> Any:
        if function is not np.zeros_like:
            return NotImplemented
        like, *rest = arguments
        made = np.zeros_like(like._memory, *rest, **options)
        return self.device.array(made)

    def __getitem__(self, key: Any) -> EmulatedArray:
        return EmulatedArray(self._memory[key], self.device)

    def __setitem__(self, key: Any, value: Any) -> None:
        source, target = _memory(value), self._memory
        self._launch(lambda: target.__setitem__(key, source))

    def __len__(self) -> int:
        return len(self._memory)

    def __float__(self) -> float:
        return float(self.get())

    @property
    def T(self) -> EmulatedArray:
        """The transposed view."""
        return EmulatedArray(self._memory.T, self.device)

    def reshape(self, *shape: Any) -> EmulatedArray:
        """Give the same memory in another shape."""
        return EmulatedArray(self._memory.reshape(*shape), self.device)

    def view(self, dtype: Any) -> EmulatedArray:
        """Give the same memory as elements of another dtype."""
        return EmulatedArray(self._memory.view(dtype), self.device)

    def sum(self, axis: Any = None, dtype: Any = None) -> EmulatedArray:
        """Add the elements up."""
        return self._make(lambda x: x.sum(axis=axis, dtype=dtype), self)

    def astype(self, dtype: Any) -> EmulatedArray:
        """Give a copy of another dtype."""
        return self._make(lambda x: x.astype(dtype), self)

    def copy(self, order: str = "C") -> EmulatedArray:
        """Give a copy."""
        return self.astype(self.dtype)

    @property
    def flags(self) -> Any:
        """Those of the memory."""
        return self._memory.flags

    def _make(self, function: Callable[..., Any], *inputs: Any) -> EmulatedArray:
        """Queue that a new array takes what `function` gives by then; its shape is known now."""
        operands = [_memory(x) for x in inputs]
        with np.errstate(all="ignore"):
            like = np.asarray(function(*operands))
        made = self.device.empty(like.shape, like.dtype)
        self._launch(lambda: np.copyto(made._memory, function(*operands)))
        return made

    def _launch(self, action: Callable[[], object]) -> None:
        self.device.launch(action, self.device.current_stream())


def _memory(x: Any) -> Any:
    """Give the memory of an operand; scalars are taken as they are."""
    if isinstance(x, EmulatedArray):
        return x._memory
    if isinstance(x, np.ndarray) and x.ndim:
        raise TypeError("an array of the host and one of the emulated device do not mix")
    return x


VARIABLE = "MPIDIST_GPU_DEVICE"


def emulated_devices(environ: Mapping[str, str] = os.environ) -> tuple[str, ...]:
    """Give the UUIDs of the devices that ``host:4`` asks for, as CUDA_VISIBLE_DEVICES leaves them.

    Without a number there is one for each process.
    """
    count = environ.get(VARIABLE, "").partition(":")[2]
    if not count:
        return (f"emulated-{os.getpid()}",)
    numbers = shown(environ)
    every = [str(k) for k in range(int(count))] if numbers is None else numbers.split(",")
    known = takewhile(lambda k: k.strip().isdigit() and int(k) < int(count), every)
    return tuple(f"emulated-{int(k)}" for k in known)


def shown(environ: Mapping[str, str]) -> str | None:
    """Give the numbers of the devices that are shown to this process; None for all.

    As for CUDA, the first that there is not ends the list.
    """
    return environ.get("CUDA_VISIBLE_DEVICES")


class EmulatedDevice(Shared):
    """See :class:`~mpidist.device.base.Device`.

    Attributes
    ----------
    copied : int
        Bytes whose copying was queued: for tests of what goes where.
    """

    name, emulated = "host", True

    def __init__(self, number: int | None = None) -> None:
        self.number = number or 0
        self._several = emulated_devices() if ":" in os.environ.get(VARIABLE, "") else None
        self._streams: dict[int, Stream] = {0: Stream()}
        super().__init__()
        self._current = 0
        self._extents: dict[int, int] = {}
        self._memories: weakref.WeakValueDictionary[int, np.ndarray] = weakref.WeakValueDictionary()
        self.copied = 0

    def describe(self) -> str:
        """Say that it is none."""
        return "the device emulated in host memory"

    def identity(self) -> str:
        """Give every process a device of its own, unless there is to be a number of them."""
        return self._several[self.number] if self._several else f"emulated-{os.getpid()}"

    def enter(self) -> None:
        """Do nothing: a thread has no other."""

    def is_current(self) -> bool:
        """Say so."""
        return True

    def owns(self, pointer: int) -> bool:
        """Tell whether it gave this memory out."""
        known = (*self._extents.items(), *self.shared_extents())
        return any(start <= pointer < start + n for start, n in known)

    def adopt(self, memory: np.ndarray) -> None:
        """Count memory as the device's own for as long as the array lives."""
        start = memory.__array_interface__["data"][0]
        self._extents[start] = memory.nbytes
        self._memories[start] = memory
        weakref.finalize(memory, self._extents.pop, start, None).atexit = False

    def empty(self, shape: tuple[int, ...], dtype: np.dtype) -> EmulatedArray:
        """Make an array whose bytes are 0xA5: nobody takes them for a result."""
        dtype = np.dtype(dtype)
        count = int(np.prod(shape, dtype=np.int64)) * dtype.itemsize
        memory = np.full(max(count, 1), 0xA5, np.uint8)
        self.adopt(memory)
        return EmulatedArray(memory[:count].view(dtype).reshape(shape), self)

    def array(self, values: Any) -> EmulatedArray:
        """Make an array of these values."""
        values = np.asarray(values)
        made = self.empty(values.shape, values.dtype)
        made._memory[...] = values
        return made

    def wrap(self, pointer: int, shape: tuple[int, ...], dtype: np.dtype) -> EmulatedArray:
        """Make an array of shared memory."""
        memory = self.view(pointer, int(np.prod(shape, dtype=np.int64)), dtype)
        return EmulatedArray(memory.reshape(shape), self)

    def finish(self) -> None:
        """Do all that is queued anywhere."""
        for stream in list(self._streams):
            self.synchronize(stream)

    def pinned(self, nbytes: int) -> np.ndarray:
        """Give plain memory: there is nothing to pin it for."""
        return np.full(nbytes, 0x5A, np.uint8)

    def current_stream(self) -> int:
        """Give the stream that :meth:`use` chose."""
        return self._current

    def use(self, stream: int) -> None:
        """Make a stream the current one."""
        self._find(stream)
        self._current = stream

    def new_stream(self) -> int:
        """Make a stream."""
        number = len(self._streams)
        self._streams[number] = Stream()
        return number

    def event(self) -> EmulatedEvent:
        """Make an event."""
        return EmulatedEvent(self._streams)

    def copy(self, target: int, source: int, nbytes: int, stream: int) -> None:
        """Queue a copy; host memory must live until it is done, as on a GPU."""
        self.copied += nbytes
        held = self.holders((target, source))
        self.launch(lambda: (ctypes.memmove(target, source, nbytes), held), stream)

    def holders(self, pointers: Iterable[int]) -> list[np.ndarray]:
        """Give what keeps the device's own memory: a pool reuses it in the order of streams."""
        found = []
        for start, memory in list(self._memories.items()):
            if any(start <= pointer < start + memory.nbytes for pointer in pointers):
                found.append(memory)
        return found

    def launch(self, kernel: Action, stream: int) -> None:
        """Queue any work."""
        self._find(stream).put(kernel)

    def synchronize(self, stream: int) -> None:
        """Do all that is queued."""
        found = self._find(stream)
        found.run(found.queued)

    def _find(self, stream: int) -> Stream:
        found = self._streams.get(stream)
        if found is None:
            raise InvalidArgument(f"stream {stream} is none of {self.describe()}")
        return found
