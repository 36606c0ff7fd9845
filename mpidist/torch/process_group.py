"""The process group of torch.distributed's backend "mpidist", over a communicator.

process_group     what c10d asks of a group: names, groups, memory, messages
collectives       its collectives, as operations: a communicator's call, and what is around it
memory            the memory of tensors, as a communicator takes it
operation_queue   performs operations in order: in the caller's thread, or queued ones
messages          sends and receives, on a communicator of their own, which threads share
work              what callers get: Works, their futures, and the threads for these
"""

from __future__ import annotations

import contextlib
import functools
import math
import pickle
import sys
import weakref
import zlib
from collections.abc import Iterator, Sequence
from datetime import timedelta
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import distributed_c10d as c10d

from ..communicator.communicator import Communicator
from ..engine.door import share
from ..errors import CommunicationError, InvalidArgument
from .c10d_arguments import gated, one
from .collectives import Collectives
from .memory import DEVICES, forget_arrays
from .operation_queue import limit
from .rendezvous import root
from .work import Coalesced, Member, backend_error, uncompiled

_MOST_BUFFERS = 62
_SETUP_SECONDS = 60.0  # for making and freeing a group, if its deadline is shorter
# The number of references to what is in a pool only.
_UNUSED = (lambda pool: sys.getrefcount(pool[0]))([object()])

Key = tuple[tuple[int, ...], int]
_RETIRED: dict[Key, tuple[Communicator, Communicator]] = {}  # of groups that were destroyed
_MADE: dict[tuple[int, ...], int] = {}  # groups, by their members


class ProcessGroup(Collectives):
    """A process group whose collectives are those of the communicator `comm`, which it owns.

    `timeout` is the deadline of each operation that has none of its own, and `store` is kept for
    the libraries that ask for it.
    """

    def __init__(self, comm: Communicator, name: str, timeout: timedelta, store: Any):
        messages = comm.split(0)  # for sends and receives
        assert messages is not None
        super().__init__(comm, messages, name)
        self.messages = messages
        # The members, as ranks of the world, and the number of this group among those that they
        # made, from 1; None for a group of split_group().
        self.key: Key | None = None
        self._description, self._store = "", store
        self._buffers: dict[tuple[int, torch.dtype], list[np.ndarray]] = {}
        self.bound_device_id = None
        self.options = torch._C._distributed_c10d.Backend.Options("mpidist", timeout)
        self.set_timeout(timeout)

    def __repr__(self) -> str:
        return f"<ProcessGroup {self.group_name!r} of mpidist: rank {self.rank()} of {self.size()}>"

    # -- what c10d asks ---------------------------------------------------------------------------

    def rank(self) -> int:
        """Return this rank in the group."""
        return self.member.rank

    def size(self) -> int:
        """Return the number of members."""
        return self.member.size

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
                f"rank {self.rank()}: the group {self.group_name!r} of mpidist takes tensors on "
                f"{' and '.join(DEVICES)}, not on {device}"
            )
        return self

    def _set_group_name(self, name: str) -> None:
        self.member.name = name
        super()._set_group_name(name)

    def getGroupName(self) -> str:
        """Return the name of the group."""
        return self.member.name

    group_name = property(getGroupName)

    def _set_group_desc(self, description: str) -> None:
        self._description = description
        super()._set_group_desc(description)

    def getGroupDesc(self) -> str:
        """Return the description of the group."""
        return self._description

    group_desc = property(getGroupDesc)

    def get_group_store(self) -> Any:
        """Return the store of the group."""
        return self._store

    def _get_sequence_number_for_group(self) -> int:
        return self._queue.sequence

    def _set_sequence_number_for_group(self) -> None:
        """Do nothing: all members number their operations from 1."""

    def set_timeout(self, timeout: timedelta) -> None:
        """Set the deadline of each operation that has no timeout of its own."""
        self.options._timeout = timeout
        seconds = self._queue.seconds = limit(timeout)
        self.comm.timeout = self.messages.timeout = seconds
        share(self.messages, seconds)

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
        if self.rank() not in new_ranks:
            return None
        name = group_name or f"{self.group_name}:{','.join(map(str, new_ranks))}"
        with self._translating("split_group"), self._queue.performing:
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
        self._queue.hasten_all()
        self._posted.advance()
        if self.key is not None and not self._queue.queued and not self._posted.pending:
            _RETIRED[self.key] = (self.comm, self.messages)

    def abort(self) -> None:
        """Let queued operations be performed at once, as :meth:`shutdown` does."""
        self.shutdown()

    @contextlib.contextmanager
    def _translating(self, call: str) -> Iterator[None]:
        """Raise torch.distributed's exception for a communication error of a call."""
        try:
            yield
        except CommunicationError as error:
            raise backend_error(error, self.member.what(call), self._queue.seconds) from error

    def _start_coalescing(self, device: torch.device) -> None:
        """Begin a coalesced block, whose calls remain separate operations."""
        self._queue.block = []

    def _end_coalescing(self, device: torch.device) -> Any:
        """End the block; return the Work of all its operations, which PyTorch waits for instead."""
        works, self._queue.block = self._queue.block or [], None
        return Coalesced(works)

    # -- messages ---------------------------------------------------------------------------------

    @gated
    def send(self, tensors: Any, peer: int, tag: int = 0) -> Any:
        """Send a tensor to the member with rank `peer` in the group."""
        return self._queue.noted(self._posted.send(one(tensors), peer, tag))

    @gated
    def recv(self, tensors: Any, peer: int | None, tag: int = 0) -> Any:
        """Receive a tensor from the member with rank `peer` in the group; from any if None."""
        return self._queue.noted(self._posted.recv(one(tensors), peer, tag))

    @uncompiled
    def recv_anysource(self, tensors: Any, tag: int = 0) -> Any:
        """Receive a tensor from any member; ``source_rank()`` of the Work returns the sender."""
        return self.recv(tensors, None, tag)

    @uncompiled
    def monitored_barrier(
        self, timeout: timedelta | None = None, wait_all_ranks: bool = False
    ) -> None:
        """Wait until all members have called this, by messages to and from rank 0, as gloo does.

        By default it takes the group's timeout.  With `wait_all_ranks` the error of rank 0 names
        all missing ranks, not only the first.  The group stays usable if some members do not call
        it; but once a send or receive of the group has timed out, this fails too.
        """
        with self._translating("monitored_barrier"):
            seconds = self._queue.seconds if timeout is None else timeout.total_seconds()
            self._posted.meet(seconds, wait_all_ranks)

    # -- symmetric memory -------------------------------------------------------------------------

    def empty(self, size: Sequence[int], dtype: torch.dtype) -> Tensor:
        """Return a tensor of zeros in symmetric memory, see :func:`mpidist.torch.empty`."""
        memory = self._symmetric(math.prod(size) * dtype.itemsize)
        return torch.from_numpy(memory).view(dtype)[: math.prod(size)].view(tuple(size))

    def _symmetric(self, nbytes: int) -> np.ndarray:
        """Return a new array of at least `nbytes` bytes in symmetric memory; collective."""
        made: list[np.ndarray] = []

        def act() -> None:
            made.append(self.comm.empty(-(-max(nbytes, 1) // 16) * 16, np.uint8))
            forget_arrays()  # private memory may have had these addresses
            weakref.finalize(made[0], forget_arrays)

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


def _free_retired(comm: Communicator, members: Sequence[int]) -> None:
    """Free the communicators of destroyed groups; collective over `comm`.

    `members` are the ranks of `comm`, as ranks of the world.  Only groups are freed whose
    ranks are all in `members` and have all destroyed the group.  A group of which a communicator is
    broken on some rank is never freed.
    """
    mine = [key for key, both in _RETIRED.items() if not any(part.broken for part in both)]
    every = dict(zip(members, _allgather_object(comm, mine)))
    for key in sorted({key for keys in every.values() for key in keys}):
        if all(key in every.get(rank, ()) for rank in key[0]) and key in _RETIRED:
            for old in _RETIRED.pop(key):
                old.timeout = comm.timeout  # its own was for operations, and may be short
                old.free()


def _allgather_object(comm: Communicator, value: Any) -> list[Any]:
    """Return all ranks' values as ``comm.allgather_object`` does, by a fixed algorithm.

    "auto" would first predict times or set shared memory up, which takes longer than the exchange;
    and it might choose native, whose first call between nodes can take longer than all else.
    """
    data = np.frombuffer(pickle.dumps(value), np.uint8)
    counts = comm.allgather(np.array([data.size]), algorithm="bruck").tolist()
    joined = comm.allgather(data, counts=counts, algorithm="bruck")
    return [pickle.loads(part.data) for part in np.split(joined, np.cumsum(counts)[:-1])]


def _tag(name: str) -> int:
    return zlib.crc32(name.encode()) % 32000


def create(opts: Any, _: Any = None) -> ProcessGroup:
    """Return the process group that c10d's options describe; all members call it."""
    timeout = opts.timeout
    world = root(limit(timeout))
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
        what = f"{Member(world.rank, world.size, name).what(call)}, which its members are to call"
        raise backend_error(error, what, world.timeout) from error
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
