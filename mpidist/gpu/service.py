"""The service of a communicator for calls with arrays on a GPU.

Each class of calls goes to the executor that all ranks agreed on (:mod:`.executors`).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from ..backends.executor import Executor
from ..calls.call import Call
from ..device.base import Device
from ..device.find import find_device
from ..device.recognise import describe
from ..engine.service import Service
from ..errors import ConfigError, MpidistError, Unsupported
from ..schedule.registry import RESERVED
from ..selection.choose import Candidate
from .assignment import warn_of_sharing
from .cuda_aware import CudaAwareMpi
from .executor import GpuExecutor
from .executors import GpuCandidate, RankProperties, table, taken, this_rank
from .ipc import NEEDS, DeviceHeap, IpcKernels
from .nccl.backend import has_sum
from .nccl.collectives import NcclCollectives
from .nccl.schedules import NcclRounds
from .staged import HostStaged


class GpuService:
    """The service of a communicator for arrays on a GPU; the first such array creates it.

    All ranks create it together.

    Parameters
    ----------
    service : Service
        The service for host arrays.
    everyone : callable
        ``everyone(value)`` returns the values of all ranks; collective.

    Attributes
    ----------
    candidates : list of GpuCandidate
        All executors, and whether they are taken.
    """

    def __init__(self, service: Service, everyone: Callable[[Any], list[Any]]):
        self._service = service
        self.device: Device = find_device(service.backend.rank)
        native = service.backend.native
        ranks = self._exchange(everyone, native is not None)
        warn_of_sharing([r.seen for r in ranks if r.seen is not None], service.backend.rank)
        self.candidates: list[GpuCandidate] = table(
            ranks, native is not None, service.topology.num_nodes
        )
        self._forced, self.chunk_bytes = ranks[0].forced, ranks[0].chunk_bytes
        self._no_ipc = next(
            (c.why for c in self.candidates if c.name == "ipc" and not c.taken), None
        )
        rank, size = service.backend.rank, service.backend.size
        self._heap = DeviceHeap(self.device, rank, size, everyone)
        self._taken = taken(self.candidates)
        self._nccl = NcclCollectives(service, everyone, self._taken, self._heap)
        direct = [] if native is None else [CudaAwareMpi(self.device, service, self._taken)]
        self._executors: list[GpuExecutor] = [
            IpcKernels(self._heap),
            self._nccl,
            NcclRounds(service, self._nccl, self._taken, self.device),
            *direct,
        ]
        self._staged = HostStaged(service, self.device, self.chunk_bytes)
        service.on_gpu = self.choose

    def _exchange(self, everyone: Callable[[Any], list[Any]], native: bool) -> list[RankProperties]:
        """Exchange and return the properties of all ranks; an error on one is raised on all.

        `native` is whether an MPI library carries the messages.
        """
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

    def choose(self, call: Call, algorithm: str, background: bool) -> tuple[Executor, Candidate]:
        """Return the first executor that can serve a call, made ready, and the choice; collective.

        The choice has the executor's name, the algorithm if the call names one, and the reason.

        A background call is served by NCCL or staged: MPI libraries that take addresses on a GPU do
        not take them in non-blocking collectives, and a kernel in symmetric memory can only be
        queued after a barrier.

        Raises
        ------
        Unsupported
            If the user asked for an executor that cannot serve the call.
        """
        for executor in self._executors:
            if not executor.takes(call, algorithm, background):
                continue
            reason = executor.why_not(call, algorithm, background)
            if reason is None:
                executor.make_ready()
                choice = None
                if algorithm not in RESERVED:
                    choice = self._service.chooser.choose(call, algorithm).choice
                return executor, Candidate(executor.name, choice, "the first that serves the call")
            if algorithm == "native":
                raise Unsupported(f"rank {call.rank}: {call.collective} 'native': {reason}")
            if self._forced == executor.name == "ipc":
                raise Unsupported(f"rank {call.rank}: MPIDIST_GPU=ipc: {call.collective}: {reason}")
        return self._staged.executor_for(algorithm), Candidate(
            "staged", None, "no other serves the call"
        )

    @property
    def uses_nccl(self) -> bool:
        """Whether NCCL serves reductions, or collectives that only move data."""
        return "nccl" in self._taken.values()

    # -- symmetric memory -----------------------------------------------------------------------

    def sums_in_place(self, dtype: np.dtype) -> bool:
        """Return whether to sum gradients in symmetric memory of the GPUs.

        True if NCCL is not in use, "ipc" is possible, and its kernels can add `dtype`.
        """
        return not self.uses_nccl and self._no_ipc is None and self.device.combines(dtype)

    def serves_alone(self, x: Any, collective: str) -> bool:
        """Return whether "auto" serves a collective of `x` by NCCL or in symmetric memory.

        Otherwise the call goes by MPI, possibly through host memory.
        """
        data = describe(x, self._service.backend.rank)
        if self._taken[collective] == "nccl" and has_sum(data.dtype):
            return True
        if self._no_ipc is not None or collective not in NEEDS:
            return False
        return self._heap.find(data) is not None and self.device.combines(data.dtype)

    def holds(self, x: Any) -> bool:
        """Return whether an array is in symmetric memory of this communicator."""
        data = describe(x, self._service.backend.rank)
        return bool(data.size) and self._heap.find(data) is not None

    def empty(self, shape: tuple[int, ...], dtype: np.dtype) -> Any:
        """Allocate a symmetric array on the GPUs; collective, with equal arguments on all ranks."""
        if self._no_ipc is not None:
            rank = self._service.backend.rank
            raise Unsupported(f"rank {rank}: empty(device=...): {self._no_ipc}")
        return self._heap.empty(shape, dtype)

    def key(self, x: Any) -> str:
        """Return the location of a symmetric array as text, which ranks compare.

        Raises InvalidArgument if the array is in private memory.
        """
        return self._heap.key(describe(x, self._service.backend.rank))

    def free(self, x: Any) -> None:
        """Release the memory of an array of :meth:`empty`; collective."""
        self.key(x)
        self._heap.free(describe(x, self._service.backend.rank))

    def close(self) -> None:
        """Release all resources; collective."""
        self._nccl.close()
        self._heap.close()
