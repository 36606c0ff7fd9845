"""The executors of a communicator for calls with arrays on a GPU, and what they share."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import numpy as np

from ..device.base import Device
from ..device.find import find_device
from ..device.recognise import as_device_array
from ..engine.service import Service
from ..errors import ConfigError, MpidistError, Unsupported
from ..selection.names import IPC, IPC_SLOTS, MPI, NATIVE, NCCL, STAGED
from .assignment import warn_of_sharing
from .cuda_aware import CudaAwareMpi
from .executors import (
    GpuCandidate,
    RankProperties,
    table,
    takes_turns,
    this_rank,
    why_not_each,
)
from .heap import DeviceHeap, DevicePart
from .ipc import NEEDS, Ipc, IpcSlots
from .nccl.backend import has_sum
from .nccl.executor import Nccl
from .staged import HostStaged, Staged, Through

_NOT_THROUGH = (STAGED, "messages")
"""Executors of host arrays without a form for GPU arrays: "staged" is another one there."""


class GpuExecutors:
    """The executors of a communicator for arrays on a GPU; the same on every rank: ``comm.gpu``.

    The first such array creates them, on all ranks together.  ``MPIDIST_GPU`` forces one;
    operations that it does not have are staged.  While NCCL is in use the MPI library is given no
    addresses on a GPU, because on one GPU the two can deadlock.

    Attributes
    ----------
    candidates : list of GpuCandidate
        Executors of all classes of operations, both those taken and the others.
    chunk_bytes : int
        Most bytes of an array in a chunk of the staged executor, through host memory.
    why_no_symmetric_memory : str or None
        Why the GPUs have no symmetric memory; None if they can.
    """

    def __init__(self, service: Service, everyone: Callable[[Any], list[Any]]):
        self._service = service
        self.device: Device = find_device(service.backend.rank)
        native = service.backend.native
        ranks = self._exchange(everyone, native is not None)
        warn_of_sharing([r.seen for r in ranks if r.seen is not None], service.backend.rank)
        place = native is not None, service.topology.num_nodes
        self.candidates: list[GpuCandidate] = table(ranks, *place)
        reasons = why_not_each(ranks, *place)
        forced, self.chunk_bytes = ranks[0].forced, ranks[0].chunk_bytes
        rank, size = service.backend.rank, service.backend.size
        self._heap = DeviceHeap(self.device, rank, size, everyone)
        self.why_no_symmetric_memory = reasons[IPC]
        self._nccl = Nccl(reasons[NCCL], service, everyone, self._heap)
        self._staged = HostStaged(service, self.device, self.chunk_bytes)
        libraries = self._nccl, CudaAwareMpi(reasons[MPI], self.device, service)
        through = [e for e in service.executors if e.name not in _NOT_THROUGH]
        executors = [
            Ipc(reasons[IPC], self._heap, service),
            *libraries,
            IpcSlots(reasons[IPC_SLOTS], self._heap, service),
            Staged(self._staged),
            *(Through(self._staged, e, libraries if e.name == NATIVE else ()) for e in through),
        ]
        required = {("auto", False): forced} if forced in (IPC, IPC_SLOTS) else {}
        if self.uses_nccl:
            required |= {(NATIVE, False): NCCL, (NATIVE, True): NCCL}
        service.add(executors, required, takes_turns(ranks))
        _in_use.add(self)

    def _exchange(self, everyone: Callable[[Any], list[Any]], native: bool) -> list[RankProperties]:
        """Exchange and return the properties of all ranks; an error on one is raised on all."""
        try:
            mine: RankProperties | MpidistError = this_rank(native)
        except (ConfigError, Unsupported) as error:
            mine = error
        ranks = everyone(mine)
        for number, entry in enumerate(ranks):
            if isinstance(entry, MpidistError):
                rank = self._service.backend.rank
                raise type(entry)(f"rank {rank}: error on rank {number}: {entry}")
        return ranks

    @property
    def uses_nccl(self) -> bool:
        """Whether NCCL serves reductions, or collectives that only move data."""
        return self._nccl.unavailable is None

    # -- symmetric memory -----------------------------------------------------------------------

    def sums_in_place(self, dtype: np.dtype) -> bool:
        """Return whether to sum gradients in symmetric memory of the GPUs.

        True if NCCL is not in use, "ipc" is possible, and its kernels can add `dtype`.
        """
        possible = not self.uses_nccl and self.why_no_symmetric_memory is None
        return possible and self.device.combines(dtype)

    def serves_alone(self, x: Any, collective: str) -> bool:
        """Return whether "auto" serves a collective of `x` by NCCL or in symmetric memory.

        Otherwise the call goes by MPI, possibly through host memory.
        """
        data = as_device_array(x, self._service.backend.rank)
        if self.uses_nccl and has_sum(data.dtype):
            return True
        if self.why_no_symmetric_memory is not None or collective not in NEEDS:
            return False
        return self._heap.find(data) is not None and self.device.combines(data.dtype)

    def holds(self, x: Any) -> bool:
        """Return whether an array is in symmetric memory of this communicator."""
        data = as_device_array(x, self._service.backend.rank)
        return bool(data.size) and self._heap.find(data) is not None

    def empty(self, shape: tuple[int, ...], dtype: np.dtype) -> Any:
        """Allocate a symmetric array on the GPUs; collective, with equal arguments on all ranks."""
        if self.why_no_symmetric_memory is not None:
            rank = self._service.backend.rank
            raise Unsupported(f"rank {rank}: empty(device=...): {self.why_no_symmetric_memory}")
        return self._heap.empty(shape, dtype)

    def key(self, x: Any) -> str:
        """Return a symmetric array's location, as ranks compare it; else InvalidArgument."""
        return self._heap.key(as_device_array(x, self._service.backend.rank))

    def free(self, x: Any) -> None:
        """Release the memory of an array of :meth:`empty`; collective."""
        self.key(x)
        self._heap.free(as_device_array(x, self._service.backend.rank))

    def let_go(self) -> None:
        """Let queued work go on that waits for a lost rank, without communication."""
        self._nccl.leave()
        self._heap.let_go()

    def leave(self) -> list[DevicePart]:
        """End the use after :meth:`let_go`, without communication; see `DeviceHeap.leave`."""
        return self._heap.leave()

    def close(self) -> None:
        """Release all resources; collective."""
        self._nccl.close()
        self._heap.close()
        self._staged.close()


_in_use: weakref.WeakSet[GpuExecutors] = weakref.WeakSet()  # of all communicators of this process


def leave_all() -> Callable[[], None]:
    """End the use of GPUs on all communicators of this process, which a loss has made useless.

    Returns what releases this rank's memory, with the last arrays there, once all have come here.
    """
    services = list(_in_use)
    for service in services:  # all first: leave() waits for the work of all communicators
        service.let_go()
    parts = [part for service in services for part in service.leave()]
    _in_use.clear()

    def release() -> None:
        for part in parts:
            part.left = True

    return release
