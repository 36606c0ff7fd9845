"""A device emulated in host memory, to test the code for GPUs on machines without one.

``install_device(EmulatedDevice)`` makes it the device of this process, as the fixture
``emulated_device`` does.  Its streams are lazy: queued work runs only when it is waited for.  So
code that reads data without waiting for their copy fails every time, where on a GPU it might pass
by luck.
"""

from __future__ import annotations

import contextlib
import ctypes
import mmap
import os
import time
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import takewhile
from typing import Any

import numpy as np
from numpy.lib.mixins import NDArrayOperatorsMixin

from mpidist.errors import InvalidArgument, Unsupported
from mpidist.operations import OPS, accumulator, division, is_half, narrow, widen
from mpidist.shared_memory.digest import SUMS, digest

Action = Callable[[], object]


class Stream:
    """A queue of work that runs in order."""

    def __init__(self) -> None:
        self._queue: deque[Action] = deque()
        self.queued = self.done = 0
        self.capturing = False

    def put(self, action: Action) -> None:
        """Queue an action."""
        assert not self.capturing, "work of a graph would run now"
        self._queue.append(action)
        self.queued += 1

    def run(self, until: int) -> None:
        """Run queued actions until so many have run since the beginning."""
        while self.done < until:
            action = self._queue.popleft()
            self.done += 1
            action()


class EmulatedEvent:
    """An event of the emulated device; see :class:`~mpidist.device.base.Event`."""

    def __init__(self, streams: dict[int, Stream]):
        self._streams = streams
        self._mark: tuple[Stream, int] | None = None
        self._destroyed = False

    def __del__(self) -> None:
        self._destroyed = True  # as cupy does, however many still refer to it

    def record(self, stream: int) -> None:
        """Put the mark at the end of a stream."""
        found = self._streams[stream]
        assert not found.capturing, "other streams would wait for a graph"
        self._mark = (found, found.queued)

    def synchronize(self) -> None:
        """Run the work queued before the mark."""
        if self._destroyed:
            os.write(2, b"an event was used after its end: CUDA crashes the process\n")
            os.abort()
        if self._mark is not None:
            self._mark[0].run(self._mark[1])

    def done(self) -> bool:
        """Run the work queued before the mark and return True, so that polling ends."""
        self.synchronize()
        return True

    def block(self, stream: int) -> None:
        """Queue on a stream an action that runs the other stream up to the mark."""
        if self._mark is not None:
            marked, until = self._mark
            self._streams[stream].put(lambda: marked.run(until))


PATIENCE = 60.0  # seconds; a GPU would wait for ever


class Shared:
    """Shared memory and reductions of the emulated device, with numpy in place of kernels."""

    launch: Callable[[Callable[[], object], int], None]
    holders: Callable[[Iterable[int]], list[np.ndarray]]

    def __init__(self) -> None:
        self._mapped: dict[int, tuple[mmap.mmap, int, int]] = {}  # with the file if made here

    def shared_extents(self) -> list[tuple[int, int]]:
        """Return the start and length of each piece of shared memory."""
        return [(start, length) for start, (_, length, _) in self._mapped.copy().items()]

    def new_shared(self, nbytes: int) -> tuple[int, bytes]:
        """Map an anonymous file, which other processes open by its descriptor here."""
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
        """Drop a mapping, which ends with its last view."""
        del self._mapped[pointer]

    def release_shared(self, pointer: int) -> None:
        """Close the file of :meth:`new_shared`."""
        os.close(self._mapped.pop(pointer)[2])

    def view(self, pointer: int, count: int, dtype: np.dtype) -> np.ndarray:
        """Return an array of the elements at an address."""
        if not count:
            return np.empty(0, dtype)
        memory = (ctypes.c_char * (count * dtype.itemsize)).from_address(pointer)
        return np.ndarray((count,), dtype, memory)  # type: ignore[arg-type]

    def combines(self, dtype: np.dtype) -> bool:
        """Return True: numpy combines all dtypes."""
        return True

    def write_word(self, pointer: int, value: int, stream: int) -> None:
        """Queue the write of a 32-bit word."""
        self.launch(lambda: setattr(_word(pointer), "value", value), stream)

    def wait_word(self, pointer: int, value: int, stream: int) -> None:
        """Queue a wait until a 32-bit word has reached a value, modulo 2³² as on a GPU."""

        def wait() -> None:
            word, end = _word(pointer), time.monotonic() + PATIENCE
            while (word.value - value) % (1 << 32) >= 1 << 31:
                os.sched_yield()
                if time.monotonic() > end:
                    raise TimeoutError(f"a word at {pointer:#x} stays at {word.value} < {value}")

        self.launch(wait, stream)

    def digest(self, pointer: int, nbytes: int, sums: int, stream: int) -> None:
        """Queue one pass over the bytes, which adds to the sums."""
        held = self.holders((pointer, sums))

        def run() -> None:
            assert held is not None
            found = np.array(digest(self.view(pointer, nbytes, np.dtype(np.uint8))), np.uint64)
            self.view(sums, SUMS, np.dtype(np.uint64))[:] += found

        self.launch(run, stream)

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
        """Queue one pass that combines the sources in their order and stores in all targets."""
        held = self.holders((*sources, *targets))

        def run() -> None:
            assert held is not None
            views = [self.view(pointer, count, dtype) for pointer in sources]
            wide = accumulator(OPS[op], dtype)
            total, other = np.empty(count, wide), np.empty(count, wide)
            first = divisor if is_half(dtype) else 0  # the divisor of each source
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
    """An array in the emulated device's memory, like one of a GPU library.

    Arithmetic is queued on the current stream and runs when that is waited for.  As with cupy, only
    :meth:`get` copies to the host, and arrays on the host cannot be operands.

    Parameters
    ----------
    memory : ndarray
        The elements.
    device : EmulatedDevice
        The device that has the memory.
    """

    def __init__(self, memory: np.ndarray, device: EmulatedDevice):
        self._memory, self.device = memory, device
        self.shape, self.dtype, self.size = memory.shape, memory.dtype, memory.size
        self.ndim, self.nbytes, self.itemsize = memory.ndim, memory.nbytes, memory.itemsize

    @property
    def __cuda_array_interface__(self) -> dict[str, Any]:
        interface = self._memory.__array_interface__
        return {
            "shape": self.shape,
            "typestr": self.dtype.str,
            "data": interface["data"],
            "strides": interface["strides"],
            "stream": self.device.current_stream(),
            "version": 3,
        }

    def any(self) -> bool:
        """Return whether any element is not 0: the host waits, as for a scalar of cupy."""
        return bool(self.get().any())

    def get(self) -> np.ndarray:
        """Wait for the current stream and return a copy on the host."""
        self.device.synchronize(self.device.current_stream())
        return self._memory.copy()

    def set(self, values: Any) -> None:
        """Queue on the current stream the assignment of these values."""
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
        """Return the same memory in another shape."""
        return EmulatedArray(self._memory.reshape(*shape), self.device)

    def view(self, dtype: Any) -> EmulatedArray:
        """Return the same memory as elements of another dtype."""
        return EmulatedArray(self._memory.view(dtype), self.device)

    def sum(self, axis: Any = None, dtype: Any = None) -> EmulatedArray:
        """Return the sum of the elements."""
        return self._make(lambda x: x.sum(axis=axis, dtype=dtype), self)

    def astype(self, dtype: Any) -> EmulatedArray:
        """Return a copy of another dtype."""
        return self._make(lambda x: x.astype(dtype), self)

    def copy(self, order: str = "C") -> EmulatedArray:
        """Return a copy."""
        return self.astype(self.dtype)

    @property
    def flags(self) -> Any:
        """The flags of the memory."""
        return self._memory.flags

    def _make(self, function: Callable[..., Any], *inputs: Any) -> EmulatedArray:
        """Return a new array whose contents, `function` of the inputs, are computed in the stream.

        `function` also runs at once, for the shape and dtype.
        """
        operands = [_memory(x) for x in inputs]
        with np.errstate(all="ignore"):
            like = np.asarray(function(*operands))
        made = self.device.empty(like.shape, like.dtype)
        self._launch(lambda: np.copyto(made._memory, function(*operands)))
        return made

    def _launch(self, action: Callable[[], object]) -> None:
        self.device.launch(action, self.device.current_stream())


def _memory(x: Any) -> Any:
    """Return the memory of an operand; scalars are returned as they are."""
    if isinstance(x, EmulatedArray):
        return x._memory
    if isinstance(x, np.ndarray) and x.ndim:
        raise TypeError("an array of the host and one of the emulated device do not mix")
    return x


class EmulatedDevice(Shared):
    """The emulated device; see :class:`~mpidist.device.base.Device`.

    Attributes
    ----------
    count : int, optional
        Devices of the host, which CUDA_VISIBLE_DEVICES selects; by default one for each process.
    copied : int
        Bytes of all queued copies, for tests.
    locked : dict of int to int
        Bytes of page-locked host memory by its address, for tests.
    """

    name, emulated, nccl, side_by_side = "emulated", True, False, True
    count: int | None = None

    def __init__(self, number: int | None = None) -> None:
        self.number = number or 0
        self._streams: dict[int, Stream] = {0: Stream()}
        self._last_stream = 0
        super().__init__()
        self._current = 0
        self._extents: dict[int, int] = {}
        self._memories: weakref.WeakValueDictionary[int, np.ndarray] = weakref.WeakValueDictionary()
        self.copied = 0
        self.locked: dict[int, int] = {}

    def describe(self) -> str:
        """Return a name that says that the device is emulated."""
        return "the device emulated in host memory"

    def identity(self) -> str:
        """Return the UUID of the device."""
        return self.identities()[self.number if self.count else 0]

    @classmethod
    def why_not(cls) -> str | None:
        """Return why this process can use no device, or None if it can."""
        return None if cls.identities() else "CUDA_VISIBLE_DEVICES shows no emulated device"

    @classmethod
    def identities(cls) -> tuple[str, ...]:
        """Return the UUIDs of the devices shown to this process.

        As with CUDA, the list ends at the first number that does not exist.
        """
        if cls.count is None:
            return (f"emulated-{os.getpid()}",)
        shown = cls.shown()
        every = [str(k) for k in range(cls.count)] if shown is None else shown.split(",")
        known = takewhile(lambda k: k.strip().isdigit() and int(k) < cls.count, every)
        return tuple(f"emulated-{int(k)}" for k in known)

    @classmethod
    def shown(cls) -> str | None:
        """Return the numbers of the devices shown to this process; None for all."""
        return os.environ.get("CUDA_VISIBLE_DEVICES")

    @staticmethod
    def current() -> int:
        """Return the number of the current device."""
        return 0

    def enter(self) -> None:
        """Do nothing: a thread has only this device."""

    def is_current(self) -> bool:
        """Return True."""
        return True

    def owns(self, pointer: int) -> bool:
        """Return whether the memory at an address was allocated here."""
        # A copy: another thread, or a finalizer, may free memory meanwhile.
        known = (*self._extents.copy().items(), *self.shared_extents())
        return any(start <= pointer < start + n for start, n in known)

    def adopt(self, memory: np.ndarray) -> None:
        """Treat an array's memory as the device's own for as long as the array lives."""
        start = memory.__array_interface__["data"][0]
        self._extents[start] = memory.nbytes
        self._memories[start] = memory
        weakref.finalize(memory, self._extents.pop, start, None).atexit = False

    def empty(self, shape: tuple[int, ...], dtype: np.dtype) -> EmulatedArray:
        """Return a new array with all bytes 0xA5, which cannot be mistaken for a result."""
        dtype = np.dtype(dtype)
        count = int(np.prod(shape, dtype=np.int64)) * dtype.itemsize
        memory = np.full(max(count, 1), 0xA5, np.uint8)
        self.adopt(memory)
        return EmulatedArray(memory[:count].view(dtype).reshape(shape), self)

    def array(self, values: Any) -> EmulatedArray:
        """Return a new array of these values."""
        values = np.asarray(values)
        made = self.empty(values.shape, values.dtype)
        made._memory[...] = values
        return made

    def wrap(
        self, pointer: int, shape: tuple[int, ...], dtype: np.dtype, owner: object
    ) -> EmulatedArray:
        """Return an array on shared memory, which its owner keeps."""
        memory = self.view(pointer, int(np.prod(shape, dtype=np.int64)), dtype)
        made = EmulatedArray(memory.reshape(shape), self)
        made.owner = owner
        return made

    def finish(self) -> None:
        """Run the work queued on all streams."""
        for stream in list(self._streams):
            self.synchronize(stream)

    def pinned(self, nbytes: int) -> np.ndarray:
        """Return ordinary host memory, which needs no page-locking here."""
        return np.full(nbytes, 0x5A, np.uint8)

    def page_lock(self, memory: np.ndarray) -> None:
        """Record host memory in `locked`."""
        self.locked[memory.__array_interface__["data"][0]] = memory.nbytes

    def page_unlock(self, memory: np.ndarray) -> None:
        """Forget recorded host memory."""
        del self.locked[memory.__array_interface__["data"][0]]

    def current_stream(self) -> int:
        """Return the stream selected by :meth:`use`."""
        return self._current

    def use(self, stream: int) -> None:
        """Make a stream the current one."""
        self._find(stream)
        self._current = stream

    def new_stream(self) -> int:
        """Return a new stream."""
        self._last_stream += 1
        self._streams[self._last_stream] = Stream()
        return self._last_stream

    def release_stream(self, stream: int) -> None:
        """Run the work queued on a stream, which no later call may name."""
        self.synchronize(stream)
        del self._streams[stream]

    @property
    def streams(self) -> list[int]:
        """The streams that were not released, the default one first."""
        return list(self._streams)

    @contextlib.contextmanager
    def capture(self, stream: int) -> Iterator[None]:
        """Capture a stream into a graph, of which nothing is kept: it must stay empty."""
        found = self._find(stream)
        found.capturing = True
        yield
        found.capturing = False

    def is_capturing(self, stream: int) -> bool:
        """Return whether a stream is inside :meth:`capture`."""
        return self._find(stream).capturing

    def event(self) -> EmulatedEvent:
        """Return a new event."""
        return EmulatedEvent(self._streams)

    def copy(self, target: int, source: int, nbytes: int, stream: int) -> None:
        """Queue a copy; host memory must live until it is done, as on a GPU."""
        self.copied += nbytes
        held = self.holders((target, source))
        self.launch(lambda: (ctypes.memmove(target, source, nbytes), held), stream)

    def holders(self, pointers: Iterable[int]) -> list[np.ndarray]:
        """Return the arrays that own the memory at these addresses, which they keep alive."""
        found = []
        for start, memory in list(self._memories.items()):
            if any(start <= pointer < start + memory.nbytes for pointer in pointers):
                found.append(memory)
        return found

    def launch(self, kernel: Action, stream: int) -> None:
        """Queue an action on a stream."""
        self._find(stream).put(kernel)

    def synchronize(self, stream: int) -> None:
        """Run the work queued on a stream."""
        found = self._find(stream)
        assert not found.capturing, "the host would wait for a graph"
        found.run(found.queued)

    def _find(self, stream: int) -> Stream:
        found = self._streams.get(stream)
        if found is None:
            raise InvalidArgument(f"stream={stream}: not a stream of {self.describe()}")
        return found


def take_tensors_for_a_gpus(patch: Any) -> list[str]:
    """Take every tensor of PyTorch for one of an emulated GPU, until `patch` is undone.

    PyTorch computes at once here, so the emulated streams do too; what is shown is which way the
    data take, not that the order of streams is right.

    Parameters
    ----------
    patch : pytest.MonkeyPatch
        The caller ends with ``install_device(None)`` beside its undo.

    Returns
    -------
    list of str
        Appended to later: what the streams of :mod:`torch.cuda` were asked for.
    """
    import torch

    from mpidist.device import find
    from mpidist.device.tensors import interface_of
    from mpidist.torch import framework

    asked: list[str] = []

    class CudaStream:
        def __init__(self, device: Any = None):
            asked.append("new")

        def record_event(self) -> str:
            asked.append("record")
            return "event"

        def wait_event(self, event: str) -> None:
            asked.append(f"wait for {event}")

        def synchronize(self) -> None:
            asked.append("synchronize")

    @contextlib.contextmanager
    def entered(stream: CudaStream) -> Iterator[None]:
        asked.append("enter")
        yield
        asked.append("leave")

    def put(self: Stream, action: Action) -> None:
        self.queued += 1
        self.done += 1
        action()

    find.install_device(EmulatedDevice)
    interface = property(interface_of)
    patch.setattr(torch.Tensor, "__cuda_array_interface__", interface, raising=False)
    patch.setattr(framework, "is_on_gpu", lambda x: True)
    patch.setattr(framework, "stream_of", lambda x: find.find_device().current_stream())
    patch.setattr(framework, "DEVICE", "cpu")
    patch.setattr(torch.cuda, "current_stream", CudaStream)
    patch.setattr(torch.cuda, "Stream", CudaStream)
    patch.setattr(torch.cuda, "stream", entered)
    patch.setattr(EmulatedDevice, "owns", lambda self, pointer: True)
    patch.setattr(Stream, "put", put)
    return asked
