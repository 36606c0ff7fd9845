"""The communicator, what users hold: collectives, messages, objects, sub-communicators."""

from __future__ import annotations

import os
from collections.abc import Callable
from functools import cached_property
from typing import Any

import numpy as np

from . import background, collectives, memory, sending
from .advice import Advice
from .backends.base import Backend
from .calibration import from_environment
from .config import CollectiveConfig
from .debug import check_alike
from .errors import CommunicationError, InvalidArgument, MpidistError
from .explaining import explain
from .gpu.messages import GpuMessages
from .gpu.service import GpuService
from .measure import Calibration
from .messages import Messages
from .pipelining import Pipelining
from .prepare import Place, Prepared
from .quick import QuickCalls
from .service import Service
from .short_calls import ShortCalls
from .symmetric import Heap
from .topology import Topology
from .tuning import TuningTable
from .waiting import SPINS
from .work import Work


class Communicator:
    """A group of ranks and everything they can do together.

    Arguments follow numpy: arrays of any shape, lists and scalars; results are new arrays unless
    `out` is given; ``out=x`` is in place.  Every rank must make the same calls in the same order.

    Parameters
    ----------
    backend : Backend
        Who moves the bytes.
    config : CollectiveConfig, optional
        Strategies, thresholds and the deadline.
    segment_bytes : int
        Blocks longer than this many bytes are pipelined in segments.
    window : int
        Segments under way at a time.
    debug : bool, optional
        Agree on every collective first; by default as ``MPIDIST_DEBUG`` says.
    tuning : TuningTable, optional
        What "auto" takes, where the configuration leaves it open; the same on every rank, which
        :func:`mpidist.init` sees to.
    calibrate : bool or Calibration, optional
        Measure the cost model's constants, within 50 ms, as soon as "auto" must choose among
        hand-written algorithms; by default as ``MPIDIST_CALIBRATE`` says, else with MPI.
        Constants that are known already are used at once.
    """

    def __init__(
        self,
        backend: Backend,
        config: CollectiveConfig | None = None,
        *,
        segment_bytes: int = Pipelining.segment_bytes,
        window: int = Pipelining.window,
        debug: bool | None = None,
        tuning: TuningTable | None = None,
        calibrate: bool | Calibration | None = None,
    ):
        for name, value in (("segment_bytes", segment_bytes), ("window", window)):
            if not isinstance(value, int) or value < 1:
                raise InvalidArgument(
                    f"rank {backend.rank}: {name}={value!r} must be a whole number >= 1"
                )
        config = config or CollectiveConfig()
        config.check_size(backend.size, backend.rank)
        self._backend, self._place = backend, Place(backend.rank, backend.size)
        pipelining = Pipelining(segment_bytes, window, backend.library)
        self._service = Service(backend, config, pipelining)
        self._messages = Messages(self._service)
        self._options: dict[str, Any] = {
            "segment_bytes": segment_bytes,
            "window": window,
            "tuning": tuning,
        }
        self._service.chooser.advice = self._advice(calibrate)
        self._service.chooser.advice.tell(backend.rank)
        self._debug = (
            os.environ.get("MPIDIST_DEBUG", "0") not in ("", "0") if debug is None else debug
        )
        self._quick = QuickCalls(self._service)
        self._short = ShortCalls(self._service)
        self._gpu_service: GpuService | None = None
        self.rank, self.size = backend.rank, backend.size
        if backend.native is not None and self.topology.num_nodes == 1:
            patience = getattr(backend, "patience", SPINS)
            everyone = self._service.everyone
            self._service.shared.heap = Heap(self.rank, self.size, everyone, patience)

    def __repr__(self) -> str:
        return f"<Communicator rank {self.rank} of {self.size} on {self._backend.name}>"

    # -- properties -----------------------------------------------------------------------------

    @property
    def backend(self) -> Backend:
        """Who moves the bytes."""
        return self._backend

    @property
    def config(self) -> CollectiveConfig:
        """Strategies, thresholds and counts."""
        return self._service.config

    @property
    def topology(self) -> Topology:
        """Who shares a node with whom."""
        return self._service.topology

    @property
    def timeout(self) -> float | None:
        """Deadline of every wait in seconds; None waits forever.  May be set."""
        return self._service.timeout

    @timeout.setter
    def timeout(self, seconds: float | None) -> None:
        self._service.timeout = CollectiveConfig(timeout=seconds).timeout

    @property
    def broken(self) -> str | None:
        """Why this communicator cannot be used any more, or None."""
        return self._service.broken

    # -- collectives: see collectives.py and background.py --------------------------------------

    allreduce = collectives.allreduce
    reduce = collectives.reduce
    broadcast = collectives.broadcast
    allgather = collectives.allgather
    gather = collectives.gather
    reduce_scatter = collectives.reduce_scatter
    scatter = collectives.scatter
    alltoall = collectives.alltoall
    barrier = collectives.barrier

    iallreduce = background.iallreduce
    ireduce = background.ireduce
    ibroadcast = background.ibroadcast
    iallgather = background.iallgather
    igather = background.igather
    ireduce_scatter = background.ireduce_scatter
    iscatter = background.iscatter
    ialltoall = background.ialltoall
    ibarrier = background.ibarrier

    # -- point-to-point and objects: see sending.py ---------------------------------------------

    send = sending.send
    recv = sending.recv
    isend = sending.isend
    irecv = sending.irecv

    send_object = sending.send_object
    recv_object = sending.recv_object
    broadcast_object = sending.broadcast_object
    allgather_object = sending.allgather_object

    # -- structure ------------------------------------------------------------------------------

    def split(self, color: int | None, key: int = 0) -> Communicator | None:
        """Divide the ranks: those of one `color` form a new communicator, ordered by `key`.

        Parameters
        ----------
        color : int or None
            ≥ 0; None for a rank that will be in none of them, which gets None.
        key : int
            Order within the color; ranks with equal keys keep their order.

        Returns
        -------
        Communicator or None
            With this one's single-level strategies, thresholds and deadline.
        """

        def check() -> tuple[()]:
            if color is not None and (not isinstance(color, (int, np.integer)) or color < 0):
                raise self._place.wrong(f"color={color!r}: must be a whole number >= 0, or None")
            return ()

        if self._debug:
            self._agreed("split", check)
        check()
        mine = (None if color is None else int(color), int(key))
        sub = self._service.meet("split", lambda: self._backend.split(*mine))
        if sub is None:
            return None
        config = self.config.at_level("local").replace(timeout=self.timeout)
        return Communicator(sub, config, debug=self._debug, **self._options, **self._calibrated())

    empty = memory.empty
    use_gpu = memory.use_gpu
    free = memory.free
    explain = explain

    def calibrate(self) -> Calibration:
        """Measure the constants of the cost model now, within 50 ms; collective.

        Without it this happens when "auto" first needs them, unless that was turned off.
        """
        self._quick.clear()
        return self._service.calibrate()

    def learn(self, calibration: Calibration) -> None:
        """Have the cost model predict with these constants from now on, for "auto" and `explain`.

        Parameters
        ----------
        calibration : Calibration
            The same on every rank, for instance that of ``mpidist.links.measure_links``.
        """
        self._quick.clear()
        self._service.learn(calibration)

    @property
    def _gpu(self) -> GpuService:
        """What serves arrays on a GPU; made by all ranks, in the first call that has one."""
        return self._gpu_for("a call with an array on a GPU")

    def _gpu_for(self, what: str) -> GpuService:
        if self._gpu_service is None:
            service = self._service
            self._gpu_service = service.set_up(what, lambda: GpuService(service, service.everyone))
        return self._gpu_service

    @cached_property
    def _gpu_messages(self) -> GpuMessages:
        return GpuMessages(self._messages)

    # -- within ---------------------------------------------------------------------------------

    def _advice(self, calibrate: bool | Calibration | None) -> Advice:
        known = calibrate if isinstance(calibrate, Calibration) else None
        if calibrate is None:
            calibrate = from_environment()
        measures = self._backend.native is not None if calibrate is None else bool(calibrate)
        pipelining = self._service.cache.pipelining
        table = self._options["tuning"]
        library, groups = self._backend.library, self.topology.groups
        return Advice(library, groups, measures, known, table, pipelining)

    def _calibrated(self) -> dict[str, Any]:
        """Give the option of a sub-communicator: the constants, or whether to measure them."""
        advice = self._service.chooser.advice
        assert advice is not None
        return {"calibrate": advice.calibration or advice.calibrates}

    def _run(
        self,
        collective: str,
        make: Callable[[], Prepared],
        algorithm: str,
        key: tuple | None = None,
        x: Any = None,
        out: Any = None,
    ) -> Any:
        prepared = self._prepared(collective, make, algorithm)
        if prepared.call.on_device:
            return self._gpu_for(prepared.call.fingerprint).serve(prepared, algorithm)
        if self._short.serve(prepared, algorithm):
            result = prepared.give()
        else:
            result = self._service.serve(prepared, algorithm)
        same = result is None or result is out or result is x
        if key is not None and not self._debug and same:
            self._quick.remember(key, prepared, algorithm, x, out)
        return result

    def _begin(self, collective: str, make: Callable[[], Prepared], algorithm: str) -> Work:
        prepared = self._prepared(collective, make, algorithm, background=True)
        if prepared.call.on_device:
            return self._gpu_for(prepared.call.fingerprint).begin(prepared, algorithm)
        return self._service.under_way.begin(prepared, algorithm)

    def _prepared(
        self,
        collective: str,
        make: Callable[[], Prepared],
        algorithm: str,
        background: bool = False,
    ) -> Prepared:
        """Check the arguments; with debug, agree with the other ranks on them, and on the way."""
        if not self._debug:
            return make()
        self._service.check_usable()
        try:
            prepared = make()
        except CommunicationError:  # of what the ranks have to tell each other first
            raise
        except MpidistError as error:
            check_alike(self._service, collective, error)
            raise
        call, choose = prepared.call, self._service.chooser.intention
        when = " in the background" * background + " on a GPU" * call.on_device
        check_alike(self._service, f"{call.fingerprint} algorithm={algorithm}{when}")
        # Arrays may be symmetric on some ranks only.
        if self._service.shared.heap is not None and not call.on_device:
            self._agreed("", lambda: (choose(call, algorithm, background),))
        return prepared

    def _agreed(self, what: str, check: Callable[[], tuple]) -> tuple:
        """Check arguments that must be the same on every rank, and that they are."""
        self._service.check_usable()
        try:
            found = check()
        except MpidistError as error:
            check_alike(self._service, what, error)
            raise
        check_alike(self._service, f"{what} {', '.join(map(str, found))}".strip())
        return found

    def _root(self, root: Any) -> int:
        return self._place.check_root(root)
