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
from ..errors import ConfigError, MpidistError, Unsupported
from ..explaining import NOT_WRITTEN_BY_HAND
from ..prepared import Prepared
from ..service import Service
from ..work import Work
from .arena import Arena, Spot
from .choice import warn_of_sharing
from .direct import Direct
from .here import this_rank
from .landing import Landing
from .nccl import NcclBackend, Ranks
from .nccl_path import NcclPath
from .nccl_path import why_not as why_not_nccl
from .nccl_rounds import NcclRounds
from .nccl_types import has_sum
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
        ranks = self._told(everyone, native is not None)
        warn_of_sharing([r.seen for r in ranks if r.seen is not None], service.backend.rank)
        self.paths: list[Path] = table(ranks, native is not None, service.topology.num_nodes)
        self._forced, self.chunk_bytes = ranks[0].forced, ranks[0].chunk_bytes
        self._no_ipc = next((p.why for p in self.paths if p.name == "ipc" and not p.taken), None)
        rank, size = service.backend.rank, service.backend.size
        self._arena = Arena(self.device, rank, size, everyone)
        self._push = Push(self._arena)
        self._taken = taken(self.paths)
        self._staged = Staged(self.device, ranks[0].chunk_bytes)
        self._direct = None if native is None else Direct(self.device, native.bind)
        self._everyone = everyone
        self._nccl_path: NcclPath | None = None
        self._rounds_made: NcclRounds | None = None

    def _told(self, everyone: Callable[[Any], list[Any]], native: bool) -> list[Rank]:
        """Give what all ranks say of themselves; what is wrong on one is an error on all."""
        try:
            mine: Rank | MpidistError = this_rank(native)
        except (ConfigError, Unsupported) as error:
            mine = error
        told = everyone(mine)
        for number, entry in enumerate(told):
            if isinstance(entry, MpidistError):
                rank = self._service.backend.rank
                raise type(entry)(f"rank {rank}: of rank {number}: {entry}")
        return told

    def serve(self, prepared: Prepared, algorithm: str) -> Any:
        """Serve a call, and give the user's result; what is queued on its stream sees it."""
        service, call = self._service, prepared.call
        service.check_usable()
        spot = self._symmetric(call, algorithm)
        if self._by_nccl(call, algorithm, spot):
            what = f"{call.fingerprint} by NCCL"
            service.meet(what, lambda: self._nccl.serve(call, service.timeout))
        elif self._by_rounds(call, algorithm):
            way = service.chooser.way(call, algorithm, None)
            choice, arity = way.choice, service.arity(way)
            assert choice is not None
            rounds = self._rounds
            rounds.check(call, choice, arity)

            def queue(call: Call, stream: int) -> list[Any]:
                return rounds.queue(call, choice, arity, stream)

            what = f"{call.fingerprint} by NCCL's messages, {choice.name}"
            service.meet(what, lambda: self._nccl.serve(call, service.timeout, queue))
        elif spot is not None:
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
        """Begin a call in the background: by NCCL, or staged.

        MPI libraries that take addresses on a GPU do not do so in their non-blocking collectives,
        and to queue something in symmetric memory the ranks would have to meet first.
        """
        begin = self._service.under_way.begin
        self._service.check_usable()
        call = prepared.call
        if self.uses_nccl and self._by_nccl(call, algorithm, self._symmetric(call, algorithm)):
            return self._nccl.begin(call, lambda: given(prepared), self._service.timeout)
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

    # -- NCCL -----------------------------------------------------------------------------------

    @property
    def uses_nccl(self) -> bool:
        """Whether NCCL serves what it can."""
        return "nccl" in self._taken.values()

    @property
    def _nccl(self) -> NcclPath:
        """NCCL's communicator; made by all ranks, in the first call that it serves."""
        if self._nccl_path is None:
            backend = self._service.backend
            ranks = Ranks(backend.rank, backend.size, self._everyone)
            self._nccl_path = NcclPath(NcclBackend(ranks), self._broke)
        return self._nccl_path

    @property
    def _rounds(self) -> NcclRounds:
        """What runs written schedules over NCCL's messages; made by all ranks."""
        if self._rounds_made is None:
            self._rounds_made = NcclRounds(
                self._nccl.backend, self._service.groups, self._service.engine
            )
        return self._rounds_made

    def _by_rounds(self, call: Call, algorithm: str) -> bool:
        """Tell whether a schedule that was asked for by name runs over NCCL's messages."""
        if self._taken[call.collective] != "nccl" or algorithm in ("auto", *NOT_WRITTEN_BY_HAND):
            return False
        op = call.op
        return op is None or (op.builtin and self.device.combines(call.dtype))

    def _broke(self, reason: str) -> None:
        self._service.broken = f"{reason}; create a new communicator"

    def _by_nccl(self, call: Call, algorithm: str, spot: Spot | None) -> bool:
        """Tell whether NCCL serves a call; what lies in symmetric memory only where it must."""
        if self._taken[call.collective] != "nccl" or algorithm not in ("auto", "native"):
            return False
        if spot is not None and self._forced != "nccl":
            return False
        reason = why_not_nccl(call)
        if reason is not None and algorithm == "native":
            raise Unsupported(f"rank {call.rank}: {call.collective} 'native': {reason}")
        if reason is None and self._nccl_path is None:
            assert self._nccl is not None  # here, for its own calls must not come within another
        return reason is None

    # -- symmetric memory -----------------------------------------------------------------------

    def sums_in_place(self, dtype: np.dtype) -> bool:
        """Tell whether sums of a dtype take place in symmetric memory, and are best there."""
        return not self.uses_nccl and self._no_ipc is None and self.device.combines(dtype)

    def serves_alone(self, x: DeviceArray, collective: str) -> bool:
        """Tell whether the GPUs serve a sum of `x`, or its movement, by "auto"."""
        if self._taken[collective] == "nccl" and has_sum(x.dtype):
            return True
        if self._no_ipc is not None or collective not in NEEDS:
            return False
        return self._arena.find(x) is not None and self.device.combines(x.dtype)

    def holds(self, x: Any) -> bool:
        """Tell whether an array is in symmetric memory of this communicator."""
        data = describe(x, self._service.backend.rank)
        return bool(data.size) and self._arena.find(data) is not None

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
        if self._nccl_path is not None:
            self._nccl_path.close()
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
