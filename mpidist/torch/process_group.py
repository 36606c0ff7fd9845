"""The process group of torch.distributed's backend "mpidist", over a communicator.

Each collective of c10d is one call of a public collective, on the memory of the tensors.  A
blocking call runs in the caller's thread.  One with ``async_op=True`` is queued: whoever waits for
it performs it, with those before it; a thread performs it if nobody waits for it soon, or if its
future is asked for, which C++ can wait for; all run in order.  Messages have a communicator of
their own and are waited for in the caller's thread; threads share it.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import functools
import inspect
import math
import pickle
import queue
import sys
import threading
import time
import weakref
import zlib
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from datetime import timedelta
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.profiler import record_function
from torch.distributed import distributed_c10d as c10d

from ..backends.waiting import POLLING
from ..calls.arrays import view_at
from ..calls.prepare import Caller
from ..communicator.communicator import Communicator
from ..communicator.layers import is_symmetric, max_tag
from ..device import tensors as host
from ..engine.call_site import begun_here
from ..engine.door import share
from ..engine.work import UNSET
from ..errors import (
    CollectiveTimeout,
    CommunicationError,
    CommunicatorInUse,
    InvalidArgument,
    MpidistError,
    UnsupportedDtype,
)
from ..measure import plural
from . import framework
from .rendezvous import root
from .sparse import add_up

Act = Callable[[], object]
Change = Callable[[Tensor], object]  # of a tensor, in place

try:
    from torch._C._dynamo.eval_frame import _FrameAction, _FrameExecStrategy, set_code_exec_strategy

    CAN_SKIP = True
except ImportError:  # an older PyTorch
    CAN_SKIP = False

_distributed_c10d = torch._C._distributed_c10d
_GIVEN_TO_GRAPHS = _distributed_c10d._allow_inflight_collective_as_graph_input
_Kind = c10d.ReduceOp.RedOpType
OPERATIONS = {
    _Kind.SUM: "sum",
    _Kind.AVG: "mean",
    _Kind.PRODUCT: "prod",
    _Kind.MIN: "min",
    _Kind.MAX: "max",
    _Kind.BAND: "and",
    _Kind.BOR: "or",
    _Kind.BXOR: "xor",
}
SCALED = (torch.float16, torch.bfloat16, torch.float32, torch.float64)  # by PREMUL_SUM, as NCCL
BESIDE = "; make a group of another backend beside it, such as dist.new_group(backend='nccl')"
ON_BOOL = {"sum": "or", "max": "or", "prod": "and", "min": "and"}  # equal in arithmetic of bool
DEVICES = "cpu", "cuda"
NAMES_OF_C10D = {
    "tensors": ("tensor",),
    "outputs": ("output_tensors", "output_tensor", "output_lists", "output"),
    "inputs": ("input_tensors", "input_tensor", "input_list", "input"),
    "output": ("outputTensor",),
    "input": ("inputTensor",),
    "output_splits": ("output_split_sizes",),
    "input_splits": ("input_split_sizes",),
    "opts": ("root", "op"),
    "peer": ("dstRank", "srcRank"),
}
"""For parameters of the methods of :class:`ProcessGroup`: their names in c10d's forms."""
_MOST_KEPT, _MOST_PENDING, _MOST_BUFFERS = 1024, 64, 62
_SMALL = 16384  # bytes of a tensor that is copied to and from memory that the communicator knows
_MOST_SCRATCH = 256  # pieces of such memory
_POLL_SECONDS = 5e-4  # between polls of messages while another operation is waited for
_LOOK_SECONDS = 1e-4, 2e-3  # shortest and longest, between looks for what nobody waits for
_QUIET_LOOKS = 6  # without a new operation: then the thread is for others
_ENDING_SECONDS = 1.0  # for an operation that is pending when Python ends
_FOREVER = 10 * 365 * 86400.0
_UNSET_TIMEOUT = timedelta(milliseconds=-1)  # in c10d's options
_SETUP_SECONDS = 60.0  # for making and freeing a group, if its deadline is shorter


Place = tuple[int, int, torch.dtype]  # of a tensor in memory: address, number of elements, dtype


class HostArrays:
    """Numpy arrays on the memory of tensors: the same object whenever the memory is the same.

    PyTorch makes new tensors on the same memory all the time, but a communicator recognises a
    repeated call by the identity of its array.  The arrays do not keep the memory alive; they are
    only used while a tensor does.
    """

    def __init__(self) -> None:
        self._kept: dict[Place, np.ndarray] = {}
        self.known = self._kept.get  # the array of a place, or None

    def of(self, x: Tensor) -> np.ndarray:
        """Return the flat array on the memory of a contiguous tensor.

        Raises InvalidArgument if its memory is not its value; the message continues "x is …".
        """
        key = (x.data_ptr(), x.numel(), x.dtype)
        found = self._kept.get(key)
        if found is None:
            dtype = host.dtype_of(x.dtype)
            if isinstance(dtype, str):  # not a dtype of numpy: it can be sent, but not reduced
                dtype = np.dtype((np.void, x.element_size()))
            if x.is_quantized:
                raise InvalidArgument(host.QUANTIZED)
            if key[1] and not key[0]:
                raise InvalidArgument(host.WITHOUT_MEMORY)
            if len(self._kept) >= _MOST_KEPT:
                self.forget()
            found = self._kept[key] = view_at(*key[:2], dtype)
        return found

    def forget(self) -> None:
        """Forget all arrays: called when symmetric memory is allocated or freed.

        An address may then have become symmetric memory, or ceased to be.
        """
        self._kept.clear()


ARRAYS = HostArrays()
_move = ctypes.PyDLL(None).memmove  # unlike ctypes.memmove it keeps Python's lock, for few bytes
_move.argtypes, _move.restype = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t], None
_UNUSED = (lambda pool: sys.getrefcount(pool[0]))(
    [object()]
)  # references to what is in a pool only


# Of methods with one list of tensors.
_OPTIONS = frozenset({c10d.AllreduceOptions, c10d.ReduceOptions, c10d.BroadcastOptions})


def _uncompiled(method: Callable[..., Any]) -> Callable[..., Any]:
    """Return a method marked so that torch.compile skips it and all that it calls.

    Unlike ``torch.compiler.disable``, this makes no wrapper around the method, which C++ may call,
    and does not import the compiler.
    """
    if CAN_SKIP:
        strategy = _FrameExecStrategy(_FrameAction.SKIP, _FrameAction.SKIP)
        set_code_exec_strategy(method.__code__, strategy)
    return method


def _gated(method: Callable[..., Any]) -> Callable[..., Any]:
    """Return a method of a group that gets its tensors, also those in lists, from :func:`_plain`.

    Its arguments may have the names of :data:`NAMES_OF_C10D`.  torch.compile skips it, and all that
    it calls.
    """
    own = inspect.signature(method).parameters
    names = {
        theirs: ours
        for ours, some in NAMES_OF_C10D.items()
        for theirs in some
        if ours in own and theirs not in own
    }

    @functools.wraps(method)
    def call(self: ProcessGroup, *arguments: Any, **named: Any) -> Any:
        if len(arguments) == 2 and not named and type(arguments[1]) in _OPTIONS:
            (x, _) = arguments  # as torch.distributed calls most
            if type(x) is list and len(x) == 1 and type(x[0]) is Tensor:
                return method(self, *arguments)
        single = False
        for x in arguments:
            kind = type(x)
            if kind is Tensor or not (kind is list or kind is tuple or isinstance(x, Tensor)):
                continue
            # As torch.distributed calls most; two lists are those of an alltoall of one rank.
            if kind is list and len(x) == 1 and type(x[0]) is Tensor and not single:
                single = True
                continue
            arguments = tuple([_plain(x, self, method) for x in arguments])
            break
        if named:
            given = {names.get(name, name): _plain(x, self, method) for name, x in named.items()}
            if len(given) < len(named):
                raise TypeError(
                    f"{method.__name__}({', '.join(named)}): two names of one argument: expected "
                    "the names of one of c10d's forms"
                )
            named = given
        return method(self, *arguments, **named)

    return _uncompiled(call)


def _plain(x: Any, group: ProcessGroup, method: Callable[..., Any]) -> Any:
    """Return the plain tensor for a tensor, or a list of them; anything else as it is.

    A plain tensor's elements are the memory it shows.
    """
    if isinstance(x, (list, tuple)):
        return [_plain(y, group, method) for y in x]
    if not isinstance(x, Tensor):
        return x
    try:
        # What is dense is copied into one buffer, by PyTorch, which would read freed memory.
        return host.unwrapped(x) if x.layout is torch.sparse_coo else host.plain(x)
    except InvalidArgument as error:
        where = f"rank {group.rank()}: {method.__name__} of group {group.group_name!r}"
        raise InvalidArgument(f"{where}: a tensor is {error}") from None


def _readable(x: Tensor) -> Tensor:
    """Return a contiguous tensor with the elements of `x`: itself, or a copy."""
    if x.is_contiguous() and not x.is_conj() and not x.is_neg():
        return x
    return x.detach().resolve_conj().resolve_neg().contiguous()


def _joined(tensors: Sequence[Tensor]) -> Tensor:
    return torch.cat([_readable(host.plain(t).detach()).reshape(-1) for t in tensors])


def _deal(flat: Tensor, tensors: Sequence[Tensor]) -> None:
    """Copy a flat tensor into `tensors`, which get consecutive parts of it."""
    if _on_host(flat) and flat.nbytes <= _SMALL and all(map(_is_plain_memory, tensors)):
        source = flat.data_ptr()  # 0.3 µs for each tensor in place of 2
        for target in tensors:
            _move(target.data_ptr(), source, target.nbytes)
            source += target.nbytes
        return
    for target, part in zip(tensors, flat.split([t.numel() for t in tensors])):
        target.copy_(part.view(target.shape))


def _on_host(x: Tensor) -> bool:
    """Return whether a tensor is in memory of the host, also where a device is emulated there."""
    return x.is_cpu and not framework.is_there(x)


def _is_plain_memory(x: Tensor) -> bool:
    """Return whether the elements of a tensor are its memory on the host, in order."""
    there = _on_host(x) and x.is_contiguous() and not x.is_conj() and not x.is_neg()
    return there and (x.data_ptr() != 0 or not x.numel())


def _counts(tensors: Sequence[Tensor]) -> list[int] | None:
    """Return the number of elements of each tensor; None if all have equally many."""
    counts = [t.numel() for t in tensors]
    return None if len(set(counts)) == 1 else counts


# -- works ----------------------------------------------------------------------------------------


class _Threads:
    """Threads of all groups: they perform queued operations, and run callbacks of futures.

    A thread is started only if none is idle.  PyTorch aborts the process if Python exits while a
    thread runs PyTorch's code.  So Python's exit waits for these threads: for a second for queued
    operations, and for all callbacks.

    Attributes
    ----------
    ending : bool
        Whether Python exits.
    """

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._tasks: queue.SimpleQueue[Act] = queue.SimpleQueue()
        self._idle = self._busy = self._callbacks = 0
        self.ending = self._ended = False
        atexit.register(self._end)

    def start(self, task: Act) -> None:
        """Call a function in another thread."""
        with self._changed:
            if self._ended:
                return
            self._busy += 1
            grow = not self._idle
            self._idle -= not grow
        self._tasks.put(task)
        if grow:
            threading.Thread(target=self._run, name="mpidist-group", daemon=True).start()

    def _run(self) -> None:
        POLLING.gentle = True
        while True:
            self._tasks.get()()
            with self._changed:
                self._busy -= 1
                self._idle += 1
                self._changed.notify_all()

    def complete(self, future: Any) -> None:
        """Complete a future, and run its callbacks, in this thread."""
        with self._changed:
            if self._ended:
                return
            self._callbacks += 1
        try:
            future.set_result(None)
        finally:
            with self._changed:
                self._callbacks -= 1
                self._changed.notify_all()

    def _end(self) -> None:
        with self._changed:
            self.ending = True
            self._changed.wait_for(lambda: not self._busy, _ENDING_SECONDS)
            self._changed.wait_for(lambda: not self._callbacks)
            self._ended = True


_THREADS = _Threads()


class _Work(dist.Work):
    """The Work of an operation of a process group, which PyTorch's callers get."""

    def __init__(self, outputs: Sequence[Tensor]):
        super().__init__()
        self._outputs = outputs
        self._error: BaseException | None = None
        self._ended = False
        self._future: Any = None
        self._settles: Any = None
        self._lock = threading.RLock()

    def record(self, error: BaseException | None = None) -> Any:
        """Record that the operation has ended; return its future, to be completed, or None."""
        with self._lock:
            if self._ended:
                return None
            self._error, self._ended = error, True
            return self._settles

    def _end(self, error: BaseException | None = None) -> None:
        """Record that the operation has ended, and have its future completed.

        That is in another thread, as callbacks may wait for what this thread is to do.
        """
        settles = self.record(error)
        if settles is not None:
            _THREADS.start(lambda: _THREADS.complete(settles))

    def _raise(self) -> None:
        error = self.exception()
        if error is not None:
            raise error

    def _unwrap(self, _: Any) -> list[Tensor]:
        self._raise()
        return list(self._outputs)

    def wait(self, timeout: timedelta = timedelta(0)) -> bool:
        """Wait until the operation has ended; raise its error, or return True."""
        self._raise()
        return True

    def synchronize(self) -> None:
        """Wait until the operation has ended."""
        self.wait()

    def is_completed(self) -> bool:
        """Return whether the operation has ended, with or without an error."""
        return self._ended

    def is_success(self) -> bool:
        """Return whether the operation has ended without an error."""
        return self.is_completed() and self.exception() is None

    def exception(self) -> BaseException | None:
        """Return the operation's error, or None."""
        return self._error

    def result(self) -> list[Tensor]:
        """Return the tensors that hold the result, after the end of the operation."""
        self.wait()
        return list(self._outputs)

    @_uncompiled
    def get_future(self) -> Any:
        """Return a future of the tensors that hold the result."""
        with self._lock:
            if self._future is None:
                self._settles = torch.futures.Future(devices=_gpus(self._outputs))
                # An error set on a future crashes DDP; one that is raised in a callback does not.
                self._future = self._settles.then(self._unwrap)
                if self._ended:
                    self._settles.set_result(None)
        return self._future


def _gpus(tensors: Sequence[Tensor]) -> list[torch.device]:
    """Return the GPUs of tensors, which a future of these must know."""
    return list({x.device: None for x in tensors if x.is_cuda})


class _Done(_Work):
    """The Work of an operation that has run in the caller's thread, and has ended."""

    def __init__(self, outputs: Sequence[Tensor]):
        super().__init__(outputs)
        self._ended = True


_BLOCKING = _Done([])  # of all blocking calls: PyTorch's functions do not return it


class _Queued(_Work):
    """The Work of a queued operation.

    Attributes
    ----------
    number : int
        Its number among the operations of the group.
    """

    def __init__(self, group: ProcessGroup, name: str, number: int, outputs: Sequence[Tensor]):
        super().__init__(outputs)
        self._group, self._name, self.number = group, name, number
        self._event: threading.Event | None = None  # once a thread waits that does not perform it

    @property
    def what(self) -> str:
        """The operation, in messages of errors."""
        return self._group.what(self._name, self.number)

    def record(self, error: BaseException | None = None) -> Any:
        """Record that the operation has ended; return its future, to be completed, or None."""
        settles = super().record(error)
        if self._event is not None:
            self._event.set()
        return settles

    def event(self) -> threading.Event:
        """Return an event that is set at the end of the operation."""
        with self._lock:
            if self._event is None:
                self._event = threading.Event()
                if self._ended:
                    self._event.set()
        return self._event

    @_uncompiled
    def wait(self, timeout: timedelta = timedelta(0)) -> bool:
        """Wait until the operation has ended; raise its error, or return True.

        Sends and receives of this group make progress meanwhile.  A `timeout` of 0 waits as long as
        the operation's own deadline allows.
        """
        if not self._ended:
            seconds = timeout.total_seconds()
            if not self._group.await_work(self, seconds if seconds > 0 else None):
                raise dist.DistBackendError(
                    f"{self.what}: Timed out waiting {_milliseconds(seconds)}ms for its end"
                )
        return super().wait()

    @_uncompiled
    def get_future(self) -> Any:
        """Return a future of the tensors that hold the result."""
        future = super().get_future()
        if not self._ended:  # C++ may wait for it, which performs nothing
            self._group.hasten(self)
        return future


class _Message(_Work):
    """The Work of a send or receive."""

    def __init__(self, group: ProcessGroup, what: str, outputs: Sequence[Tensor], work: Any):
        super().__init__(outputs)
        self._group, self._what, self._work = group, what, work
        self._back: Act | None = None

    @_uncompiled
    def wait(self, timeout: timedelta = timedelta(0)) -> bool:
        """Wait until the message has been sent or received; raise its error, or return True.

        A `timeout` of 0 means the group's.
        """
        if not self._ended:
            seconds = timeout.total_seconds()
            seconds = seconds if seconds > 0 else UNSET
            try:
                self._work.wait(seconds)
                with self._lock:  # of two threads that wait, one copies, before either returns
                    if self._back is not None and not self._ended:
                        self._back()
                    self._end()
            except CommunicatorInUse:  # the message is still to come
                raise
            except MpidistError as error:
                self._end(self._group.translated(error, self._what, seconds))
        return super().wait()

    @_uncompiled
    def is_completed(self) -> bool:
        """Make progress; return whether the send or receive is complete."""
        if not self._ended:
            try:
                moved = self._work.test()
            except CommunicatorInUse:  # another thread makes progress
                return False
            except MpidistError:
                moved = True
            if moved:
                try:
                    self.wait()
                except Exception:
                    pass  # wait() and exception() have it
        return self._ended

    @_uncompiled
    def get_future(self) -> Any:
        """Wait for the message, then return a completed future of the tensors."""
        try:
            self.wait()
        except Exception:
            pass  # the future has it
        return super().get_future()

    def _source_rank(self) -> int:
        """Wait for the message, and return the sender's rank in the group."""
        self.wait()
        return self._work.source

    source_rank = _source_rank


class _Coalesced(_Work):
    """The Work of all operations of a coalesced block."""

    def __init__(self, works: Sequence[_Work]):
        super().__init__([x for work in works for x in work._outputs])
        self._works = works

    @_uncompiled
    def wait(self, timeout: timedelta = timedelta(0)) -> bool:
        """Wait until all operations have ended; raise their first error, or return True.

        A `timeout` of 0 waits as long as the operations' own deadlines allow.
        """
        until, first = time.monotonic() + timeout.total_seconds(), None
        for work in self._works:
            left = timedelta(seconds=max(until - time.monotonic(), 1e-3)) if timeout else timeout
            try:
                work.wait(left)
            except Exception as error:
                first = first or error
        if first is not None:
            raise first
        return True

    def is_completed(self) -> bool:
        """Return whether all operations have ended, with or without an error."""
        return all(work.is_completed() for work in self._works)

    def exception(self) -> BaseException | None:
        """Return the first error of the operations that have ended, or None."""
        return next((e for work in self._works if (e := work.exception()) is not None), None)

    @_uncompiled
    def get_future(self) -> Any:
        """Return a future of the tensors that hold the results of all operations."""
        if self._future is None:
            ended: Any = torch.futures.Future(devices=_gpus(self._outputs))
            every = torch.futures.collect_all([work.get_future() for work in self._works])
            every.add_done_callback(lambda _: ended.set_result(None))
            self._future = ended.then(self._unwrap)
        return self._future

    def _raise(self) -> None:
        error = self.exception()
        if error is not None:
            raise error


def _milliseconds(seconds: float | None) -> str:
    return "forever" if seconds is None else f"{seconds * 1000:.0f}"


Key = tuple[tuple[int, ...], int]
_RETIRED: dict[Key, tuple[Communicator, Communicator]] = {}  # of groups that were destroyed
_MADE: dict[tuple[int, ...], int] = {}  # groups, by their members


def _free_retired(comm: Communicator, members: Sequence[int]) -> None:
    """Free the communicators of destroyed groups; collective over `comm`.

    `members` are the ranks of `comm`, as ranks of the world.  Only groups are freed whose
    ranks are all in `members` and have all destroyed the group.  A group of which a communicator is
    broken on some rank is never freed.
    """
    mine = [key for key, both in _RETIRED.items() if not any(part.broken for part in both)]
    every = dict(zip(members, _everyones(comm, mine)))
    for key in sorted({key for keys in every.values() for key in keys}):
        if all(key in every.get(rank, ()) for rank in key[0]) and key in _RETIRED:
            for old in _RETIRED.pop(key):
                old.timeout = comm.timeout  # its own was for operations, and may be short
                old.free()


def _everyones(comm: Communicator, value: Any) -> list[Any]:
    """Return all ranks' values as ``comm.allgather_object`` does, by a fixed algorithm.

    "auto" would first predict times or set shared memory up, which takes longer than the exchange;
    and it might choose native, whose first call between nodes can take longer than all else.
    """
    data = np.frombuffer(pickle.dumps(value), np.uint8)
    counts = comm.allgather(np.array([data.size]), algorithm="bruck").tolist()
    joined = comm.allgather(data, counts=counts, algorithm="bruck")
    return [pickle.loads(part.data) for part in np.split(joined, np.cumsum(counts)[:-1])]


# -- the process group ----------------------------------------------------------------------------


class ProcessGroup(dist.ProcessGroup):
    """A process group whose collectives are those of a communicator.

    Collectives, sends and receives return c10d's Work.  The `opts` of a collective are c10d's
    options; as in c10d, the operation of a reduction or the rank of the root may be given instead.

    Parameters
    ----------
    comm : Communicator
        Communicator of the members, which belongs to the group.
    name : str
        Name of the group.
    timeout : timedelta
        Deadline of each operation that has no timeout of its own.
    store : Store
        Store of the group, for the libraries that ask for it.

    Attributes
    ----------
    comm, messages : Communicator
        The communicator of the collectives, and another one for sends and receives.
    key : tuple or None
        The members, as ranks of the world, and the number of this group among those that they made,
        from 1; None for a group of :meth:`split_group`.
    """

    def __init__(self, comm: Communicator, name: str, timeout: timedelta, store: Any):
        super().__init__(comm.rank, comm.size)
        messages = comm.split(0)
        assert messages is not None
        self.comm, self.messages = comm, messages
        self._rank, self._size = comm.rank, comm.size
        self._check_root = Caller(comm.rank, comm.size).check_root
        self._name, self._description, self._store = name, "", store
        self.key: Key | None = None
        self._sequence = self._monitored = 0
        self._newest = 0  # number of the last queued operation
        self._operations: deque[tuple[_Queued, Act, float | None]] = deque()  # not begun
        # Held by the thread that performs one of them: PyTorch's callers may be several threads,
        # and a communicator serves one.
        self._performing = threading.RLock()
        self._queued = 0  # operations with async_op=True that have not ended
        self._waiting = 0  # threads that perform, or are about to perform, what they wait for
        self._served = False  # by a thread of _THREADS
        self._hastened = 0  # up to this number, operations are performed at once
        self._left = False  # the last operation to the server, as nobody waited for it
        self._hints: queue.SimpleQueue[None] = queue.SimpleQueue()  # for the server: look
        self._counting = threading.Lock()  # for these numbers
        self._pending: set[_Message] = set()  # by several threads: changed in place only
        self._sums: dict[torch.dtype, tuple[str, Change | None, Change | None]] = {}
        # For small tensors, by use, length and dtype: PyTorch makes new ones all the time, and for
        # an array at another address a communicator takes 20 to 40 µs more.
        self._scratch: dict[tuple[str, int, torch.dtype], tuple[Tensor, np.ndarray]] = {}
        self._last: dict[str, Place] = {}  # the last tensor of each use
        self._side_streams: dict[torch.device, Any] = {}  # of operations with async_op=True
        self._coalesced: list[_Work] | None = None  # of the block that has begun, if one has
        self._buffers: dict[tuple[int, torch.dtype], list[np.ndarray]] = {}
        self.bound_device_id = None
        self.options = torch._C._distributed_c10d.Backend.Options("mpidist", timeout)
        self.set_timeout(timeout)

    def __repr__(self) -> str:
        return f"<ProcessGroup {self._name!r} of mpidist: rank {self._rank} of {self._size}>"

    # -- what c10d asks ---------------------------------------------------------------------------

    def rank(self) -> int:
        """Return this rank in the group."""
        return self._rank

    def size(self) -> int:
        """Return the number of members."""
        return self._size

    def name(self) -> str:
        """Return the name of the backend."""
        return "mpidist"

    getRank, getSize = rank, size
    getBackendName = _get_backend_name = name
    supports_splitting = supports_coalescing = supports_shrinking = False
    supports_time_estimate = False

    @property
    def _device_types(self) -> list[torch.device]:
        return list(map(torch.device, DEVICES))

    def _get_backend(self, device: torch.device) -> ProcessGroup:
        if torch.device(device).type not in DEVICES:
            raise RuntimeError(
                f"rank {self._rank}: the group {self._name!r} of mpidist takes tensors on "
                f"{' and '.join(DEVICES)}, not on {device}"
            )
        return self

    def _set_group_name(self, name: str) -> None:
        self._name = name
        super()._set_group_name(name)

    def getGroupName(self) -> str:
        """Return the name of the group."""
        return self._name

    @property
    def group_name(self) -> str:
        """Name of the group."""
        return self._name

    def _set_group_desc(self, description: str) -> None:
        self._description = description
        super()._set_group_desc(description)

    def getGroupDesc(self) -> str:
        """Return the description of the group."""
        return self._description

    @property
    def group_desc(self) -> str:
        """Description of the group."""
        return self._description

    def get_group_store(self) -> Any:
        """Return the store of the group."""
        return self._store

    def _get_sequence_number_for_group(self) -> int:
        return self._sequence

    def _set_sequence_number_for_group(self) -> None:
        """Do nothing: all members number their operations from 1."""

    def set_timeout(self, timeout: timedelta) -> None:
        """Set the deadline of each operation that has no timeout of its own."""
        seconds = timeout.total_seconds()
        self._seconds = seconds if 0 < seconds < _FOREVER else None
        self.options._timeout = timeout
        self.comm.timeout = self.messages.timeout = self._seconds
        share(self.messages, self._seconds)

    _set_default_timeout = set_timeout

    def split_group(
        self,
        new_ranks: Sequence[int],
        timeout: timedelta | None = None,
        opts: Any = None,
        group_name: str | None = None,
        group_desc: str | None = None,
        device_types: Any = None,
    ) -> ProcessGroup | None:
        """Return a new group of `new_ranks`, ranks of this group; None on other ranks.

        Only `new_ranks` have to call it, all of them.
        """
        if self._rank not in new_ranks:
            return None
        name = group_name or f"{self._name}:{','.join(map(str, new_ranks))}"
        with self._translating("split_group"), self._performing:
            made = ProcessGroup(
                self.comm.create_group(list(new_ranks), _tag(name)),
                name,
                timeout or self.options._timeout,
                dist.PrefixStore(f"{name}/", self._store),
            )
        made._set_group_name(name)
        made._set_group_desc(group_desc or f"{self._description}:split")
        return made

    def shutdown(self) -> None:
        """Let queued operations be performed at once.

        As this call is not collective, the communicators are freed later: when the members make
        another group together.
        """
        if self._operations:
            self.hasten(self._operations[-1][0])
        self._advance()
        quiet = not self._queued and not self._pending
        if self.key is not None and quiet:
            _RETIRED[self.key] = (self.comm, self.messages)

    def abort(self) -> None:
        """Let queued operations be performed at once, as :meth:`shutdown` does."""
        self.shutdown()

    # -- running ----------------------------------------------------------------------------------

    def translated(self, error: MpidistError, what: str, seconds: Any = UNSET) -> BaseException:
        """Return torch.distributed's exception for a communication error of mpidist.

        Other errors are returned as they are.  `what` describes the operation in the message, and
        `seconds` was its deadline, by default the group's.
        """
        if not isinstance(error, CommunicationError):
            return error
        late = ""
        if isinstance(error, CollectiveTimeout):
            waited = _milliseconds(self._seconds if seconds is UNSET else seconds)
            late = f" Timed out waiting {waited}ms:"
        made = dist.DistBackendError(f"{what}:{late} {error}")
        made.__cause__ = error
        return made

    @contextlib.contextmanager
    def _translating(self, name: str) -> Iterator[None]:
        """Raise torch.distributed's exception for a communication error; `name` is the call's."""
        try:
            yield
        except CommunicationError as error:
            what = f"rank {self._rank}: {name} of group {self._name!r}"
            raise self.translated(error, what) from error

    def what(self, name: str, number: int) -> str:
        """Return the description of an operation in messages of errors."""
        return f"rank {self._rank}: {name} #{number} of group {self._name!r}"

    def _run(
        self,
        name: str,
        act: Act,
        outputs: Sequence[Tensor],
        opts: Any,
        inputs: Sequence[Tensor] = (),
    ) -> Any:
        """Run an operation, the function `act`, and return its Work.

        A blocking operation runs in the calling thread, one with ``async_op=True`` is queued.
        While operations are queued, blocking ones are queued behind them.  `inputs` are needed only
        if there may be no `outputs`: to find the operation's GPU.
        """
        self._sequence += 1
        if self._sequence == 1:
            self._check_alone()
        seconds = self._seconds
        if opts.timeout != _UNSET_TIMEOUT:
            timeout = opts.timeout.total_seconds()
            seconds = timeout if 0 < timeout < _FOREVER else seconds
        if torch.autograd._profiler_enabled():
            act = _recorded(name, act, opts.asyncOp)
        if not opts.asyncOp and not self._queued:
            with self._performing:
                error = self._attempt(name, self._sequence, act, seconds)
            if error is not None:
                raise error
            return _BLOCKING
        work = _Queued(self, name, self._sequence, outputs)
        for x in (*outputs, *inputs):
            if framework.is_there(x):
                act = framework.on_side_stream(act, x, self._side_streams)
                break
        if self.comm.debug:
            act = begun_here(act)
        with self._counting:
            self._queued += 1
            self._newest = work.number
            self._operations.append((work, act, seconds))
        if not self._served:
            self._have_served()
        elif self._left and self._hints.empty():
            self._hints.put(None)
        if self._coalesced is not None:
            self._coalesced.append(work)
        if _GIVEN_TO_GRAPHS():
            for x in outputs:  # for wait_tensor(x) in a graph, as C++ does for its own groups
                _distributed_c10d._register_work(x, work)
        return work

    def _check_alone(self) -> None:
        """Raise InvalidArgument if the group was made with other backends too: "cuda:nccl,…".

        PyTorch would not use the other ones.  The names of a group's backends are known only when
        the group is complete, so this is called at the first operation.
        """
        named = c10d._world.pg_backend_config.get(self, "")
        if not all(part.endswith("mpidist") for part in named.split(",") if part):
            raise InvalidArgument(
                f"rank {self._rank}: group {self._name!r} was made with backend {named!r}: "
                f"expected 'mpidist', alone{BESIDE}"
            )

    def _attempt(
        self, name: str, number: int, act: Act, seconds: float | None
    ) -> BaseException | None:
        """Perform an operation with a deadline; return its error, None if it succeeded."""
        comm = self.comm
        try:
            if seconds is not self._seconds:
                comm.timeout = seconds
            act()
        except MpidistError as error:
            return self.translated(error, self.what(name, number), seconds)
        except BaseException as error:
            return error
        finally:
            if seconds is not self._seconds:
                comm.timeout = self._seconds
        return None

    # Queued operations.  Almost always the thread that queues an operation waits for it soon; going
    # to another thread and back takes 30 to 100 µs, so it performs what it waits for:
    #
    #   caller   queue 1, 2, 3 … wait(2): performs 1, 2 … computes ………………………… wait(3)
    #   server       looks            looks, gives way       looks   looks: performs 3
    #
    # A server performs what it has seen at its last look, unless a thread waits for it.  Its looks
    # become rarer while it finds nothing to do, since each takes Python's lock; but where nobody
    # waited for the last operation, it is woken up for the next.

    def _have_served(self) -> None:
        """Have a thread serve the queued operations, if none does."""
        with self._counting:
            if self._served or not self._operations:
                return
            self._served = True
        _THREADS.start(self._serve)

    def _serve(self) -> None:
        """Perform the queued operations for which nobody waits soon, until there are no more."""
        pause, seen, quiet = _LOOK_SECONDS[0], 0, 0
        while True:
            try:
                self._hints.get(timeout=pause)
                pause = _LOOK_SECONDS[0]
            except queue.Empty:
                pause = min(2 * pause, _LOOK_SECONDS[1])
            while self._operations and not self._waiting:
                last = max(seen, self._hastened) if not _THREADS.ending else math.inf
                with self._performing:
                    if not self._operations:
                        break
                    number = self._operations[0][0].number
                    if number > last:
                        break
                    settles = self._perform_next()
                pause, self._left = _LOOK_SECONDS[0], number > self._hastened
                if settles is not None and not self._completed(settles):
                    return
            newest = self._newest
            quiet = quiet + 1 if newest == seen else 0
            seen = newest
            if not self._operations and (quiet == _QUIET_LOOKS or _THREADS.ending):
                with self._counting:
                    if not self._operations:
                        self._served = False
                        return

    def _completed(self, future: Any) -> bool:
        """Complete a future in the serving thread; return whether that is to go on serving.

        Callbacks may start and await operations, for which another thread serves meanwhile.
        """
        with self._counting:
            self._served = False
        self._have_served()
        _THREADS.complete(future)
        with self._counting:
            if self._served:
                return False
            self._served = True
        return True

    def _perform_next(self) -> Any:
        """Perform the first queued operation; `_performing` is held.

        Return its future, which is to be completed, or None.
        """
        work, act, seconds = self._operations.popleft()
        error = self._attempt(work._name, work.number, act, seconds)
        with self._counting:
            self._queued -= 1
        return work.record(error)

    def hasten(self, work: _Queued) -> None:
        """Have an operation, and those before it, performed at once by another thread."""
        with self._counting:
            self._hastened = max(self._hastened, work.number)
        if self._hints.empty():
            self._hints.put(None)
        self._have_served()

    def await_work(self, work: _Queued, seconds: float | None) -> bool:
        """Wait for a queued operation; return False if `seconds` pass before its end.

        The calling thread performs it, and those before it; but not with a limit of `seconds`, nor
        while sends and receives are pending, which make progress meanwhile, nor in a daemon thread,
        which Python does not wait for at its end.
        """
        if seconds is None and not self._pending and not threading.current_thread().daemon:
            with self._counting:
                self._waiting += 1
            try:
                with self._performing:
                    while self._operations and not work._ended:
                        first, self._left = self._operations[0][0], False
                        settles = self._perform_next()
                        if settles is not None:
                            _THREADS.start(functools.partial(_THREADS.complete, settles))
                        if isinstance(first._error, KeyboardInterrupt):  # of this wait
                            raise first._error
            finally:
                with self._counting:
                    self._waiting -= 1
                if self._hastened > work.number and self._operations:
                    self._hints.put(None)  # the server has given way
            if work._ended:
                return True
        self.hasten(work)
        event = work.event()
        if not self._pending:
            return event.wait(seconds)
        waited = 0.0
        while not event.wait(_POLL_SECONDS):
            waited += _POLL_SECONDS
            if seconds is not None and waited > seconds:
                return False
            self._advance()
        return True

    def _advance(self) -> None:
        """Let sends and receives make progress, and forget those that have ended."""
        self._pending -= {m for m in tuple(self._pending) if m.is_completed()}

    def _flat(self, x: Tensor) -> Any:
        """Return the memory of a contiguous dense tensor, flat, as the communicator takes it.

        It is a numpy array for a tensor of the CPU, and a tensor for one on a GPU.
        """
        if x.device.type not in DEVICES or x.layout is not torch.strided:
            kind = f"with layout {x.layout}" if x.device.type in DEVICES else f"on {x.device}"
            raise NotImplementedError(
                f"rank {self._rank}: a tensor {kind}: group {self._name!r} of the backend mpidist "
                f"takes dense tensors on {' and '.join(DEVICES)}, and sparse COO tensors in "
                f"all_reduce with SUM: pass x.cpu() or x.to_dense(){BESIDE}"
            )
        if framework.is_there(x):
            return x.detach().view(-1)
        try:
            return ARRAYS.of(x)
        except (InvalidArgument, RuntimeError) as error:  # PyTorch's: a tensor of a transform
            what = error if isinstance(error, InvalidArgument) else host.WITHOUT_MEMORY
            raise InvalidArgument(f"rank {self._rank}: a tensor is {what}") from None

    def _through(self, x: Tensor, use: str) -> tuple[Any, Act | None, Act | None]:
        """Return memory for a contiguous tensor, and functions that load and store it.

        It is that of the tensor, as :meth:`_flat` returns it, without functions; for a small tensor
        at an address that is not known yet other memory, which the communicator knows.  `use`
        distinguishes the tensors of a call.  What is symmetric is passed as it is: the ranks must
        pass the same.
        """
        if not _on_host(x) or x.layout is not torch.strided:
            return self._flat(x), None, None
        try:
            key = (x.data_ptr(), x.numel(), x.dtype)
        except RuntimeError:  # of a tensor of a transform, which _flat() refuses
            return self._flat(x), None, None
        known = ARRAYS.known(key)
        if known is not None:
            return known, None, None
        address, nbytes = key[0], x.nbytes
        again = self._last.get(use) == key  # a loop over one tensor
        self._last[use] = key
        small = 0 < nbytes <= _SMALL and len(self._scratch) < _MOST_SCRATCH
        if again or not address or not small or is_symmetric(self.comm, address):
            return self._flat(x), None, None
        tensor, array = self._kept(x, use, key[1])
        there = tensor.data_ptr()
        load = functools.partial(_move, there, address, nbytes)
        return array, load, functools.partial(_move, address, there, nbytes)

    def _kept(self, x: Tensor, use: str, numel: int) -> tuple[Tensor, Any]:
        """Return memory for `numel` elements of the dtype of `x`, as tensor and array.

        It is kept as long as the group: queued operations have only the array.
        """
        found = self._scratch.get((use, numel, x.dtype))
        if found is None:
            tensor = x.detach().new_empty(numel)
            found = tensor, self._flat(tensor)
            self._scratch[use, numel, x.dtype] = found
        return found

    def _joining(self, x: Tensor, numel: int) -> tuple[Tensor, Any]:
        """Return a flat tensor for `numel` elements like those of `x`, and its memory.

        It is used until the end of the operation.
        """
        small = 0 < numel * x.element_size() <= _SMALL and len(self._scratch) < _MOST_SCRATCH
        if _on_host(x) and small:
            return self._kept(x, "joined", numel)
        joined = x.new_empty(numel)
        return joined, self._flat(joined)

    def _operation(self, op: Any, dtype: torch.dtype) -> tuple[str, Change | None, Change | None]:
        """Return mpidist's name of a reduction, and functions to apply to its input and its result.

        The input of PREMUL_SUM is multiplied by the factor first.  The mean of integers is computed
        as a sum, which is divided.  For other reductions the two functions are None.
        """
        known = self._sums.get(dtype)
        if known is not None and op == _Kind.SUM:  # a tenth of the time of what follows
            return known
        kind = getattr(op, "op", op)
        known = self._named(op, kind, dtype)
        if kind == _Kind.SUM:
            self._sums[dtype] = known
        return known

    def _named(
        self, op: Any, kind: Any, dtype: torch.dtype
    ) -> tuple[str, Change | None, Change | None]:
        name = OPERATIONS.get(kind)
        if name is None:
            if kind == _Kind.PREMUL_SUM:
                return "sum", self._scale(op, dtype), None
            allowed = ", ".join([*(kind.name for kind in OPERATIONS), "PREMUL_SUM"])
            raise InvalidArgument(
                f"rank {self._rank}: op={kind.name}: expected an operation of the backend "
                f"mpidist: {allowed}"
            )
        if needs := host.needs(dtype):
            raise UnsupportedDtype(f"rank {self._rank}: op={name!r} of a tensor of {dtype}{needs}")
        if dtype is torch.bool:
            name = ON_BOOL.get(name, name)
        elif name == "mean" and not (dtype.is_floating_point or dtype.is_complex):
            return "sum", None, self._divide
        return name, None, None

    def _scale(self, op: Any, dtype: torch.dtype) -> Change:
        """Return the function that multiplies an input of PREMUL_SUM by the factor, in place."""
        if dtype not in SCALED:
            allowed = ", ".join(map(str, SCALED))
            raise InvalidArgument(
                f"rank {self._rank}: PREMUL_SUM of {dtype}: expected one of {allowed}"
            )
        _, factor = op.__getstate__()  # a number, or a tensor with one element
        factor = float(factor)
        return lambda x: x.detach().mul_(factor)

    def _divide(self, x: Tensor) -> None:
        """Divide a sum of integers by the number of members, towards zero as NCCL does."""
        x.div_(self._size, rounding_mode="trunc")

    def _writable(self, what: str, x: Tensor, late: bool = False) -> tuple[Tensor, Act | None]:
        """Return a contiguous tensor for a result, and a function that copies it into `x`.

        If `x` is contiguous, it is `x` itself, with None in place of the function.  `what` names
        `x`, which must pass :meth:`_check_separate`: at once, or if `late`, when the function is
        called.  That is for tensors that not all members write: the others have sent by then.
        """
        if x.is_contiguous() and not x.is_conj() and not x.is_neg():
            return x, None
        if not late:
            self._check_separate(what, x)
        given, made = x.detach(), _readable(x)

        def back() -> None:
            self._check_separate(what, x)
            given.copy_(made)

        return made, back

    def _check_separate(self, what: str, *tensors: Tensor) -> None:
        """Raise InvalidArgument if elements of a tensor, which is to be written, share memory.

        `what` names the tensors in the message, with {} in place of the index.
        """
        for k, x in enumerate(tensors):
            if x.layout is not torch.strided or x.is_contiguous():
                continue
            axes = [(step, n) for step, n in zip(x.stride(), x.shape) if n > 1]
            span = 1 + sum(step * (n - 1) for step, n in axes)
            if x.numel() > span or any(step == 0 for step, _ in axes):
                raise InvalidArgument(
                    f"rank {self._rank}: {what.format(k)} has shape {tuple(x.shape)} and strides "
                    f"{x.stride()}, with which elements share memory, as after expand(): expected "
                    "memory for each element, as clone() and contiguous() give"
                )

    # -- collectives ------------------------------------------------------------------------------

    @_gated
    def allreduce(self, tensors: Any, opts: Any = None, timeout: Any = None) -> Any:
        """Combine a tensor of all ranks elementwise, in place on every rank."""
        (x,) = _list(tensors)
        opts = _options(c10d.AllreduceOptions, timeout, opts, reduceOp=opts)
        if x.layout is torch.sparse_coo:
            return self._run("all_reduce", lambda: self._allreduce_sparse(x, opts), [x], opts)
        out, back = self._writable("all_reduce: tensor", x)
        op, before, after = self._operation(opts.reduceOp, x.dtype)
        data, load, store = self._through(out, "out")
        run = functools.partial(self.comm.allreduce, data, op, data)
        act = _composed(_of(before, out), load, run, store, _of(after, out), back)
        return self._run("all_reduce", act, [x], opts)

    def _allreduce_sparse(self, x: Tensor, opts: Any) -> None:
        """Sum a sparse tensor over all ranks, in place; equal indices are added up."""
        if getattr(opts.reduceOp, "op", opts.reduceOp) != _Kind.SUM:
            kind = getattr(opts.reduceOp, "op", opts.reduceOp)
            raise InvalidArgument(
                f"rank {self._rank}: op={kind.name} of a sparse tensor in all_reduce: expected SUM"
            )
        x.copy_(add_up(self.comm, x.detach().coalesce()))

    @_gated
    def allreduce_coalesced(self, tensors: Sequence[Tensor], opts: Any = None) -> Any:
        """Combine several tensors of all ranks in place, by one allreduce for each dtype."""
        opts = _options(c10d.AllreduceCoalescedOptions, None, opts)
        self._check_separate("all_reduce_coalesced: tensors[{}]", *tensors)
        kinds: dict[torch.dtype, list[Tensor]] = {}
        for x in tensors:
            kinds.setdefault(x.dtype, []).append(x.detach())

        def act() -> None:
            for dtype, some in kinds.items():
                joined = _joined(some)
                op, before, after = self._operation(opts.reduceOp, dtype)
                data = self._flat(joined)
                if before is not None:
                    before(joined)
                self.comm.allreduce(data, op, out=data)
                if after is not None:
                    after(joined)
                _deal(joined, some)

        return self._run("all_reduce_coalesced", act, tensors, opts)

    @_gated
    def reduce(self, tensors: Any, opts: Any = None, op: Any = None, timeout: Any = None) -> Any:
        """Combine a tensor of all ranks elementwise, in place on the root.

        `op` is the operation if `opts` is the root's rank.
        """
        (x,) = _list(tensors)
        opts = _options(c10d.ReduceOptions, timeout, opts, rootRank=opts, reduceOp=op)
        root = self._check_root(opts.rootRank)
        out, back = self._writable("reduce: tensor", x, late=True)
        name, before, after = self._operation(opts.reduceOp, x.dtype)
        mine = root == self._rank
        if before is not None and not mine:
            out = out.detach().clone()
        data, load, store = self._through(out, "out")
        run = functools.partial(self.comm.reduce, data, name, root, data if mine else None)
        ends = (store, _of(after, out), back) if mine else ()
        act = _composed(_of(before, out), load, run, *ends, keeping=out)
        return self._run("reduce", act, [x], opts)

    @_gated
    def broadcast(self, tensors: Any, opts: Any = None, timeout: Any = None) -> Any:
        """Send the root's tensor to all."""
        (x,) = _list(tensors)
        opts = _options(c10d.BroadcastOptions, timeout, opts, rootRank=opts)
        out, back = self._writable("broadcast: tensor", x, late=True)
        (data, load, store), root = self._through(out, "out"), self._check_root(opts.rootRank)
        run = functools.partial(self.comm.broadcast, data, root, data)
        if root == self._rank:  # whose tensor may not be writable: expand()
            act = _composed(load, run, keeping=out)
        else:
            act = _composed(run, store, back)
        return self._run("broadcast", act, [x], opts)

    @_gated
    def allgather(self, outputs: Any, inputs: Any, opts: Any = None, timeout: Any = None) -> Any:
        """Send each rank's tensor to all, into a list of tensors; their lengths may differ."""
        (x,) = _list(inputs)
        (outs,) = [outputs] if outputs and isinstance(outputs[0], Tensor) else outputs
        opts = _options(c10d.AllgatherOptions, timeout, opts)
        self._check_list("all_gather: tensor_list", outs, "tensor", x)
        self._check_separate("all_gather: tensor_list[{}]", *outs)
        x, counts = _readable(x), _counts(outs)
        outs = [out.detach() for out in outs]
        data, load, _ = self._through(x, "in")
        total = sum(out.numel() for out in outs)

        def act() -> None:
            if load is not None:
                load()
            joined, target = self._joining(x, total)
            self.comm.allgather(data, out=target, counts=counts)
            _deal(joined, outs)

        return self._run("all_gather", act, outs, opts)

    @_gated
    def all_gather_single(self, output: Tensor, input: Tensor, opts: Any = None) -> Any:
        """Send each rank's tensor to all, into one tensor, in rank order."""
        opts = _options(c10d.AllgatherOptions, None, opts)
        return self._run("all_gather_single", self._gathering(output, input), [output], opts)

    def _gathering(self, output: Tensor, given: Tensor) -> Act:
        self._check("all_gather_into_tensor: output", output, "input", given, self._size)
        out, back = self._writable("all_gather_into_tensor: output", output)
        own = out.data_ptr() + self._rank * given.numel() * given.element_size()
        if given.is_contiguous() and given.data_ptr() == own:  # in place on every rank
            run = functools.partial(self.comm.allgather, self._flat(given), self._flat(out))
            return _composed(run, back, keeping=given)
        given = _readable(_apart(given, out))
        data, load, _ = self._through(given, "in")
        target, _, store = self._through(out, "out")
        run = functools.partial(self.comm.allgather, data, target)
        return _composed(load, run, store, back, keeping=given)

    @_gated
    def all_gather_single_coalesced(
        self, outputs: Sequence[Tensor], inputs: Sequence[Tensor], opts: Any = None
    ) -> Any:
        """Perform several :meth:`all_gather_single` as one operation."""
        opts = _options(c10d.AllgatherOptions, None, opts)
        acts = list(map(self._gathering, outputs, inputs))
        return self._run("all_gather_coalesced", _each(acts), outputs, opts)

    @_gated
    def allgather_coalesced(
        self, outputs: Sequence[Sequence[Tensor]], inputs: Sequence[Tensor], opts: Any = None
    ) -> Any:
        """Send several tensors of each rank to all: ``outputs[r][k]`` is the k-th of rank r."""
        opts = _options(c10d.AllgatherOptions, None, opts)
        self._check_length("all_gather_coalesced: output", outputs)
        for k, x in enumerate(inputs):
            own = outputs[self._rank]
            self._check_length(f"all_gather_coalesced: output[{self._rank}]", own, len(inputs))
            self._check(
                f"all_gather_coalesced: output[{self._rank}][{k}]", own[k], f"input[{k}]", x
            )
        columns = [[given[k].detach() for given in outputs] for k in range(len(inputs))]
        for k, column in enumerate(columns):
            self._check_separate(f"all_gather_coalesced: output[{{}}][{k}]", *column)

        def act() -> None:
            for x, outs in zip(inputs, columns):
                joined = x.new_empty(sum(out.numel() for out in outs))
                mine = _readable(x)
                self.comm.allgather(self._flat(mine), out=self._flat(joined), counts=_counts(outs))
                _deal(joined, outs)

        return self._run("all_gather_coalesced", act, [t for c in columns for t in c], opts)

    @_gated
    def gather(self, outputs: Any, inputs: Any, opts: Any = None, timeout: Any = None) -> Any:
        """Send each rank's tensor to the root, into a list of tensors there, in rank order."""
        (x,) = _list(inputs)
        opts = _options(c10d.GatherOptions, timeout, opts, rootRank=opts)
        root, x = self._check_root(opts.rootRank), _readable(x)
        outs: list[Tensor] = []
        if root == self._rank:
            given = [outputs] if outputs and isinstance(outputs[0], Tensor) else outputs
            outs = [out.detach() for out in given[0]]

        def act() -> None:
            joined = None
            if root == self._rank:
                joined = x.new_empty(self._size * x.numel())
            into = None if joined is None else self._flat(joined)
            self.comm.gather(self._flat(x), root, out=into)
            if joined is not None:
                # The list is the root's alone: checked before, it would leave the others waiting.
                self._check_list("gather: gather_list", outs, "tensor", x, uneven=False)
                self._check_separate("gather: gather_list[{}]", *outs)
                _deal(joined, outs)

        return self._run("gather", act, outs, opts, [x])

    @_gated
    def gather_single(self, output: Tensor, input: Tensor, opts: Any = None) -> Any:
        """Send each rank's tensor to the root, into one tensor there, in rank order.

        PyTorch has it from 2.15 on.  `output` is used on the root only.
        """
        opts = _options(c10d.GatherOptions, None, opts)
        root, x = self._check_root(opts.rootRank), _readable(input)
        mine = root == self._rank

        def act() -> None:
            joined = x.new_empty(self._size * x.numel()) if mine else None
            into = None if joined is None else self._flat(joined)
            self.comm.gather(self._flat(x), root, out=into)
            if joined is not None:  # checked before, it would leave the others waiting
                self._check("gather_single: output", output, "input", x, self._size)
                self._check_separate("gather_single: output", output)
                output.detach().copy_(joined.view(output.shape))

        return self._run("gather_single", act, [output] if mine else [], opts, [x])

    @_gated
    def scatter(self, outputs: Any, inputs: Any, opts: Any = None, timeout: Any = None) -> Any:
        """Send one tensor of the root's list to each rank."""
        (x,) = _list(outputs)
        opts = _options(c10d.ScatterOptions, timeout, opts, rootRank=opts)
        root = self._check_root(opts.rootRank)
        (out, back), joined = self._writable("scatter: tensor", x), None
        if root == self._rank:
            given = inputs if inputs and isinstance(inputs[0], Tensor) else inputs[0]
            self._check_list("scatter: scatter_list", given, "tensor", x, uneven=False)
            joined = _joined(given)
        source = None if joined is None else self._flat(joined)
        target = self._flat(out)

        def act(_: Any = joined) -> None:  # which keeps its memory
            self.comm.scatter(source, root, out=target)
            if back is not None:
                back()

        return self._run("scatter", act, [x], opts)

    @_gated
    def reduce_scatter(
        self, outputs: Any, inputs: Any, opts: Any = None, timeout: Any = None
    ) -> Any:
        """Combine the ranks' lists of tensors elementwise; rank r gets the r-th result.

        The tensors of a list may differ in length.
        """
        (x,) = _list(outputs)
        given = inputs if inputs and isinstance(inputs[0], Tensor) else inputs[0]
        opts = _options(c10d.ReduceScatterOptions, timeout, opts, reduceOp=opts)
        self._check_list("reduce_scatter: input_list", given, "output", x)
        act = self._reducing("reduce_scatter", x, _joined(given), opts, _counts(given))
        return self._run("reduce_scatter", act, [x], opts)

    @_gated
    def reduce_scatter_single(self, output: Tensor, input: Tensor, opts: Any = None) -> Any:
        """Combine one tensor of each rank elementwise; rank r gets the r-th of equal parts."""
        opts = _options(c10d.ReduceScatterOptions, None, opts)
        self._check("reduce_scatter_tensor: input", input, "output", output, self._size)
        act = self._reducing("reduce_scatter_tensor", output, input, opts)
        return self._run("reduce_scatter_single", act, [output], opts)

    def _reducing(
        self,
        call: str,
        output: Tensor,
        given: Tensor,
        opts: Any,
        counts: Sequence[int] | None = None,
    ) -> Act:
        out, back = self._writable(f"{call}: output", output)
        given = _readable(_apart(given, out))
        name, before, after = self._operation(opts.reduceOp, given.dtype)
        if before is not None:
            given = given.detach().clone()
        data, load, _ = self._through(given, "in")
        target, _, store = self._through(out, "out")
        run = functools.partial(self.comm.reduce_scatter, data, name, target, counts=counts)
        ends = store, _of(after, out), back
        return _composed(_of(before, given), load, run, *ends, keeping=given)

    @_gated
    def reduce_scatter_single_coalesced(
        self, outputs: Sequence[Tensor], inputs: Sequence[Tensor], opts: Any = None
    ) -> Any:
        """Perform several :meth:`reduce_scatter_single` as one operation."""
        opts = _options(c10d.ReduceScatterOptions, None, opts)
        for out, x in zip(outputs, inputs):
            self._check("reduce_scatter_tensor: input", x, "output", out, self._size)
        call = "reduce_scatter_tensor"
        acts = [self._reducing(call, out, x, opts) for out, x in zip(outputs, inputs)]
        return self._run("reduce_scatter_coalesced", _each(acts), outputs, opts)

    @_gated
    def all_to_all_single(
        self,
        output: Tensor,
        input: Tensor,
        output_splits: Sequence[int],
        input_splits: Sequence[int],
        opts: Any = None,
        timeout: Any = None,
    ) -> Any:
        """Send a part of one tensor to each rank; the splits are the parts' numbers of rows.

        Empty splits mean equal parts.
        """
        opts = _options(c10d.AllToAllOptions, timeout, opts)
        many = None if input_splits or output_splits else 1
        self._check("all_to_all_single: output", output, "input", input, many)
        out, back = self._writable("all_to_all_single: output", output)
        x = _readable(_apart(input, out))
        data, load, _ = self._through(x, "in")
        target, _, store = self._through(out, "out")
        sends = None
        if input_splits or output_splits:
            sends = self._elements(x, input_splits, "input")
            gets = self._elements(out, output_splits, "output")
            if sum(gets) != out.numel() or sum(sends) != x.numel():
                raise InvalidArgument(
                    f"rank {self._rank}: all_to_all_single: input_split_sizes={list(input_splits)} "
                    f"of {tuple(x.shape)}, output_split_sizes={list(output_splits)} of "
                    f"{tuple(out.shape)}: expected sizes that add up to the rows"
                )

        run = functools.partial(self.comm.alltoall, data, target, counts=sends)
        act = _composed(load, run, store, back, keeping=x)
        return self._run("all_to_all_single", act, [output], opts)

    def _elements(self, x: Tensor, splits: Sequence[int], which: str) -> list[int]:
        """Return the number of elements for each rank, given the rows for each in `splits`.

        Empty splits mean equally many for all ranks.  `which`, "input" or "output", is the name of
        `x` in the message of an error.
        """
        if not splits:
            if x.dim() and x.shape[0] % self._size:
                raise InvalidArgument(
                    f"rank {self._rank}: all_to_all_single: the {which} has {x.shape[0]} rows, "
                    f"which {self._size} ranks cannot share evenly: pass {which}_split_sizes"
                )
            return [x.numel() // self._size] * self._size
        self._check_length(f"all_to_all_single: {which}_split_sizes", splits)
        row = x[0].numel() if x.dim() and x.shape[0] else 0
        return [n * row for n in splits]

    @_gated
    def alltoall(
        self, outputs: Sequence[Tensor], inputs: Sequence[Tensor], opts: Any = None
    ) -> Any:
        """Send one tensor of a list to each rank; the tensors may differ in length."""
        opts = _options(c10d.AllToAllOptions, None, opts)
        self._check_length("all_to_all: input_tensor_list", inputs)
        own, what = inputs[self._rank], f"input_tensor_list[{self._rank}]"
        self._check_list("all_to_all: output_tensor_list", outputs, what, own)
        self._check_separate("all_to_all: output_tensor_list[{}]", *outputs)
        outs, counts = [out.detach() for out in outputs], [t.numel() for t in inputs]
        given = _joined(inputs)

        def act() -> None:
            joined = given.new_empty(sum(out.numel() for out in outs))
            self.comm.alltoall(self._flat(given), out=self._flat(joined), counts=counts)
            _deal(joined, outs)

        return self._run("all_to_all", act, outs, opts)

    @_uncompiled
    def barrier(self, opts: Any = None, timeout: Any = None) -> Any:
        """Wait until all members have reached the barrier."""
        if isinstance(opts, timedelta):
            opts, timeout = None, opts
        opts = _options(c10d.BarrierOptions, timeout, opts)
        return self._run("barrier", self.comm.barrier, [], opts)

    @_uncompiled
    def monitored_barrier(
        self, timeout: timedelta | None = None, wait_all_ranks: bool = False
    ) -> None:
        """Wait until all members have called this, by messages to and from rank 0, as gloo does.

        The group stays usable if some members do not call it.

        Parameters
        ----------
        timeout : timedelta, optional
            Longest wait; by default the group's timeout.
        wait_all_ranks : bool
            Whether the error of rank 0 names all missing ranks, not only the first.

        Raises
        ------
        DistBackendError
            Past the timeout; on rank 0 with the missing ranks.  Also if a send or receive of the
            group has timed out before, after which none works.
        """
        with self._translating("monitored_barrier"):
            self._monitor(timeout, wait_all_ranks)

    def _monitor(self, timeout: timedelta | None, wait_all_ranks: bool) -> None:
        self._monitored += 1
        tag, comm = self._monitored % (max_tag(self.messages) + 1), self.messages
        seconds = self._seconds if timeout is None else timeout.total_seconds()
        until, length = time.monotonic() + (seconds or 0), f"{_milliseconds(seconds)} ms"

        def came(peer: int) -> bool:
            while comm.iprobe(peer, tag, "object") is None:
                if seconds is not None and time.monotonic() >= until:
                    return False
                time.sleep(2e-4)
            comm.recv_object(peer, tag)
            return True

        if self._rank:
            comm.send_object("here", 0, tag)
            if not came(0):
                raise dist.DistBackendError(
                    f"Rank {self._rank} successfully reached monitoredBarrier, but received errors "
                    f"while waiting for send/recv from rank 0 for {length}: its error names the "
                    "missing ranks"
                )
            return
        if seconds == 0:
            raise dist.DistBackendError(f"Rank 0 timed out in monitoredBarrier after {length}")
        missing = []
        for peer in range(1, self._size):
            if not came(peer):
                missing.append(peer)
                if not wait_all_ranks:
                    break
        if missing:
            which = f"{plural(len(missing), 'Rank')} {', '.join(map(str, missing))}"
            raise dist.DistBackendError(f"{which} failed to pass monitoredBarrier in {length}")
        for peer in range(1, self._size):
            comm.send_object("all are here", peer, tag)

    def empty(self, size: Sequence[int], dtype: torch.dtype) -> Tensor:
        """Return a tensor of zeros in symmetric memory, see :func:`mpidist.torch.empty`."""
        memory = self._symmetric(math.prod(size) * dtype.itemsize)
        return torch.from_numpy(memory).view(dtype)[: math.prod(size)].view(tuple(size))

    def _symmetric(self, nbytes: int) -> np.ndarray:
        """Return a new array of at least `nbytes` bytes in symmetric memory; collective."""
        made: list[np.ndarray] = []

        def act() -> None:
            made.append(self.comm.empty(-(-max(nbytes, 1) // 16) * 16, np.uint8))
            ARRAYS.forget()  # private memory may have had these addresses
            weakref.finalize(made[0], ARRAYS.forget)

        opts = c10d.BarrierOptions()
        opts.asyncOp = False
        self._run("empty", act, [], opts).wait()
        return made[0]

    def supports_tensor_alloc(self, device: torch.device) -> bool:
        """Return whether `device` is the CPU, and all ranks are on one node.

        Otherwise PyTorch does not call :meth:`allocate_tensor`.
        """
        return torch.device(device).type == "cpu" and self.comm.topology.num_nodes == 1

    def allocate_tensor(self, size: int, *, dtype: torch.dtype, device: torch.device) -> Tensor:
        """Return a flat tensor of `size` elements, for FSDP2; collective.

        It is in symmetric memory, which is used again once a tensor is freed on all ranks.  With
        too many tensors of one size in use, it is an ordinary tensor.
        """
        pool = self._buffers.setdefault((size, dtype), [])
        idle = [k for k in range(len(pool)) if sys.getrefcount(pool[k]) == _UNUSED]
        mine = np.array([sum(1 << k for k in idle)])
        with self._translating("allocate_tensor"):
            common = int(self.messages.allreduce(mine, "and")[0])
        if not common and len(pool) == _MOST_BUFFERS:
            return torch.empty(size, dtype=dtype)
        if not common:
            pool.append(self._symmetric(size * dtype.itemsize))
        which = (common & -common).bit_length() - 1 if common else -1
        return torch.from_numpy(pool[which]).view(dtype)[:size]

    def _start_coalescing(self, device: torch.device) -> None:
        """Begin a coalesced block, whose calls remain separate operations."""
        self._coalesced = []

    def _end_coalescing(self, device: torch.device) -> Any:
        """End the block; return the Work of all its operations, which PyTorch waits for instead."""
        works, self._coalesced = self._coalesced or [], None
        return _Coalesced(works)

    # older names of the same
    _allgather_base = all_gather_single
    gather_into_tensor = gather_single
    allgather_into_tensor_coalesced = all_gather_single_coalesced
    _reduce_scatter_base = reduce_scatter_single
    reduce_scatter_tensor_coalesced = reduce_scatter_single_coalesced
    alltoall_base = all_to_all_single

    def _check_length(self, what: str, given: Sequence[Any], length: int | None = None) -> None:
        if len(given) != (self._size if length is None else length):
            each = f"{self._size}, one for each member of group {self._name!r}"
            raise InvalidArgument(
                f"rank {self._rank}: {what} has {len(given)} entries, expected "
                f"{each if length is None else length}"
            )

    def _check(self, what: str, x: Tensor, name: str, like: Tensor, times: int | None = 1) -> None:
        """Raise InvalidArgument unless `x` has the dtype of `like`, and `times` as many elements.

        The number of elements is not checked if `times` is None.  `what` and `name` are the names
        of `x` and `like` in the message.
        """
        if x.dtype is not like.dtype:
            raise InvalidArgument(
                f"rank {self._rank}: {what} is {x.dtype}, expected {like.dtype}, as {name} is"
            )
        if times is not None and x.numel() != times * like.numel():
            members = f"{self._size} ranks times " if times == self._size > 1 else ""
            raise InvalidArgument(
                f"rank {self._rank}: {what} has shape {tuple(x.shape)}, expected "
                f"{times * like.numel()} elements: {members}those of {name}, of shape "
                f"{tuple(like.shape)}"
            )

    def _check_list(
        self, what: str, given: Sequence[Tensor], name: str, like: Tensor, uneven: bool = True
    ) -> None:
        """Raise InvalidArgument unless a list has one tensor for each member, to match `like`.

        Each must have the dtype and the number of elements of `like`; if `uneven`, the number is
        checked for this rank's tensor only.  `what` and `name` are the names of the list and of
        `like` in the message.
        """
        self._check_length(what, given)
        for k, x in enumerate(given):
            self._check(f"{what}[{k}]", x, name, like, None if uneven and k != self._rank else 1)

    # -- messages ---------------------------------------------------------------------------------

    @_gated
    def send(self, tensors: Any, peer: int, tag: int = 0) -> Any:
        """Send a tensor to the member with rank `peer` in the group."""
        (x,) = _list(tensors)
        what = f"rank {self._rank}: send to rank {peer} of group {self._name!r}, tag {tag}"
        given = _readable(x)
        return self._post(what, [given], lambda: self.messages.isend(self._flat(given), peer, tag))

    @_gated
    def recv(self, tensors: Any, peer: int | None, tag: int = 0) -> Any:
        """Receive a tensor from the member with rank `peer` in the group; from any if None."""
        (x,) = _list(tensors)
        who = "any rank" if peer is None else f"rank {peer}"
        what = f"rank {self._rank}: recv from {who} of group {self._name!r}, tag {tag}"
        out, back = self._writable("recv: tensor", x)
        message = self._post(what, [x], lambda: self.messages.irecv(self._flat(out), peer, tag))
        message._back = back
        return message

    @_uncompiled
    def recv_anysource(self, tensors: Any, tag: int = 0) -> Any:
        """Receive a tensor from any member; ``source_rank()`` of the Work returns the sender."""
        return self.recv(tensors, None, tag)

    def _post(self, what: str, outputs: Sequence[Tensor], begin: Callable[[], Any]) -> _Message:
        if torch.autograd._profiler_enabled():
            _recorded("recv" if ": recv" in what else "send", begin, True)
        try:
            work = begin()
        except MpidistError as error:
            raise self.translated(error, what) from error
        message = _Message(self, what, outputs, work)
        self._pending -= {m for m in tuple(self._pending) if m._ended}
        if len(self._pending) > _MOST_PENDING:  # nobody waits for them
            self._advance()
        self._pending.add(message)
        if self._coalesced is not None:
            self._coalesced.append(message)
        return message


def _recorded(name: str, act: Act, mark: bool) -> Act:
    """Return `act`, so that a running profiler records it as ``mpidist:name``.

    With `mark` the call is recorded, not the operation: the thread of the group is not profiled.
    """
    if mark:
        with record_function(f"mpidist:{name}"):
            return act

    def run() -> None:
        with record_function(f"mpidist:{name}"):
            act()

    return run


def _list(x: Any) -> Sequence[Tensor]:
    """Return the one tensor of a call in a list: c10d passes such a list, or the tensor."""
    tensors = [x] if isinstance(x, Tensor) else x
    if len(tensors) != 1:
        raise InvalidArgument(f"{len(tensors)} tensors: a process group takes one per call")
    return tensors


def _options(kind: type, timeout: timedelta | None, given: Any, **fields: Any) -> Any:
    """Return c10d's options of a call: `given` if of type `kind`, else new ones with `fields`."""
    if isinstance(given, kind):
        return given
    made = kind()
    for name, value in fields.items():
        if value is not None:
            setattr(made, name, value)
    if timeout is not None:
        made.timeout = timeout
    return made


def _apart(x: Tensor, out: Tensor) -> Tensor:
    """Return `x`, or a copy of it if it may share memory with `out`."""
    start, nbytes = out.data_ptr(), out.numel() * out.element_size()
    mine = x.data_ptr()
    last = mine + (x.untyped_storage().nbytes() if not x.is_contiguous() else x.nbytes)
    if not mine:  # no memory, which _flat() refuses
        return x
    return x.clone() if mine < start + nbytes and start < last and nbytes else x


def _of(change: Change | None, x: Tensor) -> Act | None:
    return None if change is None else functools.partial(change, x)


def _composed(*steps: Act | None, keeping: Tensor | None = None) -> Act:
    """Return a function that calls `steps` one after another; None is left out.

    It keeps the memory of the tensor `keeping`, of which some of them have the address only.
    """
    some = [step for step in steps if step is not None]
    if len(some) == 1 and keeping is None:
        return some[0]

    def act(_: Tensor | None = keeping) -> None:
        for step in some:
            step()

    return act


def _each(acts: Sequence[Act]) -> Act:
    def act() -> None:
        for one in acts:
            one()

    return act


def _tag(name: str) -> int:
    return zlib.crc32(name.encode()) % 32000


def create(opts: Any, _: Any = None) -> ProcessGroup:
    """Return the process group that c10d's options describe; all members call it.

    Raises
    ------
    InvalidArgument
        If rank or size are not those of MPI.
    DistBackendError
        If communication fails, such as when a member has not called it at the timeout.
    """
    timeout = opts.timeout
    seconds = timeout.total_seconds()
    world = root(seconds if 0 < seconds < _FOREVER else None)
    ranks = list(opts.global_ranks_in_group)
    if not ranks and (opts.group_rank, opts.group_size) != (world.rank, world.size):
        raise InvalidArgument(
            f"rank {world.rank}: init_process_group: rank={opts.group_rank}, "
            f"world_size={opts.group_size}, but MPI says rank {world.rank} of {world.size}: start "
            "the processes by mpidist run, mpirun or srun, not by torchrun"
        )
    name, members = str(opts.group_id), tuple(ranks or range(world.size))
    detail = dist.get_debug_level() == dist.DebugLevel.DETAIL
    try:
        comm = world.create_group(members, _tag(name), debug=detail or None)
        # All members have come; what follows cannot be interrupted, and connects nodes.
        comm.timeout = None if world.timeout is None else max(world.timeout, _SETUP_SECONDS)
        _free_retired(comm, members)
        group = ProcessGroup(comm, name, timeout, opts.store)
    except CommunicationError as error:
        call = "new_group" if ranks else "init_process_group"
        late = ""
        if isinstance(error, CollectiveTimeout):
            late = f" Timed out waiting {_milliseconds(world.timeout)}ms:"
        raise dist.DistBackendError(
            f"rank {world.rank}: {call} of group {name!r}, which its members are to call:{late} "
            f"{error}"
        ) from error
    _MADE[members] = _MADE.get(members, 0) + 1
    group.key = (members, _MADE[members])
    return group


# -- torch.distributed.monitored_barrier ----------------------------------------------------------

_OF_TORCH = dist.monitored_barrier


@functools.wraps(_OF_TORCH)
def monitored_barrier(
    group: Any = None, timeout: timedelta | float | None = None, wait_all_ranks: bool = False
) -> None:
    """Call :meth:`ProcessGroup.monitored_barrier`, for groups of this backend."""
    chosen = c10d._get_default_group() if group is None else group
    if not isinstance(chosen, ProcessGroup):
        return _OF_TORCH(group, timeout, wait_all_ranks)
    if isinstance(timeout, float):  # torch.distributed takes it too
        timeout = timedelta(seconds=timeout)
    chosen.monitored_barrier(timeout, wait_all_ranks)


# PyTorch's own refuses every backend but gloo by its name, before it asks the group.
dist.monitored_barrier = c10d.monitored_barrier = monitored_barrier
