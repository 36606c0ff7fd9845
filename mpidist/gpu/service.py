"""Serves calls whose arrays are on a GPU, each class of them by the path that was agreed on."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from ..call import Call
from ..device.array import DeviceArray
from ..device.base import Device
from ..device.find import find_device
from ..device.recognise import describe
from ..errors import Unsupported
from ..prepared import Prepared
from ..service import Service
from ..work import Work
from .arena import Arena, Spot
from .direct import Direct
from .here import this_rank
from .landing import Landing
from .paths import Path, Rank, table, taken
from .push import NEEDS, Push, spot_of, why_not
from .staged import Staged


class GpuService:
    """What a communicator has for arrays on a GPU; made with the first of them, by all ranks.

    Parameters
    ----------
    service : Service
        That serves host arrays.
    everyone : callable
        ``everyone(value)`` gives the values of all ranks; collective.

    Attributes
    ----------
    paths : list of Path
        Which there are, and which are taken.
    """

    def __init__(self, service: Service, everyone: Callable[[Any], list[Any]]):
        self._service = service
        self.device: Device = find_device(service.backend.rank)
        native = service.backend.native
        ranks: list[Rank] = everyone(this_rank(native is not None))
        self.paths: list[Path] = table(ranks, native is not None, service.topology.num_nodes)
        self._forced = ranks[0].forced
        self._no_ipc = next((p.why for p in self.paths if p.name == "ipc" and not p.taken), None)
        rank, size = service.backend.rank, service.backend.size
        self._arena = Arena(self.device, rank, size, everyone)
        self._push = Push(self._arena)
        self._taken = taken(self.paths)
        self._staged = Staged(self.device, ranks[0].chunk_bytes)
        self._direct = None if native is None else Direct(self.device, native.bind)

    def serve(self, prepared: Prepared, algorithm: str) -> Any:
        """Serve a call, and give the user's result; what is queued on its stream sees it."""
        service, call = self._service, prepared.call
        service.check_usable()
        spot = self._symmetric(call, algorithm)
        if spot is not None:
            what = f"{call.fingerprint} in symmetric memory of GPUs {spot.key}"
            service.meet(what, lambda: self._push.serve(call))
        elif self._by_library(call, algorithm):
            assert self._direct is not None
            what = f"{call.fingerprint} on a GPU"
            self._direct.serve(call, lambda act: service.meet(what, act))
        else:
            self._staged.serve(call, lambda part: service.serve(part, algorithm))
        return given(prepared)

    def begin(self, prepared: Prepared, algorithm: str) -> Work:
        """Begin a call in the background; it is staged, whatever path the blocking form takes.

        MPI libraries that take addresses on a GPU do not do so in their non-blocking collectives.
        """
        begin = self._service.under_way.begin
        self._service.check_usable()
        return self._staged.begin(
            prepared.call,
            lambda part, end: begin(Landing.of(part, end, given(prepared)), algorithm),
        )

    def _symmetric(self, call: Call, algorithm: str) -> Spot | None:
        """Give the spot of a call that symmetric memory serves."""
        if self._no_ipc is not None or algorithm != "auto" or call.collective not in NEEDS:
            return None
        reason = why_not(call, self._arena)
        if reason is None:
            return spot_of(call, self._arena)
        if self._forced == "ipc":
            raise Unsupported(f"rank {call.rank}: MPIDIST_GPU=ipc: {call.collective}: {reason}")
        return None

    # -- symmetric memory -----------------------------------------------------------------------

    def empty(self, shape: tuple[int, ...], dtype: np.dtype) -> Any:
        """Make an array in symmetric memory of the device; collective, all want the same."""
        if self._no_ipc is not None:
            rank = self._service.backend.rank
            raise Unsupported(f"rank {rank}: empty(device=...): {self._no_ipc}")
        return self._arena.empty(shape, dtype)

    def key(self, x: Any) -> str:
        """Name an array of :meth:`empty`; raise if it is none."""
        return self._arena.key(describe(x, self._service.backend.rank))

    def free(self, x: Any) -> None:
        """Give an array of :meth:`empty` back; collective."""
        self.key(x)
        self._arena.free(describe(x, self._service.backend.rank))

    def close(self) -> None:
        """Give everything back; collective."""
        self._arena.close()

    def _by_library(self, call: Call, algorithm: str) -> bool:
        """Tell whether the MPI library gets the addresses."""
        if self._taken[call.collective] != "mpi" or algorithm not in ("auto", "native"):
            return False
        reason = self._service.backend.native.why_not(call)
        if reason is not None and algorithm == "native":
            raise Unsupported(f"rank {call.rank}: {call.collective} 'native': {reason}")
        return reason is None


def given(prepared: Prepared) -> Any:
    """Give the user's own array, or None where this rank has no result."""
    result = prepared.result
    return result.owner if isinstance(result, DeviceArray) else None
