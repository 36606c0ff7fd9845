"""Adapters for PyTorch, the optional extra ``torch``.

``import mpidist.torch`` registers the backend "mpidist" of torch.distributed::

    import torch.distributed as dist, mpidist.torch

    dist.init_process_group("mpidist")  # rank and size from MPI; no MASTER_ADDR
"""

from collections.abc import Iterator
from typing import Any

try:
    import torch
    import torch.distributed as dist
except ModuleNotFoundError as error:
    if error.name != "torch":
        raise
    raise ModuleNotFoundError(
        "mpidist.torch needs PyTorch: pip install torch, or the extra of mpidist: "
        "pip install -e '.[torch]' in a checkout",
        name="torch",
    ) from None

from .batchnorm import SyncBatchNorm

__all__ = ["SyncBatchNorm"]


def _create(opts: Any, pg_options: Any = None) -> Any:
    from .process_group import create  # starts MPI

    return create(opts, pg_options)


class _Devices:
    """The devices of the backend, found out when PyTorch asks for them, to make a group.

    Of a backend's devices, ShardedTensor and others prefer the one that is not the CPU: "cuda" is
    one of them only on a machine with a GPU.  Where PyTorch is built for CUDA, the question may
    start CUDA's driver, which then fails in forked processes: so it is not asked by the import, and
    by ``device_count()``, which asks NVML first.
    """

    def __iter__(self) -> Iterator[str]:
        yield "cpu"
        if torch.cuda.device_count():
            yield "cuda"


def _register() -> None:
    from . import rendezvous

    rendezvous.register()
    rendezvous.set_variables()
    if not hasattr(dist.Backend, "MPIDIST"):
        dist.Backend.register_backend("mpidist", _create, extended_api=True, devices=["cpu"])
        dist.Backend.backend_capability["mpidist"] = _Devices()  # type: ignore[assignment]
        # From 2.15 on PyTorch attaches a flight recorder to the C++ backend of each group but those
        # of this set; a group written in Python has none.
        recording: set[str] = getattr(dist.distributed_c10d, "_FR_SELF_RECORDING_BACKENDS", set())
        recording.add("mpidist")


def empty(*size: int, dtype: Any = None, group: Any = None) -> Any:
    """Return a tensor of zeros in memory that the ranks of a group share on a node; collective.

    On one node collectives of the group on this tensor, or on views that begin at the same element
    of it on every rank, read the other ranks' tensors directly, without copies or messages.  Every
    member must pass the same size and dtype.

    Parameters
    ----------
    *size : int
        Size of the tensor in each dimension.
    dtype : torch.dtype, optional
        Dtype of the elements; by default PyTorch's default.
    group : ProcessGroup, optional
        A group of this backend; by default the default group.

    Raises
    ------
    Unsupported
        If the ranks of a node cannot share memory.
    """
    group = dist.group.WORLD if group is None else group
    return group.empty(size, dtype or torch.get_default_dtype())


if dist.is_available():  # PyTorch may be built without
    _register()
