"""Symmetric memory as users ask for it, and giving back: methods of the communicator."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from .device.recognise import is_on_device
from .errors import Unsupported
from .gpu.choice import use_gpu as choose_gpu
from .symmetric import check_shape

if TYPE_CHECKING:
    from .communicator import Communicator


def empty(
    self: Communicator,
    shape: int | Sequence[int],
    dtype: Any = "float64",
    *,
    device: str | None = None,
) -> Any:
    """Make an array in symmetric memory: every rank of the node reaches everyone's.

    Collectives on such arrays take place in them, without messages; no call changes.
    Collective: every rank asks for the same shape and dtype.  The memory is given back when the
    array and all views of it are dead, on each rank by itself.

    Parameters
    ----------
    shape : int or sequence of int
        Of the array on each rank.
    dtype : dtype
        Of its elements; any but objects.
    device : {"cuda"}, optional
        In the memory of this rank's GPU, reached by CUDA IPC, and given back by :meth:`free` only;
        by default on the host.

    Returns
    -------
    ndarray
        This rank's array, filled with zeros; with a device, one of cupy.

    Raises
    ------
    Unsupported
        If the ranks are on several nodes, or threads of one process.
    InvalidArgument
        If there can be no such array, on all ranks.
    CollectiveMismatch
        If the ranks ask for different ones, or some for what cannot be: on every rank, with a
        table; all goes on.
    MemoryError
        On every rank, if there is not so much shared memory: twice the size for each.
    """
    if device not in (None, "cuda"):
        raise self._place.wrong(f"empty: device={device!r}: allowed are None and 'cuda'")
    reason = why_no_symmetric_memory(self)
    if reason is not None:
        raise Unsupported(f"rank {self.rank}: {reason}")
    heap = self._service.shared.heap
    assert heap is not None
    what = "empty" if device is None else f"empty on {device}"
    dims, known = self._agreed(what, lambda: check_shape(shape, dtype, self.rank))
    if device is not None:
        self.use_gpu()
        return self._gpu.empty(dims, known)
    return self._service.set_up("empty", lambda: heap.empty(dims, known))


def use_gpu(self: Communicator) -> int:
    """Choose a GPU for this rank by its place on its host, and make it the current one; collective.

    A rank that works with one already keeps it.  To be called before the first array on a GPU::

        torch.cuda.set_device(comm.use_gpu())

    Returns
    -------
    int
        Its number among those that ``CUDA_VISIBLE_DEVICES`` leaves this rank: with the same n for
        all ranks of a host the local rank modulo n, and 0 where each has been given its own.

    Raises
    ------
    Unsupported
        On every rank, if one has no GPU, or cannot use it.
    """
    return self._service.set_up("use_gpu", lambda: choose_gpu(self.rank, self._service.everyone))


def free(self: Communicator, x: Any = None) -> None:
    """Give back what the communicator holds, which ends its use; or an array of :meth:`empty`.

    Collective.  Without an array, it waits for what is under way in the background.

    Parameters
    ----------
    x : ndarray, optional
        An array of :meth:`empty`, or a view: from now on it is treated like any other, and its
        memory goes with its last view.  To be called on every rank.

    Raises
    ------
    InvalidArgument
        If `x` is not from :meth:`empty` of this communicator, or was freed before.
    """
    heap = self._service.shared.heap
    if x is not None and is_on_device(x):
        self._agreed("free", lambda: (self._gpu.key(x),))
        self._gpu.free(x)
        return
    if x is not None:
        if heap is None:
            raise self._place.wrong("free(x): this communicator has no symmetric memory")
        if self._debug:
            self._agreed("free", lambda: (heap.key(x),))
        self._quick.clear()
        heap.forget(x)
        return
    self._short.clear()
    if self._service.broken is None:
        if self._debug:
            self._agreed("free", tuple)
        self._service.under_way.finish()
        if self._gpu_service is not None:
            self._gpu_service.close()
        self._quick.clear()
        self._service.cache.clear()
        self._service.meet("free", self._backend.close)
        self._service.broken, self._service.freed = "the communicator was freed", True


def why_no_symmetric_memory(self: Communicator) -> str | None:
    """Say why there are no arrays in symmetric memory here, or give None."""
    nodes = self.topology.num_nodes
    if nodes > 1:
        return (
            f"symmetric memory needs all ranks on one node, these are on {nodes}: "
            "split(comm.topology.node_rank) gives a communicator for each"
        )
    if self._backend.native is None:
        return f"the {self._backend.name} backend has no shared memory"
    return None
