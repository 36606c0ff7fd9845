"""NCCL through cupy: a communicator over the ranks of an mpidist communicator, one GPU each.

Used by the executors in :mod:`.collectives` and :mod:`.schedules`, and directly by users.
"""

from __future__ import annotations

import atexit
import os
import socket
import threading
import time
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from queue import SimpleQueue
from typing import Any

import numpy as np

from ...device.array import DeviceArray
from ...device.base import Device
from ...device.find import find_device, installed_device, why_no_device
from ...errors import (
    CollectiveTimeout,
    CommunicationError,
    InvalidArgument,
    Unsupported,
    UnsupportedDtype,
)
from ..assignment import shared_gpus

NAMES = ("int8", "uint8", "int32", "uint32", "int64", "uint64", "float16", "float32", "float64")
DTYPES: dict[str, int] = {**{name: code for code, name in enumerate(NAMES)}, "bfloat16": 9}
OPS: dict[str, int] = {"sum": 0, "prod": 1, "max": 2, "min": 3, "mean": 4}
MIN_VERSION = 21000  # NCCL 2.10, the first with bfloat16 and with the mean
SHARING_VERSION = 23003  # NCCL 2.30.3, the first that lets ranks share a GPU, if it is told so
SHARING = "NCCL_MULTI_RANK_GPU_ENABLE"
ABORT_AFTER = 2.0  # seconds that an abort leaves a call of another thread to return
ABORT_SECONDS = 10.0  # for which an abort is waited
_COMPLEX = {"complex64": "float32", "complex128": "float64"}


def version_text(version: int) -> str:
    """Return a version number of NCCL as text: "2.27.3" for 22703."""
    return f"{version // 10000}.{version // 100 % 100}.{version % 100}"


def why_too_old(version: int) -> str:
    """Return why a version of NCCL cannot be used, or "" if it can."""
    if version >= MIN_VERSION:
        return ""
    return (
        f"NCCL {version_text(version)} is too old: needed is {version_text(MIN_VERSION)}; "
        "install a newer nvidia-nccl-cu12"
    )


def has_sum(dtype: np.dtype) -> bool:
    """Return whether NCCL can compute sums and means of a dtype."""
    return dtype.isnative and dtype.name in (*DTYPES, *_COMPLEX)


def type_of(dtype: np.dtype, op: str | None, rank: int) -> tuple[int, int]:
    """Return NCCL's type number for a dtype, and how many of that type make up one element.

    A call that only moves data (`op` None) works for any dtype.  Raises UnsupportedDtype if NCCL
    does not have the operation, or not for this dtype.
    """
    if op is not None and op not in OPS:
        raise UnsupportedDtype(f"rank {rank}: NCCL has no {op!r}; it has {', '.join(OPS)}")
    if dtype.isnative and dtype.name in DTYPES:
        return DTYPES[dtype.name], 1
    if dtype.isnative and dtype.name in _COMPLEX and op in (None, "sum", "mean"):
        return DTYPES[_COMPLEX[dtype.name]], 2
    if op is None:
        return DTYPES["uint8"], dtype.itemsize
    raise UnsupportedDtype(
        f"rank {rank}: NCCL has no {op!r} of {dtype}; it combines {', '.join(DTYPES)}, and sums "
        "and means of complex64 and complex128"
    )


def lets_share(version: int, environ: Mapping[str, str] = os.environ) -> bool:
    """Return whether a version of NCCL takes ranks that share a GPU, and was told to."""
    return version >= SHARING_VERSION and environ.get(SHARING, "") == "1"


def check_places(places: Sequence[tuple[str, str]], rank: int, may_share: bool = False) -> None:
    """Raise Unsupported if two ranks use the same GPU, unless they may.

    `places` has (host, UUID) by rank.
    """
    shared = shared_gpus(places)
    if shared is not None and not may_share:
        raise Unsupported(
            f"rank {rank}: {shared}, and NCCL needs a GPU for each rank: start fewer ranks, give "
            "each a GPU of its own (CUDA_VISIBLE_DEVICES by local rank), or leave MPIDIST_GPU "
            f"unset; NCCL {version_text(SHARING_VERSION)} and later shares one if {SHARING}=1 on "
            "all ranks, with MPIDIST_GPU=nccl"
        )


_IN_PROGRESS = 7  # a status of NCCL that cupy has no name for


def load() -> Any:
    """Import and return cupy's NCCL module; Unsupported if it is not installed."""
    try:
        from cupy.cuda import nccl
    except ImportError as error:
        raise Unsupported(
            f"NCCL cannot be imported ({error}): pip install cupy-cuda12x nvidia-nccl-cu12"
        ) from None
    if not nccl.available:
        raise Unsupported("cupy finds no NCCL: pip install nvidia-nccl-cu12")
    return nccl


def shares_here() -> bool:
    """Return whether NCCL can be used in this process by ranks that share a GPU."""
    return not why_not_here() and lets_share(load().get_version())


def why_not_here() -> str:
    """Return why NCCL cannot be used in this process, or "" if it can; does not start NCCL."""
    devices = installed_device()
    if devices is not None and not devices.nccl:
        return f"NCCL does not support {devices.name} devices"
    reason = why_no_device()
    if reason is not None:
        return reason
    try:
        return why_too_old(load().get_version())
    except Unsupported as error:
        return str(error)


@dataclass(frozen=True)
class Ranks:
    """The part of a communicator that is needed to start NCCL.

    ``allgather_object(x)`` returns every rank's object; collective.
    """

    rank: int
    size: int
    allgather_object: Callable[[Any], list[Any]]


class NcclBackend:
    """NCCL's collectives on arrays on a GPU, one GPU per rank; created and closed collectively.

    Calls are queued on the stream of their input (a broadcast on that of its result) and return at
    once; :meth:`wait` waits for a stream with a deadline.

    `comm` is a Communicator or `Ranks`, which exchanges NCCL's unique id; the default `library` is
    ``cupy.cuda.nccl``.  Raises Unsupported on every rank, before NCCL starts, if a rank has no NCCL
    or no GPU, if NCCL is too old, or if two ranks use the same GPU, which NCCL 2.30.3 allows with
    ``NCCL_MULTI_RANK_GPU_ENABLE=1``; and if NCCL does not start.
    """

    def __init__(self, comm: Any, library: Any = None):
        self.rank, self.size, self._comm = comm.rank, comm.size, comm
        place, problem, may_share = None, "", False
        try:
            self.device = find_device(comm.rank)
            self._library = load() if library is None else library
            version = self._library.get_version()
            too_old, may_share = why_too_old(version), lets_share(version)
            problem = too_old and f"rank {comm.rank}: {too_old}"
            place = (socket.gethostname(), self.device.identity())
        except Unsupported as error:
            problem = str(error)
        entries = comm.allgather_object((place, problem, may_share))
        problems = [text for _, text, _ in entries if text]
        if problems:
            raise Unsupported(
                problem or f"rank {comm.rank}: another rank cannot use NCCL: {problems[0]}"
            )
        may_share = all(may for *_, may in entries)
        check_places([where for where, *_ in entries], comm.rank, may_share)
        self._lock = threading.RLock()  # of the communicator, which an abort frees
        self.device.enter()  # NCCL uses the current device
        mine = self._library.get_unique_id() if comm.rank == 0 else None
        self._aborting = _start_aborting(self.device)
        weakref.finalize(self, self._aborting.put, None).atexit = False
        self._nccl = self._start(comm.allgather_object(mine)[0])
        # Runs before MPI is finalized and cupy unloaded.
        atexit.register(_abort_at_exit, weakref.ref(self))

    def _start(self, unique: Any) -> Any:
        try:
            return self._library.NcclCommunicator(self.size, unique, self.rank)
        except self._library.NcclError as error:
            raise Unsupported(
                f"rank {self.rank}: NCCL does not start: {error}; NCCL_DEBUG=INFO says more, and "
                "MPIDIST_GPU=staged does without it"
            ) from error

    # -- collectives ----------------------------------------------------------------------------

    def allreduce(self, x: DeviceArray, out: DeviceArray, op: str) -> None:
        """Queue an allreduce from `x` to `out`, which may be the same array."""
        code, per_element = type_of(x.dtype, op, self.rank)
        with self._communicator() as nccl:
            nccl.allReduce(x.pointer, out.pointer, x.size * per_element, code, OPS[op], x.stream)

    def reduce(self, x: DeviceArray, out: DeviceArray | None, op: str, root: int) -> None:
        """Queue a reduce from `x` to the root's `out`, which is ignored on other ranks."""
        code, per_element = type_of(x.dtype, op, self.rank)
        target = x if out is None else out
        with self._communicator() as nccl:
            nccl.reduce(
                x.pointer, target.pointer, x.size * per_element, code, OPS[op], root, x.stream
            )

    def broadcast(self, x: DeviceArray | None, out: DeviceArray, root: int) -> None:
        """Queue a broadcast to every `out` from the root's `x`, or its `out` if `x` is None."""
        code, per_element = type_of(out.dtype, None, self.rank)
        source = out if x is None else x
        with self._communicator() as nccl:
            nccl.broadcast(
                source.pointer, out.pointer, out.size * per_element, code, root, out.stream
            )

    def all_gather(self, x: DeviceArray, out: DeviceArray) -> None:
        """Queue an allgather from `x` to `out`, which has `size` times as many elements."""
        code, per_element = type_of(x.dtype, None, self.rank)
        self._check_lengths(out, x)
        with self._communicator() as nccl:
            nccl.allGather(x.pointer, out.pointer, x.size * per_element, code, x.stream)

    def reduce_scatter(self, x: DeviceArray, out: DeviceArray, op: str) -> None:
        """Queue a reduce_scatter from `x` to `out`; `x` has `size` times as many elements."""
        code, per_element = type_of(x.dtype, op, self.rank)
        self._check_lengths(x, out)
        with self._communicator() as nccl:
            nccl.reduceScatter(
                x.pointer, out.pointer, out.size * per_element, code, OPS[op], x.stream
            )

    @contextmanager
    def group(self) -> Iterator[None]:
        """Queue the calls of the ``with`` block as one NCCL group.

        The messages of a group proceed together; outside of one, a send waits for its receive.
        """
        with self._communicator():
            self._library.groupStart()
            try:
                yield
            finally:
                self._library.groupEnd()

    def send(self, x: DeviceArray, peer: int, stream: int | None = None) -> None:
        """Queue the send of `x` to `peer`, which must receive as many bytes.

        It is queued on `stream`, by default on that of `x`.
        """
        code, per_element = type_of(x.dtype, None, self.rank)
        where = x.stream if stream is None else stream
        with self._communicator() as nccl:
            nccl.send(x.pointer, x.size * per_element, code, peer, where)

    def recv(self, out: DeviceArray, peer: int, stream: int | None = None) -> None:
        """Queue the receive of a message from `peer`, on `stream`, by default on that of `out`."""
        code, per_element = type_of(out.dtype, None, self.rank)
        where = out.stream if stream is None else stream
        with self._communicator() as nccl:
            nccl.recv(out.pointer, out.size * per_element, code, peer, where)

    def _check_lengths(self, whole: DeviceArray, part: DeviceArray) -> None:
        if whole.size != part.size * self.size:
            raise InvalidArgument(
                f"rank {self.rank}: {whole.size} elements are not {self.size} times {part.size}: "
                "NCCL needs parts of equal length"
            )

    # -- waiting and closing --------------------------------------------------------------------

    def wait(self, stream: int, timeout: float | None = 60.0) -> None:
        """Wait on the host until all work queued on a stream is complete.

        After more than `timeout` seconds (None: no limit) NCCL is aborted and CollectiveTimeout
        raised; after an error of another rank or of the network, CommunicationError.
        """
        event = self.device.event()
        event.record(stream)
        end = None if timeout is None else time.monotonic() + timeout
        while not event.done():
            self.check()
            if end is not None and time.monotonic() > end:
                self.abort()
                raise CollectiveTimeout(
                    f"rank {self.rank}: NCCL has not finished within {timeout} s; NCCL was aborted",
                    collective="nccl",
                )
        self.check()

    def check(self) -> None:
        """Poll NCCL for asynchronous errors; after one, abort and raise CommunicationError.

        Nothing is known while another thread queues a call.
        """
        # The watch looks at the deadline next: it does not wait for a call that may need the abort.
        if not self._lock.acquire(blocking=False):
            return
        try:
            self._in_use().check_async_error()
        except KeyError as error:
            if error.args[0] != _IN_PROGRESS:
                raise
        except self._library.NcclError as error:
            self.abort()
            raise CommunicationError(
                f"rank {self.rank}: NCCL reports: {error}; NCCL was aborted"
            ) from error
        finally:
            self._lock.release()

    @contextmanager
    def _communicator(self) -> Iterator[Any]:
        """NCCL's communicator, for a call during which no other thread frees it."""
        with self._lock:
            yield self._in_use()

    def _in_use(self) -> Any:
        if self._nccl is None:
            raise InvalidArgument(f"rank {self.rank}: this NCCL backend was closed or aborted")
        return self._nccl

    def abort(self) -> None:
        """Abort NCCL: kernels that wait for other ranks end; not collective, in any thread."""
        # A call whose communicator is freed crashes the process; but one that waits for a rank,
        # or for room behind a kernel that does, returns only after the abort.
        alone = self._lock.acquire(timeout=ABORT_AFTER)
        try:
            found, self._nccl = self._nccl, None
            if found is not None:
                ended = threading.Event()
                self._aborting.put((found, ended))
                ended.wait(ABORT_SECONDS)
        finally:
            if alone:
                self._lock.release()

    def close(self) -> None:
        """Complete all queued work and destroy NCCL's communicator; collective, before MPI ends.

        If a rank does not come, NCCL is aborted, and the error of the barrier raised.
        """
        if self._nccl is not None:
            try:
                self.device.finish()
                self._comm.allgather_object(None)  # a barrier
            except BaseException:
                self.abort()  # destroying it would wait for the others
                raise
            self._nccl.destroy()
            self._nccl = None


def _start_aborting(device: Device) -> SimpleQueue[Any]:
    """Return the queue of a thread that aborts what it is given; with None it ends.

    NCCL's abort has no deadline of its own, and at its end a process can start no thread.
    """
    asked: SimpleQueue[Any] = SimpleQueue()

    def abort() -> None:
        while (given := asked.get()) is not None:
            nccl, ended = given
            with suppress(Exception):  # the driver may have been shut down
                device.enter()
            with suppress(Exception):  # of what was lost
                nccl.abort()
            ended.set()

    threading.Thread(target=abort, daemon=True).start()
    return asked


def _abort_at_exit(backend: weakref.ref[NcclBackend]) -> None:
    """Abort NCCL at the end of the process, if the backend still exists and was not closed."""
    found = backend()
    if found is not None:
        found.abort()
