"""The communicator: collectives, messages, objects, memory, sub-communicators."""

from __future__ import annotations

import difflib
import inspect
import os
import pickle
import zlib
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from functools import cached_property, partial, wraps
from typing import Any, Concatenate, ParamSpec
from weakref import WeakSet

import numpy as np

from .. import arguments
from ..backends.base import Backend, complete
from ..calls.arrays import as_input, check_shape, kind_of_memory, lacks_memory
from ..calls.prepare import Caller, Prepared, check_counts, prepare
from ..device.recognise import is_on_device
from ..engine.agreement import check_same_call
from ..engine.calibration import from_environment
from ..engine.messages import PointToPoint
from ..engine.posted import PostedMessage, PostedMessages
from ..engine.programs import Repeated
from ..engine.service import Service
from ..engine.work import UNSET, Work
from ..errors import (
    CommunicationError,
    ConfigError,
    InvalidArgument,
    MpidistError,
    RankFailed,
    Unsupported,
)
from ..gpu.assignment import use_gpu as choose_gpu
from ..gpu.ipc import NEEDS as DEVICE_NEEDS
from ..gpu.messages import GpuMessages
from ..gpu.service import GpuExecutors, leave_all
from ..operations import Op, find_op
from ..schedule.registry import Choice
from ..selection.calibration import Calibration
from ..selection.choose import Candidate, Candidates, choose
from ..selection.config import CollectiveConfig, switch
from ..selection.estimates import Estimates
from ..selection.names import IPC, SYMMETRIC
from ..selection.segmentation import Segmentation
from ..selection.tuning import MEMORIES, PRIVATE, TuningTable
from ..shared_memory.in_place import NEEDS
from ..topology import Topology
from .explain import example_call
from .launcher_notes import send_note
from .objects import Pickled, all_pickled, combined, pickled, reasons, unpickled
from .tracing import Traced, Tracing

DEBUG = "MPIDIST_DEBUG"
P = ParamSpec("P")
_NOTHING = np.empty(0, np.uint8)  # the data of a barrier


def begun(
    collective: Callable[Concatenate[Communicator, P], Any],
) -> Callable[Concatenate[Communicator, P], Work]:
    """Return the background form of a blocking collective: same arguments, returns a Work."""

    @wraps(collective)
    def begin(self: Communicator, /, *args: P.args, **kwargs: P.kwargs) -> Work:
        beginning = _Beginning(self)
        result = collective(beginning, *args, **kwargs)  # type: ignore[arg-type]
        return result if beginning.found is None else beginning.found.run(result)

    name = collective.__name__
    begin.__name__, begin.__qualname__ = f"i{name}", f"Communicator.i{name}"
    begin.__doc__ = (
        f"Begin :meth:`{name}` in the background, with the same arguments.\n\n"
        "The arrays must not be touched before ``wait()``.\n\n"
        f"Returns\n-------\nWork\n    Its ``wait()`` returns what :meth:`{name}` would.\n"
    )
    shown = inspect.signature(collective).replace(return_annotation="Work")
    begin.__signature__ = shown  # type: ignore[attr-defined]
    return begin


def name_here(name: str, known: Iterable[str]) -> str:
    """Return a hint: the name in `known` for one of mpi4py or torch.distributed; else ""."""
    plain = name.lower().removeprefix("get_").replace("_", "")
    if plain in ("bcast", "ibcast"):
        start = "i" * (plain == "ibcast")
        objects = "" if start else " (arrays) or broadcast_object"
        return f"; it is {start}broadcast here{objects}"
    plain = {"worldsize": "size", "reducescattertensor": "reducescatter"}.get(plain, plain)
    same = [own for own in known if own[0] != "_" and own.replace("_", "") == plain]
    if same:
        return f"; it is {same[0]} here"
    near = difflib.get_close_matches(name, [own for own in known if own[0] != "_"], n=1)
    return f"; did you mean {near[0]}?" if near else ""


def _with_total(counts: Sequence[int]) -> np.ndarray:
    """Return an array with a row for each rank: its count, and the sum of all counts."""
    return np.stack([counts, np.full(len(counts), sum(counts))], axis=1)


class _Beginning:
    """Proxy of a communicator for :func:`begun`: its calls begin in the background.

    A method of the communicator looks for the bound call of its arguments and runs it; else it
    prepares a call.  Here what is found is kept in `found`, and run by :func:`begun` once the
    method has returned the call's result.
    """

    __slots__ = ("_comm", "_place", "rank", "found")

    def __init__(self, comm: Communicator):
        self._comm, self._place, self.rank = comm, comm._place, comm.rank
        self.found: Repeated | None = None

    def __getattr__(self, name: str) -> Any:
        return getattr(self._comm, name)

    def _find(self, key: tuple | None, x: Any, out: Any) -> _Beginning | None:
        if key is not None:
            found = self._comm._find(("begin", *key), x, out)
            if found is not None and not found.program.busy:
                self.found = found
                return self
        return None

    def run(self) -> None:
        """Do nothing: the operation begins once its result is known."""

    def _run(
        self, collective: str, algorithm: str, key: tuple | None, x: Any, out: Any, **arguments: Any
    ) -> Work:
        key = None if key is None else ("begin", *key)
        return self._comm._begin(collective, algorithm, key, x, out, **arguments)


class Communicator:
    """A group of ranks, with collectives, messages and shared memory among them.

    Arguments follow numpy: arrays of any shape, lists and scalars; results are new arrays unless
    `out` is given; ``out=x`` is in place.  Every rank must make the same calls in the same order.

    Parameters
    ----------
    backend : Backend
        Transport of the messages.
    config : CollectiveConfig, optional
        Strategies, thresholds and the deadline.
    segment_bytes : int, optional
        Blocks longer than this many bytes are pipelined in segments; by default 1 MiB, on two
        ranks 4 MiB.
    window : int
        Number of segments pending at a time.
    debug : bool, optional
        Whether the ranks compare every collective before it runs; by default the value of
        ``MPIDIST_DEBUG``.
    tuning : TuningTable, optional
        Measured choices for "auto", where the configuration leaves it open; the same on every
        rank, as :func:`mpidist.init` ensures.
    calibrate : bool or Calibration, optional
        Whether to measure what "auto" needs to know, when a call first needs it: the cost model's
        constants, within 50 ms, or on one node the time of a call in several ways, in up to 20 ms;
        by default set by ``MPIDIST_CALIBRATE``, else only with MPI.
        Constants that are known already, a Calibration, are used at once.

    Attributes
    ----------
    rank, size : int
        This rank, and the number of ranks.
    name : str
        Name in traces: "world", "world.1:0" for color 0 of its first split, and so on.
    parts : set of Communicator
        The communicators split from this one that are alive.
    traced : Traced or None
        The running trace that records the calls of this communicator.
    successor : Communicator or None
        The newest communicator of the ranks that are alive, which :meth:`survivors` returned.
    """

    def __init__(
        self,
        backend: Backend,
        config: CollectiveConfig | None = None,
        *,
        segment_bytes: int | None = None,
        window: int = Segmentation.window,
        debug: bool | None = None,
        tuning: TuningTable | None = None,
        calibrate: bool | Calibration | None = None,
    ):
        arguments.whole("window", window, 1, f"rank {backend.rank}: ")
        if segment_bytes is not None:
            arguments.whole("segment_bytes", segment_bytes, 1, f"rank {backend.rank}: ")
        config = config or CollectiveConfig()
        config.check_size(backend.size, backend.rank)
        self._backend, self._place = complete(backend), Caller(backend.rank, backend.size)
        pipelining = Segmentation(segment_bytes, window, backend.library)
        self._service = Service(backend, config, pipelining)
        self._sequencer = sequencer = self._service.sequencer
        programs = self._service.programs
        self._find, self._alike, self._door = programs.find, programs.alike, sequencer.door
        self._messages = PointToPoint(sequencer, self._service.background.works)
        self._posted = PostedMessages(self._messages)
        self._options: dict[str, Any] = {
            "segment_bytes": segment_bytes,
            "window": window,
            "tuning": tuning,
        }
        self._service.chooser.estimates = self._estimates(calibrate)
        self._service.chooser.estimates.warn(backend.rank)
        self._debug = bool(switch(DEBUG)) if debug is None else debug
        self._gpu_service: GpuExecutors | None = None
        self.rank, self.size = backend.rank, backend.size
        self.name, self.parts = "world", WeakSet()  # type: str, WeakSet[Communicator]
        self._splits: Counter[tuple[int, ...]] = Counter()  # by all ranks, or by these members
        self.traced: Traced | None = None
        self.successor: Communicator | None = None
        self._forebears: WeakSet[Communicator] = WeakSet()
        self.before: Callable[[], object] | None = None  # see layers.before_calls

    def __repr__(self) -> str:
        return f"<Communicator rank {self.rank} of {self.size} on {self._backend.name}>"

    # -- properties -----------------------------------------------------------------------------

    @property
    def backend(self) -> Backend:
        """Transport of the messages."""
        return self._backend

    @property
    def config(self) -> CollectiveConfig:
        """Settings for collectives: strategies, thresholds, numbers of nodes and ranks on each."""
        return self._service.config

    @property
    def topology(self) -> Topology:
        """Groups of ranks that share a node."""
        return self._service.topology

    @property
    def timeout(self) -> float | None:
        """Deadline of every wait in seconds; None waits forever.  May be set."""
        return self._sequencer.timeout

    @timeout.setter
    def timeout(self, seconds: float | None) -> None:
        self._sequencer.timeout = CollectiveConfig(timeout=seconds).timeout

    @property
    def debug(self) -> bool:
        """Whether the ranks compare every collective before it runs."""
        return self._debug

    @property
    def broken(self) -> str | None:
        """The reason why this communicator cannot be used any more; None while it can."""
        return self._sequencer.broken

    @property
    def freed(self) -> bool:
        """Whether :meth:`free` has ended the use of this communicator."""
        return self._sequencer.freed

    @property
    def gpu(self) -> GpuExecutors:
        """The executors (NCCL, IPC, …) of GPU arrays; the first use is collective, on a GPU."""
        service = self._gpu_service
        if service is None:
            with self._door:
                service = self._gpu_for("a call with an array on a GPU")
        return service

    # -- collectives ----------------------------------------------------------------------------

    def allreduce(
        self,
        x: Any,
        op: str | Op | Callable = "sum",
        out: Any = None,
        algorithm: str = "auto",
        *,
        commute: bool | None = None,
        order: str | None = None,
    ) -> Any:
        """Combine the arrays of all ranks elementwise; every rank gets the result.

        Parameters
        ----------
        x : array_like
            This rank's contribution, of any shape; the same shape and dtype on every rank: an
            array, a CPU tensor of PyTorch, a list or scalar, or another object that exposes memory.
            It is only read.
        op : str, Op or callable
            "sum", "mean", "prod", "max", "min", "and", "or", "xor", "exact_sum", "exact_mean"
            (rounded once, the same bits by every algorithm), an :class:`Op`, or ``f(a, b)``.
        out : ndarray, tensor or buffer, optional
            Memory for the result, of the shape and dtype of `x`; ``out=x`` is in place.  It is
            filled and returned; lists, scalars and read-only memory are refused.
        algorithm : str
            "auto", "native", "symmetric", "staged", "single_copy", or a name of ``mpidist list``,
            for example "ring" or "tree:4".  The same on every rank.
        commute : bool, optional
            With a function as `op`: whether it is commutative.  Functions of numpy that are
            associative and commutative, such as ``np.add`` and ``np.hypot``, do not need it.
        order : {None, "tree"}
            With "tree", the ranks' terms are combined as a fixed tree over the numbers of the
            ranks: the same bits by every algorithm that serves it, in host memory.

        Returns
        -------
        ndarray
            `out`, or a new array of the shape and dtype of `x`, a tensor if `x` is one; a numpy
            scalar if `x` is 0-d and no tensor.

        Raises
        ------
        InvalidArgument
            If `op`, `algorithm` or `order` is unknown; if `x` is a masked array, or a sparse,
            quantized or meta tensor; if `out` does not fit, cannot be filled (a list, a scalar,
            read-only memory), or overlaps `x` in part.
        UnsupportedDtype
            If `op` is not defined for the dtype.
        Unsupported
            If `algorithm` cannot serve the call; the message names those that can.
        CollectiveTimeout
            If the deadline passes; the message names the ranks that have not arrived.
        CollectiveMismatch
            If the ranks do not make the same call; ``MPIDIST_DEBUG=1`` adds each rank's call site.

        Notes
        -----
        All ranks get the same bits, except by "native", for which MPI does not promise that.
        Whatever the algorithm, integers wrap as in numpy, "max" and "min" of NaN are NaN, and a
        mean of half precision does not overflow.
        """
        # Only calls whose result is `out` are found so: see Programs.repeat.
        key = ("allreduce", id(x), id(out), op, algorithm, commute, order)
        bound = self._find(key, x, out)
        if bound is not None:
            bound.run()
            return out
        return self._run("allreduce", algorithm, key, x, out, op=op, commute=commute, order=order)

    def reduce(
        self,
        x: Any,
        op: str | Op | Callable = "sum",
        root: int = 0,
        out: Any = None,
        algorithm: str = "auto",
        *,
        commute: bool | None = None,
        order: str | None = None,
    ) -> Any:
        """Combine the arrays of all ranks elementwise; `root` gets the result.

        Parameters
        ----------
        x, op, algorithm, commute, order
            See :meth:`allreduce`, also for the exceptions.
        root : int
            Rank that receives the result.
        out : ndarray, tensor or buffer, optional
            On the root, memory for the result, of the shape and dtype of `x`; ignored elsewhere.

        Returns
        -------
        ndarray or None
            On the root `out`, or a new array; None elsewhere.
        """
        key = ("reduce", id(x), id(out), op, algorithm, root, root.__class__, commute, order)
        bound = self._find(key, x, out)
        if bound is not None:
            bound.run()
            return out if self.rank == root else None
        given = ("reduce", algorithm, key, x, out)
        return self._run(*given, op=op, commute=commute, order=order, root=root)

    def broadcast(self, x: Any, root: int = 0, out: Any = None, algorithm: str = "auto") -> Any:
        """Send the root's array to every rank.

        Parameters
        ----------
        x : array_like
            On the root the data; elsewhere an array, CPU tensor or writable buffer of the same
            shape and dtype, which is filled if `out` is not given: a list or a scalar cannot be.
        root : int
            Rank that has the data.
        out : ndarray, tensor or buffer, optional
            Memory for the data, on any rank.
        algorithm : str
            See :meth:`allreduce`, also for the exceptions.

        Returns
        -------
        ndarray
            `out`, else `x` itself, filled.
        """
        key = ("broadcast", id(x), id(out), algorithm, root, root.__class__)
        bound = self._find(key, x, out)
        if bound is not None:
            bound.run()
            return x if out is None else out
        return self._run("broadcast", algorithm, key, x, out, root=root)

    def allgather(
        self,
        x: Any,
        out: Any = None,
        algorithm: str = "auto",
        *,
        counts: Sequence[int] | None = None,
    ) -> Any:
        """Join the arrays of all ranks along axis 0; every rank gets the result.

        Parameters
        ----------
        x : array_like
            This rank's rows, shape (n, …); a scalar counts as one row.
        out : ndarray, tensor or buffer, optional
            Memory for the result, of shape (size·n, …); `x` may be this rank's part of it.
        counts : sequence of int, optional
            Rows of each rank, where they differ; the same on every rank.
        algorithm : str
            See :meth:`allreduce`, also for the exceptions.

        Returns
        -------
        ndarray
            `out`, or a new array of shape (size·n, …), or (sum(counts), …).
        """
        key = ("allgather", id(x), id(out), algorithm) if counts is None else None
        bound = self._find(key, x, out)
        if bound is not None:
            bound.run()
            return out
        return self._run("allgather", algorithm, key, x, out, counts=counts)

    def gather(
        self,
        x: Any,
        root: int = 0,
        out: Any = None,
        algorithm: str = "auto",
        *,
        counts: Sequence[int] | None = None,
    ) -> Any:
        """Join the arrays of all ranks along axis 0; `root` gets the result.

        Parameters
        ----------
        x : array_like
            This rank's rows, shape (n, …); a scalar counts as one row.
        root : int
            Rank that receives the result.
        out : ndarray, tensor or buffer, optional
            On the root, of shape (size·n, …); `x` may be the root's part of it.
        counts : sequence of int, optional
            Rows of each rank, where they differ; the same on every rank.
        algorithm : str
            See :meth:`allreduce`, also for the exceptions.

        Returns
        -------
        ndarray or None
            On the root `out`, or a new array; None elsewhere.
        """
        key = None
        if counts is None:
            key = ("gather", id(x), id(out), algorithm, root, root.__class__)
        bound = self._find(key, x, out)
        if bound is not None:
            bound.run()
            return out if self.rank == root else None
        return self._run("gather", algorithm, key, x, out, root=root, counts=counts)

    def reduce_scatter(
        self,
        x: Any,
        op: str | Op | Callable = "sum",
        out: Any = None,
        algorithm: str = "auto",
        *,
        counts: Sequence[int] | None = None,
        commute: bool | None = None,
        order: str | None = None,
    ) -> Any:
        """Combine the arrays of all ranks elementwise; every rank gets its part of the rows.

        Parameters
        ----------
        x : array_like
            Shape (size·n, …); rank r gets rows r·n … (r+1)·n of the combination.
        counts : sequence of int, optional
            Rows for each rank, where they differ; the same on every rank.
        out : ndarray, tensor or buffer, optional
            This rank's rows; may be rows r·n … (r+1)·n of `x`.
        op, algorithm, commute, order
            See :meth:`allreduce`, also for the exceptions.

        Returns
        -------
        ndarray
            `out`, or a new array of shape (n, …), or (counts[rank], …).
        """
        key = None
        if counts is None:
            key = ("reduce_scatter", id(x), id(out), op, algorithm, commute, order)
        bound = self._find(key, x, out)
        if bound is not None:
            bound.run()
            return out
        given = ("reduce_scatter", algorithm, key, x, out)
        return self._run(*given, op=op, commute=commute, order=order, counts=counts)

    def scan(
        self,
        x: Any,
        op: str | Op | Callable = "sum",
        out: Any = None,
        algorithm: str = "auto",
        *,
        commute: bool | None = None,
    ) -> Any:
        """Combine the arrays of ranks 0 … r elementwise on rank r, in the order of the ranks.

        Parameters
        ----------
        x, out, algorithm, commute
            See :meth:`allreduce`, also for the exceptions.
        op : str, Op or callable
            See :meth:`allreduce`; not "mean".

        Returns
        -------
        ndarray
            `out`, or a new array of the shape and dtype of `x`.
        """
        key = ("scan", id(x), id(out), op, algorithm, commute)
        bound = self._find(key, x, out)
        if bound is not None:
            bound.run()
            return out
        return self._run("scan", algorithm, key, x, out, op=op, commute=commute)

    def exscan(
        self,
        x: Any,
        op: str | Op | Callable = "sum",
        out: Any = None,
        algorithm: str = "auto",
        *,
        commute: bool | None = None,
    ) -> Any:
        """Combine the arrays of ranks 0 … r-1 elementwise on rank r: an exclusive :meth:`scan`.

        Parameters
        ----------
        x, op, algorithm, commute
            See :meth:`scan`, also for the exceptions.
        out : ndarray, tensor or buffer, optional
            Memory for the result, of the shape and dtype of `x`; ignored on rank 0.

        Returns
        -------
        ndarray or None
            `out`, or a new array of the shape and dtype of `x`; None on rank 0, which has no ranks
            before it.  Its `out` stays as it is: it may hold what the sum of nothing is to be.
        """
        key = ("exscan", id(x), id(out), op, algorithm, commute)
        bound = self._find(key, x, out)
        if bound is not None:
            bound.run()
            return out if self.rank else None
        return self._run("exscan", algorithm, key, x, out, op=op, commute=commute)

    def scatter(
        self,
        x: Any,
        root: int = 0,
        out: Any = None,
        algorithm: str = "auto",
        *,
        counts: Sequence[int] | None = None,
    ) -> Any:
        """Send each rank its rows of the root's array.

        Parameters
        ----------
        x : array_like
            On the root, shape (size·n, …); ignored elsewhere.
        out : ndarray, tensor or buffer, optional
            This rank's rows, given on every rank or on none: without it the root first sends the
            shape to all ranks.
        counts : sequence of int, optional
            Rows for each rank, where they differ; the same on every rank.
        root : int
            Rank that has the data.
        algorithm : str
            See :meth:`allreduce`, also for the exceptions.

        Returns
        -------
        ndarray
            `out`, or a new array of shape (n, …), or (counts[rank], …).
        """
        mine = x if self.rank == root else out
        key = None
        if counts is None:
            key = ("scatter", id(mine), id(out), algorithm, root, root.__class__)
        bound = self._find(key, mine, out)
        if bound is not None:
            bound.run()
            return out
        return self._run("scatter", algorithm, key, mine, out, root=root, counts=counts)

    def alltoall(
        self,
        x: Any,
        out: Any = None,
        algorithm: str = "auto",
        *,
        counts: Sequence[int] | Sequence[Sequence[int]] | None = None,
    ) -> Any:
        """Send row block d to rank d and get the blocks of all ranks, joined in rank order.

        Parameters
        ----------
        x : array_like
            Shape (size·n, …): rows d·n … (d+1)·n go to rank d.
        out : ndarray, tensor or buffer, optional
            Memory for the result, of the result's shape; may be `x`.
        counts : sequence of int, or of sequences of int, optional
            Rows that this rank sends to each rank, where they differ; or, to save a small
            exchange, the whole size x size table with ``counts[r][d]`` the rows from r to d.
        algorithm : str
            See :meth:`allreduce`, also for the exceptions.

        Returns
        -------
        ndarray
            `out`, or a new array of the shape of `x`; with `counts`, it has the rows that all ranks
            send to this one.
        """
        key = ("alltoall", id(x), id(out), algorithm) if counts is None else None
        bound = self._find(key, x, out)
        if bound is not None:
            bound.run()
            return out
        return self._run("alltoall", algorithm, key, x, out, counts=counts)

    def barrier(self, algorithm: str = "auto") -> None:
        """Wait until all ranks have reached this barrier.

        Parameters
        ----------
        algorithm : str
            See :meth:`allreduce`.

        Raises
        ------
        CollectiveTimeout
            If the deadline passes; the message names the ranks that have not arrived.
        """
        key = ("barrier", algorithm)
        bound = self._find(key, _NOTHING, None)
        if bound is not None:
            return bound.run()
        return self._run("barrier", algorithm, key, _NOTHING, None)

    iallreduce = begun(allreduce)
    ireduce = begun(reduce)
    ibroadcast = begun(broadcast)
    iallgather = begun(allgather)
    igather = begun(gather)
    ireduce_scatter = begun(reduce_scatter)
    iscan = begun(scan)
    iexscan = begun(exscan)
    iscatter = begun(scatter)
    ialltoall = begun(alltoall)
    ibarrier = begun(barrier)

    # -- point-to-point and objects -------------------------------------------------------------

    def send(self, x: Any, peer: int, tag: int = 0) -> None:
        """Send an array to another rank.

        Parameters
        ----------
        x : array_like
            Array of any shape, dtype and length, on the host or on a GPU.
        peer : int
            Rank that receives it, into an array of this dtype and shape.
        tag : int
            Number ≥ 0, equal on both ranks; messages of one tag keep their order.

        Raises
        ------
        InvalidArgument
            If `peer` is not the rank of another process, or `tag` or `x` is not allowed.
        CollectiveTimeout
            If the message was not received within the deadline; the communicator is broken then.
        """
        if type(x) is not np.ndarray and is_on_device(x):
            self.isend(x, peer, tag).wait()
            return
        with self._door:
            self._messages.send(x, peer, tag)

    def recv(
        self, out: np.ndarray, peer: int | None, tag: int = 0, timeout: float | None = UNSET
    ) -> np.ndarray:
        """Receive an array of :meth:`send`.

        Parameters
        ----------
        out : ndarray
            Array to fill, of the dtype and shape of the message; axes of length 1 do not count.
        peer : int or None
            Rank that sends it; None for any rank, only with `out` on the host.  With
            :meth:`irecv` the sender is known afterwards as ``work.source``.
        tag : int
            See :meth:`send`.
        timeout : float or None, optional
            Seconds; by default the communicator's deadline, None for none.

        Returns
        -------
        ndarray
            `out`.

        Raises
        ------
        InvalidArgument
            If `peer` is not the rank of another process, or `tag` or `out` is not allowed.
        MessageMismatch
            If the message has another dtype or shape.  Nothing of it is stored, and the
            communicator stays usable; the sender is not notified.
        CollectiveTimeout
            If no message arrives in time; the communicator is broken then.
        """
        if type(out) is not np.ndarray and is_on_device(out):
            return self.irecv(out, peer, tag).wait(timeout)
        with self._door:
            return self._messages.recv(out, peer, tag, timeout)

    def isend(self, x: Any, peer: int, tag: int = 0) -> Work:
        """Begin :meth:`send` in the background; do not touch the array before ``wait()``.

        `peer` may be this rank itself, which receives it by :meth:`irecv`.
        """
        if type(x) is not np.ndarray and is_on_device(x):
            with self._door:
                return self._gpu_messages.isend(x, peer, tag)
        with self._door:
            return self._messages.isend(x, peer, tag)

    def irecv(self, out: np.ndarray, peer: int | None, tag: int = 0) -> Work:
        """Begin :meth:`recv` in the background; do not touch the array before ``wait()``.

        Afterwards ``work.source`` is the rank of the sender.
        """
        if type(out) is not np.ndarray and is_on_device(out):
            with self._door:
                return self._gpu_messages.irecv(out, peer, tag)
        with self._door:
            return self._messages.irecv(out, peer, tag)

    def send_object(self, value: Any, peer: int, tag: int = 0) -> None:
        """Send a Python object, which must be picklable; see :meth:`send`."""
        with self._door:
            self._messages.send_object(value, peer, tag)

    def iprobe(self, peer: int | None = None, tag: int = 0, kind: str = "array") -> int | None:
        """Return the sender of a message that has arrived and was not received yet, or None.

        It does not wait.

        Parameters
        ----------
        peer : int or None
            Rank of the sender; None for any rank.
        tag : int
            See :meth:`send`.
        kind : {"array", "object"}
            Whether messages of :meth:`send` or of :meth:`send_object` are meant.

        Raises
        ------
        InvalidArgument
            If `peer` is no rank, or `tag` or `kind` is not allowed.
        """
        with self._door:
            return self._messages.iprobe(peer, tag, kind)

    def recv_object(self, peer: int | None, tag: int = 0, timeout: float | None = UNSET) -> Any:
        """Receive an object of :meth:`send_object`.  Unpickling runs code: trust the sender."""
        with self._door:
            return self._messages.recv_object(peer, tag, timeout)

    # -- posted messages ------------------------------------------------------------------------

    def post_send(self, x: Any, peer: int, tag: int = 0) -> PostedMessage:
        """Begin to send the elements of an array, without dtype and shape ahead of them.

        For users that have agreed on lengths before, as pipelines have, and send many messages:
        it is a bare non-blocking send of the backend, ``MPI_Isend`` with MPI.

        Parameters
        ----------
        x : ndarray, tensor or buffer
            C-contiguous host memory, of any dtype but objects.  It must not change before the
            message is complete: ``test()`` returns True, or ``wait()`` returns.
        peer : int
            Rank that receives it, by :meth:`post_recv`.
        tag : int
            0 … 2**20 - 1, or less where the MPI library's limit is lower.  Posted messages have
            tags of their own: a message of :meth:`send` with the same tag is never taken for a
            posted one.

        Returns
        -------
        PostedMessage
            A handle with ``test()`` and ``wait()``; for several messages there is :meth:`wait_all`.

        Raises
        ------
        InvalidArgument
            If `peer` is not the rank of another process, `tag` is not allowed, or `x` is not
            contiguous.
        UnsupportedDtype
            If `x` holds Python objects.
        CommunicatorBroken
            If the communicator is broken, or was freed.

        Notes
        -----
        A posted message must have the length of its receiver's memory.  A shorter one raises
        CollectiveMismatch at its receiver.  A longer one does too, if the backend sees it: Open MPI
        (5.0.11) writes it past the end of the memory.  With ``MPIDIST_DEBUG=1`` lengths are
        compared first, and nothing is written if they differ.
        """
        with self._door:
            return self._posted.post_send(x, peer, tag, self._debug)

    def post_recv(self, out: Any, peer: int, tag: int = 0) -> PostedMessage:
        """Post memory to receive the elements of a :meth:`post_send`, which documents both.

        If it is posted before the message arrives, it is filled without a copy.  Messages between
        two ranks with one tag fill the posted receives in their order.

        Parameters
        ----------
        out : ndarray, tensor or buffer
            Writable C-contiguous host memory, with as many bytes as the message; its contents
            are undefined until the message is complete.
        peer, tag : int
            See :meth:`post_send`, also for the exceptions.

        Returns
        -------
        PostedMessage
            See :meth:`post_send`.
        """
        with self._door:
            return self._posted.post_recv(out, peer, tag, self._debug)

    def wait_all(
        self,
        messages: Iterable[PostedMessage],
        what: str | Callable[[], str] | None = None,
        timeout: float | None = UNSET,
    ) -> None:
        """Wait until several posted messages are all complete, with one deadline.

        Parameters
        ----------
        messages : iterable of PostedMessage
            Messages of this communicator.
        what : str or callable, optional
            Description of the messages, or a function that returns it, for a timeout's report; by
            default the first message that is not complete, with its rank and tag.
        timeout : float or None, optional
            Seconds; None waits forever; by default the communicator's deadline.

        Raises
        ------
        InvalidArgument
            If `messages` has other objects, or a message of another communicator.
        CollectiveMismatch
            If a message did not have the length of its memory; raised for the first such message,
            when all are complete.
        CollectiveTimeout
            If the deadline passed; the communicator is broken then, and memory in which messages
            may still arrive is kept.
        """
        token = self._door.enter_pending()
        try:
            self._posted.wait_all(messages, what, timeout)
        finally:
            self._door.leave(token)

    # -- objects --------------------------------------------------------------------------------

    def broadcast_object(self, value: Any, root: int = 0) -> Any:
        """Send the root's object to every rank, pickled; return it.

        Raises
        ------
        InvalidArgument
            On every rank, if the object cannot be pickled.
        """
        root = self._place.check_root(root)
        mine = pickled(self._place, value) if self.rank == root else Pickled(_NOTHING, [0])
        length = int(self.broadcast(np.array(mine.counts), root)[0])
        data = mine.data if self.rank == root else np.empty(abs(length), np.uint8)
        self.broadcast(data, root)
        if length < 0:
            raise InvalidArgument(bytes(data).decode()) from mine.error
        return value if self.rank == root else pickle.loads(data.data)

    def allgather_object(self, value: Any) -> list[Any]:
        """Return the list of all ranks' objects, in rank order, on every rank; uses pickle.

        Raises
        ------
        InvalidArgument
            On every rank, if an object cannot be pickled.
        """
        mine = pickled(self._place, value)
        counts = self.allgather(np.array(mine.counts)).tolist()
        self._check_pickled(mine, counts)
        return unpickled(self.allgather(mine.data, counts=counts), counts)

    def gather_object(self, value: Any, root: int = 0) -> list[Any] | None:
        """Return the list of all ranks' objects, in rank order, on `root`; None elsewhere.

        Raises
        ------
        InvalidArgument
            On every rank, if an object cannot be pickled.
        """
        root = self._place.check_root(root)
        mine = pickled(self._place, value)
        counts = self.allgather(np.array(mine.counts)).tolist()
        self._check_pickled(mine, counts)
        joined = self.gather(mine.data, root, counts=counts)
        return None if joined is None else unpickled(joined, counts)

    def scatter_object(self, values: Any, root: int = 0) -> Any:
        """Send each rank its object of the root's list, pickled; return it.

        Parameters
        ----------
        values : sequence
            On the root, an object for each rank; ignored elsewhere.
        root : int
            Rank that has the objects.

        Raises
        ------
        InvalidArgument
            On every rank, if the root has not one object for each rank, or one cannot be pickled.
        """
        root = self._place.check_root(root)
        mine = Pickled(_NOTHING, [0] * self.size)
        if self.rank == root:
            mine = all_pickled(self._place, values)
        counts = self.broadcast(np.array(mine.counts), root).tolist()
        if counts[0] < 0:
            reason = mine.data if self.rank == root else np.empty(-counts[0], np.uint8)
            raise InvalidArgument(bytes(self.broadcast(reason, root)).decode()) from mine.error
        out = np.empty(counts[self.rank], np.uint8)
        return pickle.loads(self.scatter(mine.data, root, out, counts=counts).data)

    def alltoall_object(self, values: Any) -> list[Any]:
        """Send object d of `values` to rank d; return the list of the objects sent to this rank.

        Parameters
        ----------
        values : sequence
            An object for each rank.

        Raises
        ------
        InvalidArgument
            On every rank, if one has not an object for each rank, or one cannot be pickled.
        """
        mine = all_pickled(self._place, values)
        counts, totals = self.alltoall(_with_total(mine.counts)).T.tolist()
        self._check_pickled(mine, counts)
        known: dict[str, Any] = {"counts": mine.counts, "receives": counts, "total": sum(totals)}
        with self._door:  # the ranks' calls were compared by the one before
            prepared = prepare("alltoall", self._place, mine.data, **known)
            return unpickled(self._service.serve(prepared, "auto"), counts)

    def reduce_object(self, value: Any, function: Callable[[Any, Any], Any], root: int = 0) -> Any:
        """Combine the objects of all ranks by a function, in rank order; `root` gets the result.

        Parameters
        ----------
        value : object
            This rank's object.
        function : callable
            ``f(a, b)`` returns the combination of two objects; `a` may be changed.  It is called on
            the root only, from left to right, so it need be neither commutative nor associative.
        root : int
            Rank that receives the result.

        Returns
        -------
        object
            The combination on the root; None elsewhere.

        Raises
        ------
        InvalidArgument
            On every rank, if an object cannot be pickled, or the function raises.
        """
        return self._reduced(value, function, self._place.check_root(root), shared=False)

    def allreduce_object(self, value: Any, function: Callable[[Any, Any], Any]) -> Any:
        """Combine the objects of all ranks by a function, in rank order, on every rank.

        The parameters and exceptions are those of :meth:`reduce_object`; the root is rank 0, whose
        result is pickled for the others.
        """
        return self._reduced(value, function, 0, shared=True)

    def _reduced(
        self, value: Any, function: Callable[[Any, Any], Any], root: int, shared: bool
    ) -> Any:
        """Return the combined objects on the root, and if `shared` on every rank."""
        arguments.function("function", function, "two objects", f"rank {self.rank}: ")
        values = self.gather_object(value, root)
        result = failure = None
        if values is not None:
            try:
                result = combined(self._place, values, function)
            except InvalidArgument as error:
                failure = error
        reason = failure and str(failure)
        reason, everyones = self.broadcast_object((reason, result if shared else None), root)
        if reason is not None:
            raise InvalidArgument(reason) from failure and failure.__cause__
        return everyones if shared else result

    def _check_pickled(self, mine: Pickled, counts: Sequence[int]) -> None:
        """Raise InvalidArgument if a rank has a negative number in `counts`; collective then."""
        if min(counts) < 0:
            joined = self.allgather(mine.reason, counts=[max(-count, 0) for count in counts])
            raise InvalidArgument(reasons(joined, counts)) from mine.error

    # -- structure ------------------------------------------------------------------------------

    def split(self, color: int | None, key: int = 0) -> Communicator | None:
        """Divide the ranks: those of one `color` form a new communicator, ordered by `key`.

        Parameters
        ----------
        color : int or None
            Number ≥ 0; None for a rank that will be in none of them, which gets None.
        key : int
            Order within the color; ranks with equal keys keep their order.

        Returns
        -------
        Communicator or None
            The new communicator, with this one's deadline, its settings of trees, and its
            strategies for inside a node (``local_…``).
        """

        def check() -> tuple[()]:
            if color is not None:
                arguments.whole("color", color, 0, f"rank {self.rank}: ", ", or None")
            return ()

        with self._door:
            if self._debug:
                self._agreed("split", check)
            check()
            mine = (None if color is None else int(color), int(key))
            sub = self._sequencer.meet("split", lambda: self._backend.split(*mine))
            self._splits[()] += 1
            return None if sub is None else self._of(sub, f".{self._splits[()]}:{color}")

    def create_group(
        self, ranks: Sequence[int], tag: int = 0, *, debug: bool | None = None
    ) -> Communicator:
        """Form a communicator of some ranks, which are the only ones to call this.

        :meth:`split` is for all ranks together, and faster for many groups.

        Parameters
        ----------
        ranks : sequence of int
            The members, in the order of their ranks in the new communicator; the same on each.
        tag : int
            As of a message, and the same on each member.  Groups with members in common that are
            made by different communicators at the same time need different tags.
        debug : bool, optional
            See :class:`Communicator`; by default as this one.

        Returns
        -------
        Communicator
            The new communicator, with this one's deadline, its settings of trees, and its
            strategies for inside a node (``local_…``).

        Raises
        ------
        InvalidArgument
            If this rank is not a member, a rank is listed twice, or `tag` is not allowed.
        CollectiveTimeout
            If a member has not called this within the deadline; this communicator is broken then.
        """
        members = [self._place.check_rank(r, "ranks") for r in ranks]
        if self.rank not in members or len(set(members)) < len(members):
            raise self._place.wrong(
                f"create_group: ranks={list(ranks)!r}: expected different ranks, this one among "
                "them: only the members call it"
            )
        with self._door:
            # Within the deadline, which MPI's own call has not.
            self._messages.meet(members, tag)
            try:
                made = self._backend.subgroup(members, tag)
            except Exception as error:
                raise self._messages.ended(error, "create_group", None) from error.__cause__
            self._splits[tuple(members)] += 1
            return self._of(made, f".{self._splits[tuple(members)]}{tuple(members)}", debug)

    def survivors(self) -> Communicator:
        """Form a communicator of the ranks that are alive, after `RankFailed`; collective.

        Every rank that is alive must call it, also one that has not met the loss; the first to do
        so lets the calls of the others raise `RankFailed`, on all communicators of the process.
        These are of no use afterwards: split the new one.  Data on the lost rank are lost::

            try:
                step(comm)
            except mpidist.RankFailed:
                comm = comm.survivors()
                ...                         # deal the rows anew, among comm.size ranks

        Of the default communicator, :func:`mpidist.init` returns the new one from then on.

        Returns
        -------
        Communicator
            The new communicator, with the ranks in the same order, and with this one's deadline,
            settings and calibration.  Settings for a number of ranks that they are no more are
            dropped, as by :meth:`split`.

        Raises
        ------
        Unsupported
            If this launch does not allow it; the message says what does.
        CollectiveTimeout
            If a rank that is alive has not called it within the deadline.
        """
        reason = self._backend.why_no_survivors()
        if reason is not None:
            raise Unsupported(f"rank {self.rank}: {reason}")
        sequencer = self._sequencer
        if sequencer.freed:
            sequencer.check_usable()
        if sequencer.broken is None:
            with self._door:
                left = RankFailed(f"rank {self.rank} has left the communicator for its survivors")
                sequencer.broke(left, "survivors", None, elsewhere=False)
        self._service.programs.clear()
        if self.traced is not None:
            self.traced.tracing.detach()
        release = leave_all()
        made = self._backend.survivors(self._without_lost, self.timeout)
        release()
        # An end of which mpidist run hears behind those of all others would fail the job.
        lost = set(self._backend.in_world()).difference(made._backend.in_world())
        send_note(without=sorted(lost))
        self._forebears.add(self)
        made._forebears = self._forebears
        for one in self._forebears:  # those between the first one and this one are not held by it
            one.successor = made
        return made

    def _without_lost(self, backend: Backend) -> Communicator:
        """Return a communicator on `backend`, over the ranks that are alive."""
        config = self.config.replace(timeout=self.timeout)
        try:
            config.check_size(backend.size)
        except ConfigError:
            config = config.at_level("local")
        options = {**self._options, **self._calibrated()}
        made = Communicator(backend, config, debug=self._debug, **options)
        made.name = f"{self.name}+"
        if backend.track is not None:
            backend.track.name(made.name)
        return made

    def _of(self, backend: Backend, name: str, debug: bool | None = None) -> Communicator:
        """Return a communicator on `backend`, over some of the ranks, with this one's options."""
        debug = self._debug if debug is None else debug
        config = self.config.at_level("local").replace(timeout=self.timeout)
        options = {**self._options, **self._calibrated()}
        made = Communicator(backend, config, debug=debug, **options)
        made.name = self.name + name
        if backend.track is not None:
            backend.track.name(made.name)
        if self.before is not None:
            made.before = self.before
            made._door.before(self.before)
        self.parts.add(made)
        if self.traced is not None:
            self.traced.tracing.attach(made)
        return made

    def empty(
        self, shape: int | Sequence[int], dtype: Any = "float64", *, device: str | None = None
    ) -> Any:
        """Allocate an array in symmetric memory, accessible to all ranks of the node; collective.

        Collectives on such arrays run in shared memory, without messages; the calls are the same.
        On several nodes the memory is shared within each node, and the calls are served as those
        of any other arrays.  Every rank must ask for the same shape and dtype.  The memory is
        released when the array and all views of it are dead, on each rank by itself.

        Parameters
        ----------
        shape : int or sequence of int
            Shape of the array on each rank.
        dtype : dtype
            Dtype of its elements; any but objects.
        device : {"cuda"}, optional
            "cuda" for the memory of this rank's GPU, shared by CUDA IPC and released by
            :meth:`free` only; by default on the host.

        Returns
        -------
        ndarray
            This rank's array, filled with zeros; with a device, a cupy array.

        Raises
        ------
        Unsupported
            If the ranks of a node cannot share memory: they are threads of one process, or in
            containers of their own, or the configured nodes are not those of the machine.  With a
            device, also if the ranks are on several nodes.
        InvalidArgument
            If `device` is unknown, or if all ranks pass a `shape` or `dtype` that is not allowed.
        CollectiveMismatch
            If the ranks ask for different arrays, or some pass a `shape` or `dtype` that is not
            allowed: on every rank, with a table; the communicator stays usable.
        MemoryError
            On every rank of all nodes, if one node has too little shared memory: each rank's array
            takes twice its size.
        """
        if device not in (None, "cuda"):
            raise self._place.wrong(f"empty: device={device!r}: expected None or 'cuda'")
        reason = self._service.no_heap if device is None else self._why_not_on_gpus()
        if reason is not None:
            raise Unsupported(f"rank {self.rank}: {reason}")
        heap = self._service.heap
        what = "empty" if device is None else f"empty on {device}"
        with self._door:
            dims, known = self._agreed(what, lambda: check_shape(shape, dtype, self.rank))
            if device is not None:
                self._use_gpu()
                return self._gpu_for(what).empty(dims, known)
            assert heap is not None
            return self._sequencer.set_up("empty", lambda: heap.empty(dims, known))

    def use_gpu(self) -> int:
        """Choose a GPU with the fewest ranks for this rank, and make it current; collective.

        A rank that already uses a GPU keeps it.  To be called before the first array on a GPU::

            torch.cuda.set_device(comm.use_gpu())

        Returns
        -------
        int
            Number of the GPU among those that ``CUDA_VISIBLE_DEVICES`` leaves this rank: the local
            rank modulo n if all ranks of a host see the same n GPUs, 0 if each sees one of its own.

        Raises
        ------
        Unsupported
            On every rank, if one has no GPU, or cannot use it.
        """
        with self._door:
            return self._use_gpu()

    def _use_gpu(self) -> int:
        everyone = self._sequencer.everyone
        return self._sequencer.set_up("use_gpu", lambda: choose_gpu(self.rank, everyone))

    def free(self, x: Any = None) -> None:
        """Release the communicator and its resources, or an array of :meth:`empty`; collective.

        Without an array, it waits for the pending operations in the background.

        Parameters
        ----------
        x : ndarray, optional
            An array of :meth:`empty`, or a view of one.  On the host it is treated like any other
            array from now on, and released with its last view; on a GPU it is released at once.

        Raises
        ------
        InvalidArgument
            If `x` is not from :meth:`empty` of this communicator, or was freed before.
        """
        if x is None and self.traced is not None and self._sequencer.broken is None:
            self.traced.tracing.end_with(self)
        if x is not None or self._sequencer.broken is None:
            with self._door:
                self._free(x)

    def _free(self, x: Any) -> None:
        heap = self._service.heap
        if x is not None and is_on_device(x):
            gpu = self._gpu_for("free of an array on a GPU")
            self._agreed("free", lambda: (gpu.key(x),))
            gpu.free(x)
            return
        if x is not None:
            if heap is None:
                raise self._place.wrong(
                    "free(x): x is not from empty(): this communicator has no symmetric memory: "
                    f"{self._service.no_heap}"
                )
            if self._debug:
                self._agreed("free", lambda: (heap.key(x),))
            self._service.programs.clear()  # bound calls would go on to use it as symmetric
            heap.forget(x)
            return
        if self._debug:
            self._agreed("free", tuple)
        self._service.background.finish()
        if self._gpu_service is not None:
            try:
                self._sequencer.set_up("free", self._gpu_service.close)
            except CommunicationError:  # NCCL would be left, and work that waits for who is missing
                self._gpu_service.let_go()
                raise
        self._service.programs.clear()
        self._sequencer.meet("free", self._backend.close)
        self._sequencer.free()

    def explain(
        self,
        collective: str,
        nbytes: int,
        op: str = "sum",
        memory: str = PRIVATE,
        without: Sequence[str] = (),
        device: str | None = None,
    ) -> tuple[Candidate, list[Candidate]]:
        """Return the choice of "auto" for `nbytes` of float32, and the list of candidates.

        It is no collective call: nothing is sent or measured.  Only the first use of a GPU, which
        may be a call with a `device`, is collective.

        Parameters
        ----------
        collective : str
            Name of the collective.
        nbytes : int
            Bytes of the whole buffer.
        op : str
            Operation, where it reduces.
        memory : {"private", "symmetric"}
            Kind of memory of the arrays: "symmetric" for those of :meth:`empty`.
        without : sequence of {"native", "symmetric", "staged", "single_copy"}
            Executors to leave out; with a device also "ipc", "ipc_slots", "nccl" and "mpi".
        device : {"cuda"}, optional
            "cuda" for arrays on a GPU; by default on the host.

        Returns
        -------
        chosen : Candidate
            The choice, with its reason: the configuration, the tuning table, what was tried out,
            the measured links, the cost model, or the shipped rule.
        every : list of Candidate
            All candidates, the chosen one too.  Those that cannot serve have the reason, and
            others the expected `seconds` where they are known: measured, from the tuning table if
            it has such a call, else those of the cost model once it is calibrated; for host arrays.
            Executors, then algorithms by messages, then the schedules that shared memory can run.

        Raises
        ------
        InvalidArgument
            If `collective`, `op`, `memory`, `device` or a name in `without` is unknown.
        Unsupported
            If `memory` is "symmetric", which this communicator cannot have; if there is no GPU; if
            MPIDIST_GPU requires an executor that cannot serve the call.
        """
        if memory not in MEMORIES:
            raise self._place.wrong(f"memory={memory!r}: expected {' or '.join(MEMORIES)}")
        gpu = self._gpu_of("explain", device)
        symmetric, needs = (SYMMETRIC, NEEDS) if gpu is None else (IPC, DEVICE_NEEDS)
        there = None if gpu is None else gpu.device
        call = example_call(self._place, collective, nbytes, find_op(op), there)
        chooser = self._service.chooser
        means = chooser.means(call)
        reasons = dict(means.reasons)
        if memory != PRIVATE:
            reason = self._service.no_heap
            if gpu is not None:
                reason = self._why_not_on_gpus() or gpu.why_no_symmetric_memory
            if reason:
                raise Unsupported(f"rank {self.rank}: {reason}")
            if collective in needs and (gpu is not None or self._service.apart is None):
                reasons[symmetric] = None
        if gpu is None and collective != "barrier":  # the example has no arrays of either kind
            why_not = partial(_why_not_in, memory, means.cannot_run)
            means = replace(means, cannot_run=why_not)
        for name in without:
            if name not in reasons:
                allowed = ", ".join(reasons)
                raise self._place.wrong(f"without={without!r}: expected some of {allowed}")
            reasons[name] = "excluded by without="
        estimates = chooser.estimates
        means = replace(means, reasons=reasons)
        chosen = choose(Candidates(call, means), "auto", self.config, estimates)
        candidates = Candidates(call, replace(means, unknown=lambda _: None))  # by name, all can
        if chosen.missing:
            why = f"{chosen.why}; the first call will calibrate, and may choose by the cost model"
            chosen = replace(chosen, why=why)
        if chosen.untried:
            why = f"{chosen.why}; the first call will try out {', '.join(chosen.untried)}"
            chosen = replace(chosen, why=why)
        chosen, *every = (
            replace(candidate, executor=chooser.executor(candidate, call).name)
            for candidate in (chosen, *candidates.every())
        )
        if estimates is not None and not call.on_device:
            where = PRIVATE if collective not in NEEDS else memory
            every = [candidates.predicted(one, estimates, where) for one in every]
            chosen = candidates.predicted(chosen, estimates, where)
        return chosen, every

    def trace(self, path: str | os.PathLike) -> Tracing:
        """Begin to record all calls of this communicator and of those split from it; collective.

        The trace has collectives with bytes, executor, algorithm if any, call site, and how long
        each rank waited for the others; messages; the buckets of a :class:`~mpidist.DDP`, the
        actions of a :class:`~mpidist.Pipeline`.  Recording adds less than 1 µs to a call.
        While the profiler of PyTorch runs, each call is a range of its profile too::

            with comm.trace("trace.json"):
                train()

        Parameters
        ----------
        path : str or Path
            The file, for https://ui.perfetto.dev or chrome://tracing; that of rank 0 counts.

        Returns
        -------
        Tracing
            The running trace.  Its ``stop()`` gathers the events of all ranks, and writes them on
            rank 0; the end of a ``with`` block, :meth:`free` and the end of the program do so too.

        Raises
        ------
        InvalidArgument
            On every rank, if a trace is running, or rank 0 cannot write the file.
        """
        if self.traced is not None:
            running = self.traced.tracing.path
            raise self._place.wrong(
                f"trace({str(path)!r}): a trace is running, into {running!r}: stop() it first"
            )
        return Tracing(self, path)

    def _gpu_of(self, method: str, device: Any) -> GpuExecutors | None:
        """Return the service of a method's `device`, None for the host; the first is collective."""
        if device not in (None, "cuda"):
            raise self._place.wrong(f"{method}: device={device!r}: expected None or 'cuda'")
        if device is None:
            return None
        with self._door:
            return self._gpu_for(f"{method} on {device}")

    def _gpu_for(self, what: str) -> GpuExecutors:
        """Return the executors of GPU arrays, created by all ranks at the first use, in `what`."""
        if self._gpu_service is None:
            service, everyone = self._service, self._sequencer.everyone
            self._gpu_service = self._sequencer.set_up(
                what, lambda: GpuExecutors(service, everyone)
            )
        return self._gpu_service

    @cached_property
    def _gpu_messages(self) -> GpuMessages:
        return GpuMessages(self._messages)

    # -- within ---------------------------------------------------------------------------------

    def __getattr__(self, name: str) -> Any:
        """Raise AttributeError; for a name of mpi4py or torch, the message has mpidist's name."""
        hint = "" if name.startswith("_") else name_here(name, dir(self))
        raise AttributeError(f"'Communicator' object has no attribute {name!r}{hint}", name=name)

    def _estimates(self, calibrate: bool | Calibration | None) -> Estimates:
        known = calibrate if isinstance(calibrate, Calibration) else None
        if calibrate is None:
            calibrate = from_environment()
        measures = self._backend.native is not None if calibrate is None else bool(calibrate)
        pipelining = self._service.pipelining
        table = self._options["tuning"]
        library, groups = self._backend.library, self.topology.groups
        return Estimates(library, groups, measures, known, table, pipelining)

    def _calibrated(self) -> dict[str, Any]:
        """Return the keyword argument `calibrate` for a sub-communicator, in a dict.

        Its value is the cost model's constants if they are known, else whether to measure them.
        """
        estimates = self._service.chooser.estimates
        assert estimates is not None
        return {"calibrate": estimates.calibration or estimates.calibrates}

    def _run(
        self,
        collective: str,
        algorithm: str,
        key: tuple | None,
        x: Any,
        out: Any,
        op: Any = None,
        commute: bool | None = None,
        order: str | None = None,
        root: Any = 0,
        counts: Any = None,
    ) -> Any:
        """Serve a collective, blocking; the arguments are those of :func:`prepare`.

        They are listed, for a dict of them would take a twentieth of a short call.
        """
        with self._door:
            if key is not None and not self._debug:
                alike = self._alike(key, x, out)
                if alike is not None:
                    return alike.serve(x, out)
            try:
                if self._debug:
                    key = None  # the ranks agree on every call first
                    arguments = {"op": op, "commute": commute, "order": order}
                    arguments |= {"root": root, "counts": counts}
                    prepared = self._compared(collective, algorithm, False, x, out, arguments)
                elif collective == "scatter":
                    prepared = self._scattering(x, out, root, counts)
                elif collective == "alltoall":
                    prepared = self._exchanging(x, out, counts)
                else:
                    given = (collective, self._place, x, out, op, commute, order)
                    prepared = prepare(*given, root=root, counts=counts)
                if prepared.call.on_device:
                    self._gpu_for(prepared.call.signature)
                return self._service.serve(prepared, algorithm, key=key, x=x, out=out)
            except Exception as error:
                if lacks_memory(error):  # the others may have it, and wait
                    self._sequencer.cannot_begin(collective, error)
                raise

    def _begin(
        self, collective: str, algorithm: str, key: tuple | None, x: Any, out: Any, **arguments: Any
    ) -> Work:
        """Begin in the background what :meth:`_run` would serve."""
        with self._door:
            try:
                if self._debug:
                    key = None
                    prepared = self._compared(collective, algorithm, True, x, out, arguments)
                else:
                    prepared = self._prepare(collective, x, out, arguments)
                if prepared.call.on_device:
                    self._gpu_for(prepared.call.signature)
                return self._service.background.begin(prepared, algorithm, key, x, out)
            except Exception as error:
                if lacks_memory(error):
                    self._sequencer.cannot_begin(collective, error)
                raise

    def _prepare(self, collective: str, x: Any, out: Any, arguments: dict[str, Any]) -> Prepared:
        """Return the call of these arguments; scatter and alltoall may exchange shapes first."""
        if collective == "scatter":
            return self._scattering(x, out, arguments["root"], arguments["counts"])
        if collective == "alltoall":
            return self._exchanging(x, out, arguments["counts"])
        return prepare(collective, self._place, x, out, **arguments)

    def _compared(
        self, collective: str, algorithm: str, background: bool, *arguments: Any
    ) -> Prepared:
        """Return the call of these arguments, once all ranks have compared theirs.

        Used with ``MPIDIST_DEBUG=1``.  An error in them on one rank is reported on all.
        """
        self._sequencer.check_usable()
        try:
            prepared = self._prepare(collective, *arguments)
        except CommunicationError:  # from the exchange that precedes the check
            raise
        except MpidistError as error:
            check_same_call(self._sequencer, collective, error)
            raise
        call, intention = prepared.call, self._service.intention
        when = " in the background" * background + " on a GPU" * call.on_device
        check_same_call(self._sequencer, f"{call.signature} algorithm={algorithm}{when}")
        # Arrays may be symmetric on some ranks only.
        if self._service.heap is not None and not call.on_device:
            self._agreed("", lambda: (intention(call, algorithm, background),))
        return prepared

    def _agreed(self, what: str, check: Callable[[], tuple]) -> tuple:
        """Return the result of `check`, a tuple that must be equal on all ranks; collective.

        Raises on all ranks if `check` fails on one, or the results differ.  `what` names the call.
        """
        self._sequencer.check_usable()
        try:
            found = check()
        except MpidistError as error:
            check_same_call(self._sequencer, what, error)
            raise
        check_same_call(self._sequencer, f"{what} {', '.join(map(str, found))}".strip())
        return found

    def _scattering(self, x: Any, out: Any, root: Any, counts: Any) -> Prepared:
        """Prepare scatter; without `out`, the root first sends shape and dtype."""
        told, root = None, self._place.check_root(root)
        if out is None:
            mine = None
            if self.rank == root:
                data = as_input(x, self.rank, device=True)
                mine = (data.shape, data.dtype, kind_of_memory(x))
            what = f"scatter root={root} without out"
            if self._debug:  # else the ranks would wait for each other before they agree
                self._agreed(what, tuple)
            sequencer = self._sequencer
            told = sequencer.set_up(
                what, lambda: sequencer.everyone(mine)[root], "exchange of the shape"
            )
        return prepare("scatter", self._place, x, out, root=root, counts=counts, told=told)

    def _exchanging(self, x: Any, out: Any, counts: Any) -> Prepared:
        """Prepare alltoall; if `counts` is only this rank's, the ranks first exchange theirs."""
        place = self._place
        if counts is None:
            return prepare("alltoall", place, x, out)
        if np.ndim(counts) == 2:
            table = [check_counts(row, place) for row in counts]
            if len(table) != self.size:
                raise place.wrong(
                    f"counts has {len(table)} rows: expected {self.size}, one per rank"
                )
            column, total = [row[self.rank] for row in table], sum(map(sum, table))
            known: dict[str, Any] = {"counts": table[self.rank], "receives": column, "total": total}
            prepared = prepare("alltoall", place, x, out, **known)
            # Each rank's part of it differs: the ranks compare the whole table.
            prepared.call.agreed += f" table={zlib.crc32(repr(table).encode()):08x}"
            return prepared
        sends = check_counts(counts, place)
        exchange = prepare("alltoall", place, _with_total(sends))
        if self._debug:
            self._agreed("alltoall with one row of counts", tuple)
        purpose = "alltoall, exchange of counts: "
        receives, totals = self._service.serve(exchange, "auto", purpose=purpose).T.tolist()
        known = {"counts": sends, "receives": receives, "total": sum(totals)}
        return prepare("alltoall", place, x, out, **known)

    def _why_not_on_gpus(self) -> str | None:
        """Return why no symmetric memory of GPUs can be; None if the GPUs decide that."""
        nodes = self.topology.num_nodes
        if nodes > 1:
            return (
                f"symmetric memory of GPUs needs all ranks on one node, these are on {nodes}: "
                "split(comm.topology.node_rank) gives a communicator for each"
            )
        if self._backend.native is None:
            return f"the {self._backend.name} backend has no shared memory"
        return None


def _why_not_in(
    memory: str, cannot_run: Callable[[Choice], str | None], choice: Choice
) -> str | None:
    """Return why no executor could run a schedule on arrays of a kind of memory, or None."""
    reached = choice.algorithm.memory
    if reached is None or reached.name != "mapped":
        return cannot_run(choice)
    return "its arrays were not allocated by comm.empty()" if memory == PRIVATE else None


def check_communicator(comm: Any) -> None:
    """Raise InvalidArgument for anything but a communicator of mpidist, such as mpi4py's."""
    if not isinstance(getattr(comm, "rank", None), int) or not hasattr(comm, "allgather_object"):
        raise InvalidArgument(f"comm={comm!r}: expected a communicator, as mpidist.init() returns")
