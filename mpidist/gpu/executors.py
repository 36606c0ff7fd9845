"""The executors that a communicator can have for GPU arrays, and which of them it takes.

All ranks exchange their properties and compute the same reasons, and the same table of them.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from ..arguments import one_of
from ..device.find import find_device, installed_device, visible, why_no_device
from ..errors import ConfigError, Unsupported
from ..schedule.contract import COLLECTIVES
from ..selection.config import switch
from ..selection.names import IPC, IPC_SLOTS, MPI, NCCL, STAGED
from ..selection.rules import ON_DEVICE, Place
from .assignment import VisibleGpus, shared_gpus
from .cuda_aware import NO, YES, Awareness, detect, loaded_library
from .cuda_aware import VARIABLE as AWARE
from .nccl.backend import SHARING, shares_here, why_not_here
from .staged import CHUNK_BYTES

CHUNK = "MPIDIST_GPU_CHUNK_BYTES"


def this_rank(native: bool) -> RankProperties:
    """Return the properties of this rank on which the choice of executors depends.

    `native` is whether an MPI library carries the messages.
    """
    no_nccl = why_not_here()
    seen, side_by_side = None, True
    if why_no_device() is None:
        device = find_device()
        side_by_side = device.side_by_side
        mine, gpus = device.identity(), visible()
        # The identity of an emulated device may be missing in the list of visible ones.
        gpus, number = (gpus, gpus.index(mine)) if mine in gpus else ((mine,), 0)
        seen = VisibleGpus(socket.gethostname(), gpus, number)
    asked = forced_executor(), chunk_bytes()
    return RankProperties(awareness(native), *asked, no_nccl, seen, side_by_side, shares_here())


def awareness(native: bool, environ: Mapping[str, str] = os.environ) -> Awareness:
    """Return whether this rank's MPI library is CUDA-aware, and why.

    Without an MPI library that carries the messages (`native` is False), it is not.
    """
    if not native:
        return Awareness(NO, "messages do not go by MPI here")
    devices = installed_device()
    if devices is not None and devices.emulated and not environ.get(AWARE):
        return Awareness(YES, "an emulated device has addresses that any library takes")
    return detect(loaded_library(), environ)


def chunk_bytes(environ: Mapping[str, str] = os.environ) -> int:
    """Return ``MPIDIST_GPU_CHUNK_BYTES``, the most bytes of an array in a chunk; else 4 MiB."""
    text = environ.get(CHUNK, "").strip()
    if not text:
        return CHUNK_BYTES
    if not text.isdecimal() or int(text) < 1:
        raise ConfigError(f"{CHUNK}={text!r}: expected a whole number of bytes >= 1")
    return int(text)


def check_environment(environ: Mapping[str, str] = os.environ) -> None:
    """Raise ConfigError for a variable ``MPIDIST_GPU…`` with a value that is not allowed."""
    chunk_bytes(environ)
    forced_executor(environ)
    switch(AWARE, environ)


VARIABLE = "MPIDIST_GPU"
_WITH_DATA = [c for c in COLLECTIVES.values() if not c.idempotent]
CLASSES: dict[str, tuple[str, ...]] = {
    "reductions": tuple(c.name for c in _WITH_DATA if c.reduces),
    "movement": tuple(c.name for c in _WITH_DATA if not c.reduces),
    "messages": ("send", "recv"),
}
"""The classes of operations; one executor serves all operations of a class."""
NAMES = (NCCL, IPC, MPI, IPC_SLOTS, STAGED)
"""The names of the executors."""

IPC_RANKS = 32
"""Largest number of ranks for "ipc" and "ipc_slots": a kernel has an array or two of each."""


@dataclass(frozen=True)
class RankProperties:
    """Properties of one rank, which all ranks exchange.

    `forced` is the value of ``MPIDIST_GPU``, empty if it is not set; `no_nccl` is why NCCL cannot
    be used on the rank, empty if it can; `seen` are the GPUs visible to it, and the one in use;
    `side_by_side` is that of its device; `nccl_shares` is whether NCCL takes ranks on one GPU.
    """

    aware: Awareness
    forced: str
    chunk_bytes: int
    no_nccl: str = "it was not asked for"
    seen: VisibleGpus | None = None
    side_by_side: bool = True
    nccl_shares: bool = False

    @property
    def place(self) -> tuple[str, str] | None:
        """The host and the UUID of the GPU in use; None if the rank has no GPU."""
        return None if self.seen is None else self.seen.place


@dataclass(frozen=True)
class GpuCandidate:
    """An executor that may serve a class of operations: whether it is taken, and why.

    Attributes
    ----------
    operations : str
        Name of the class, a key of :data:`CLASSES`: "reductions", "movement" or "messages".
    name : str
        Name of the executor, one of :data:`NAMES`: "nccl", "ipc", "mpi", "ipc_slots" or "staged".
    taken : bool
        Whether it serves the class.
    why : str
        The reason.
    """

    operations: str
    name: str
    taken: bool
    why: str


def forced_executor(environ: Mapping[str, str] = os.environ) -> str:
    """Return the executor that ``MPIDIST_GPU`` forces; empty if it is unset."""
    name = environ.get(VARIABLE, "").strip().lower()
    if name:
        one_of(VARIABLE, name, NAMES, error=ConfigError)
    return name


def why_not_each(
    ranks: Sequence[RankProperties], native: bool = True, nodes: int = 1
) -> dict[str, str | None]:
    """Return, by name, why an executor serves no call, or None if it serves some; equal on all.

    `ranks` are the properties by rank; the forced executor is that of rank 0.  `native` is whether
    an MPI library carries the messages.  Raises Unsupported, with the reason, if the forced
    executor is impossible.
    """
    forced, no_ipc = ranks[0].forced, _no_ipc(native, nodes, len(ranks))
    cannot = {
        NCCL: _no_nccl(ranks, forced == NCCL),
        IPC: no_ipc,
        MPI: _no_mpi(ranks, native),
        IPC_SLOTS: no_ipc,
        STAGED: None,
    }
    if forced and cannot[forced] is not None:
        raise Unsupported(f"{VARIABLE}={forced}: {cannot[forced]}")
    if cannot[NCCL] is None and forced in ("", NCCL) and cannot[MPI] is None:
        cannot[MPI] = "NCCL is in use, and NCCL and MPI on one GPU can deadlock"
    # "staged" serves what the forced one cannot; "ipc" leaves all but symmetric arrays to others.
    others = set(NAMES) - {forced, STAGED} if forced and forced != IPC else set()
    for name in others:
        cannot[name] = cannot[name] or f"{VARIABLE}={forced} forces another executor"
    return cannot


def table(
    ranks: Sequence[RankProperties], native: bool = True, nodes: int = 1
) -> list[GpuCandidate]:
    """Return the executors of each class, best first, also those that are impossible.

    Of each class one is taken, and if possible "ipc" as well, for arrays in symmetric memory; with
    "ipc_slots" also "staged", for short ones.  The parameters and errors are those of
    :func:`why_not_each`.
    """
    forced, cannot = ranks[0].forced, why_not_each(ranks, native, nodes)
    found = []
    for operations, names in CLASSES.items():
        rules = [{rule.choose for rule in ON_DEVICE[name]} for name in names]
        able = [name for name in NAMES if any(name in served for served in rules)]
        best = next(name for name in able if cannot[name] is None and name != IPC)
        taken = {best, IPC} | {STAGED} if best == IPC_SLOTS else {best, IPC}
        for name in able:
            takes = cannot[name] is None and name in taken
            candidate = GpuCandidate(operations, name, takes, "")
            why = _why(candidate, cannot[name], forced, takes_turns(ranks))
            found.append(replace(candidate, why=why))
    return found


def takes_turns(ranks: Sequence[RankProperties]) -> bool:
    """Return whether ranks take turns on a GPU: several use it, and not side by side."""
    side_by_side = all(rank.side_by_side for rank in ranks)
    return not side_by_side and shared_gpus([rank.place for rank in ranks]) is not None


def _no_nccl(ranks: Sequence[RankProperties], forced: bool) -> str | None:
    for number, rank in enumerate(ranks):
        if rank.no_nccl:
            return f"{rank.no_nccl} (rank {number})"
    if len(ranks) == 1 and not forced:
        return "there is one rank only"
    shared = shared_gpus([rank.place for rank in ranks])
    if shared is None or not all(rank.nccl_shares for rank in ranks):
        return shared
    # NCCL calls that an experiment, and it can lock up.
    return None if forced else f"{shared}, and {SHARING}=1 serves {VARIABLE}={NCCL} only"


def _no_ipc(native: bool, nodes: int, ranks: int) -> str | None:
    if not native:
        return "the ranks are threads of one process"
    if ranks > IPC_RANKS:
        return f"there are {ranks} ranks; the maximum is {IPC_RANKS}"
    return f"the ranks are on {nodes} nodes" if nodes > 1 else None


def _no_mpi(ranks: Sequence[RankProperties], native: bool) -> str | None:
    if not native:
        return "messages do not go by MPI here"
    for number, rank in enumerate(ranks):
        if rank.aware.answer != YES:
            prefix = "" if rank.aware.answer == "no" else "not known to be CUDA-aware: "
            return f"{prefix}{rank.aware.why} (rank {number})"
    return None


def _why(candidate: GpuCandidate, cannot: str | None, forced: str, crowded: bool) -> str:
    if cannot is not None:
        return cannot
    place = Place(1, crowded=crowded)
    rules = {n: ON_DEVICE[n] for n in CLASSES[candidate.operations]}
    own = {n: r for n in rules for r in rules[n] if r.choose == candidate.name and r.at(place)}
    if candidate.taken and candidate.name == IPC:
        size = str(next(iter(own.values()))).removeprefix(IPC)
        return f"for arrays of comm.empty(device='cuda'){size}: {', '.join(own)}"
    if candidate.taken and forced == candidate.name:
        return f"{VARIABLE}={forced} forces it"
    if not candidate.taken:
        return f"{VARIABLE}={forced} forces another executor" if forced else "one above is taken"
    if candidate.name == IPC_SLOTS:
        return f"for other arrays{str(next(iter(own.values()))).removeprefix(IPC_SLOTS)}"
    if candidate.name == "mpi":
        return "the MPI library accepts GPU addresses"
    if candidate.name == "nccl":
        return "every rank has a GPU of its own"
    if forced == "ipc":
        return "for calls that symmetric memory cannot serve"
    others = f"{VARIABLE}={forced} cannot serve these; " if forced else ""
    return f"{others}it always works"
