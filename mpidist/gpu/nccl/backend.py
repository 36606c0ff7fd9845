"""NCCL, by cupy: one communicator over the ranks of one of ours, each with a GPU of its own."""

from __future__ import annotations

import atexit
import socket
import time
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np

from ...device.array import DeviceArray
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
LEAST = 21000  # NCCL 2.10, the first with bfloat16 and with the mean
_PAIRS = {"complex64": "float32", "complex128": "float64"}


def version_text(version: int) -> str:
    """Write a version as people do: 22703 is 2.27.3."""
    return f"{version // 10000}.{version // 100 % 100}.{version % 100}"


def check_version(version: int, rank: int) -> None:
    """Raise Unsupported for a library that is too old."""
    if version < LEAST:
        raise Unsupported(
            f"rank {rank}: NCCL {version_text(version)} is too old: needed is "
            f"{version_text(LEAST)}; install a newer nvidia-nccl-cu12"
        )


def has_sum(dtype: np.dtype) -> bool:
    """Tell whether NCCL adds elements of a dtype, and takes their mean."""
    return dtype.isnative and dtype.name in (*DTYPES, *_PAIRS)


def type_of(dtype: np.dtype, op: str | None, rank: int) -> tuple[int, int]:
    """Give NCCL's number of a dtype, and how many of it make up one element.

    Parameters
    ----------
    dtype : numpy.dtype
        Of the elements.
    op : str or None
        The operation; None where data are moved only, which any dtype can be, as bytes.
    rank : int
        For messages.

    Raises
    ------
    UnsupportedDtype
        If NCCL cannot combine such elements.
    """
    if op is not None and op not in OPS:
        raise UnsupportedDtype(f"rank {rank}: NCCL has no {op!r}; it has {', '.join(OPS)}")
    if dtype.isnative and dtype.name in DTYPES:
        return DTYPES[dtype.name], 1
    if dtype.isnative and dtype.name in _PAIRS and op in (None, "sum", "mean"):
        return DTYPES[_PAIRS[dtype.name]], 2
    if op is None:
        return DTYPES["uint8"], dtype.itemsize
    raise UnsupportedDtype(
        f"rank {rank}: NCCL has no {op!r} of {dtype}; it combines {', '.join(DTYPES)}, and sums "
        "and means of complex64 and complex128"
    )


def check_places(places: Sequence[tuple[str, str]], rank: int) -> None:
    """Raise Unsupported if two ranks are on one device.

    Parameters
    ----------
    places : sequence of (str, str)
        The host and the UUID of the device of every rank.
    rank : int
        For messages.
    """
    shared = shared_gpus(places)
    if shared is not None:
        raise Unsupported(
            f"rank {rank}: {shared}, and NCCL wants one rank for each: start fewer ranks, give "
            "each a GPU of its own (CUDA_VISIBLE_DEVICES by local rank), or leave MPIDIST_GPU unset"
        )


_IN_PROGRESS = 7  # a status that cupy has no name for


def load() -> Any:
    """Import NCCL.

    Raises
    ------
    Unsupported
        If it is not installed.
    """
    try:
        from cupy.cuda import nccl
    except ImportError as error:
        raise Unsupported(
            f"NCCL cannot be imported ({error}): pip install cupy-cuda12x nvidia-nccl-cu12"
        ) from None
    if not nccl.available:
        raise Unsupported("cupy finds no NCCL: pip install nvidia-nccl-cu12")
    return nccl


def why_not_here(rank: int = 0) -> str:
    """Say why NCCL cannot be used in this process; empty if it can.  It is not started for that."""
    devices = installed_device()
    if devices is not None and not devices.nccl:
        return f"NCCL knows no {devices.name} device"
    reason = why_no_device()
    if reason is not None:
        return reason
    try:
        check_version(load().get_version(), rank)
    except Unsupported as error:
        return str(error)
    return ""


@dataclass(frozen=True)
class Ranks:
    """As much of a communicator as is needed to start NCCL.

    Attributes
    ----------
    rank, size : int
        As in a communicator.
    allgather_object : callable
        Gives every rank's object; collective.
    """

    rank: int
    size: int
    allgather_object: Callable[[Any], list[Any]]

    def broadcast_object(self, x: Any) -> Any:
        """Give rank 0's object."""
        return self.allgather_object(x)[0]

    def barrier(self) -> None:
        """Wait for all ranks."""
        self.allgather_object(None)


class NcclBackend:
    """NCCL's collectives on arrays of one device per rank; made and closed by all ranks together.

    Calls are queued on a stream and return at once; :meth:`wait` waits for them with a deadline.

    Parameters
    ----------
    comm : Communicator or Ranks
        Whose ranks take part; it carries the unique id.
    library : module, optional
        ``cupy.cuda.nccl``, by default.

    Raises
    ------
    Unsupported
        On every rank, before NCCL starts: if a rank has no NCCL or no device, if NCCL is too old,
        or if two ranks are on one device.  If NCCL does not start.
    """

    def __init__(self, comm: Any, library: Any = None):
        self.rank, self.size, self._comm = comm.rank, comm.size, comm
        place, problem = None, ""
        try:
            self.device = find_device(comm.rank)
            self._library = load() if library is None else library
            check_version(self._library.get_version(), comm.rank)
            place = (socket.gethostname(), self.device.identity())
        except Unsupported as error:
            problem = str(error)
        told = comm.allgather_object((place, problem))
        wrong = [text for _, text in told if text]
        if wrong:
            raise Unsupported(problem or f"rank {comm.rank}: another rank cannot: {wrong[0]}")
        check_places([where for where, _ in told], comm.rank)
        self.device.enter()  # NCCL takes the device that is current
        unique = comm.broadcast_object(self._library.get_unique_id() if comm.rank == 0 else None)
        self._nccl = self._start(unique)
        atexit.register(_abort_one, weakref.ref(self))  # before MPI ends, and cupy is unloaded

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
        """Queue an allreduce; `out` may be `x`."""
        code, each = type_of(x.dtype, op, self.rank)
        self._open().allReduce(x.pointer, out.pointer, x.size * each, code, OPS[op], x.stream)

    def reduce(self, x: DeviceArray, out: DeviceArray | None, op: str, root: int) -> None:
        """Queue a reduce; `out` counts on the root."""
        code, each = type_of(x.dtype, op, self.rank)
        target = x if out is None else out
        self._open().reduce(x.pointer, target.pointer, x.size * each, code, OPS[op], root, x.stream)

    def broadcast(self, x: DeviceArray | None, out: DeviceArray, root: int) -> None:
        """Queue a broadcast from the root's `x` to every `out`."""
        code, each = type_of(out.dtype, None, self.rank)
        source = out if x is None else x
        self._open().broadcast(source.pointer, out.pointer, out.size * each, code, root, out.stream)

    def all_gather(self, x: DeviceArray, out: DeviceArray) -> None:
        """Queue an allgather; `out` has room for as much of every rank."""
        code, each = type_of(x.dtype, None, self.rank)
        self._lengths(out, x)
        self._open().allGather(x.pointer, out.pointer, x.size * each, code, x.stream)

    def reduce_scatter(self, x: DeviceArray, out: DeviceArray, op: str) -> None:
        """Queue a reduce_scatter; `x` has as much for every rank as `out` takes."""
        code, each = type_of(x.dtype, op, self.rank)
        self._lengths(x, out)
        self._open().reduceScatter(x.pointer, out.pointer, out.size * each, code, OPS[op], x.stream)

    @contextmanager
    def group(self) -> Iterator[None]:
        """Have what is queued within it be under way together, as a round of messages must be."""
        self._open()
        self._library.groupStart()
        try:
            yield
        finally:
            self._library.groupEnd()

    def send(self, x: DeviceArray, peer: int, stream: int | None = None) -> None:
        """Queue a message; the peer receives as many bytes."""
        code, each = type_of(x.dtype, None, self.rank)
        where = x.stream if stream is None else stream
        self._open().send(x.pointer, x.size * each, code, peer, where)

    def recv(self, out: DeviceArray, peer: int, stream: int | None = None) -> None:
        """Queue that a message is received."""
        code, each = type_of(out.dtype, None, self.rank)
        where = out.stream if stream is None else stream
        self._open().recv(out.pointer, out.size * each, code, peer, where)

    def _lengths(self, whole: DeviceArray, part: DeviceArray) -> None:
        if whole.size != part.size * self.size:
            raise InvalidArgument(
                f"rank {self.rank}: {whole.size} elements are not {self.size} times {part.size}: "
                "NCCL wants parts of one length"
            )

    # -- the end --------------------------------------------------------------------------------

    def wait(self, stream: int, timeout: float | None = 60.0) -> None:
        """Wait on the host for what is queued on a stream.

        Raises
        ------
        CollectiveTimeout
            If that takes more than `timeout` seconds; NCCL is aborted then.
        CommunicationError
            If NCCL reports an error, of another rank or of the network; it is aborted.
        """
        mark = self.device.event()
        mark.record(stream)
        end = None if timeout is None else time.monotonic() + timeout
        while not mark.done():
            self.check()
            if end is not None and time.monotonic() > end:
                self.abort()
                raise CollectiveTimeout(
                    f"rank {self.rank}: NCCL has not finished within {timeout} s; aborted",
                    collective="nccl",
                )
        self.check()

    def check(self) -> None:
        """Ask NCCL for errors that have come since; raises CommunicationError, and aborts."""
        try:
            self._open().check_async_error()
        except KeyError as error:
            if error.args[0] != _IN_PROGRESS:
                raise
        except self._library.NcclError as error:
            self.abort()
            raise CommunicationError(f"rank {self.rank}: NCCL reports: {error}; aborted") from error

    def _open(self) -> Any:
        if self._nccl is None:
            raise InvalidArgument(f"rank {self.rank}: this NCCL backend was closed or aborted")
        return self._nccl

    def abort(self) -> None:
        """Have kernels end that wait for other ranks, and give up; not collective."""
        if self._nccl is not None:
            self._nccl.abort()
            self._nccl = None

    def close(self) -> None:
        """Finish and destroy; collective, and to be done before MPI ends."""
        if self._nccl is not None:
            self.device.finish()
            self._comm.barrier()
            self._nccl.destroy()
            self._nccl = None


def _abort_one(backend: weakref.ref[NcclBackend]) -> None:
    """At the end of the process: what was not closed would be destroyed after MPI."""
    found = backend()
    if found is not None:
        found.abort()
