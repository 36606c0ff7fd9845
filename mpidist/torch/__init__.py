"""Adapters for PyTorch, the optional extra ``mpidist[torch]``.

``import mpidist.torch`` registers the backend "mpidist" of torch.distributed::

    import torch.distributed as dist, mpidist.torch

    dist.init_process_group("mpidist")  # rank and size from MPI; no MASTER_ADDR
"""

from typing import Any

import torch.distributed as dist

from .batchnorm import SyncBatchNorm

__all__ = ["SyncBatchNorm"]


def _create(opts: Any, pg_options: Any = None) -> Any:
    from .process_group import create  # starts MPI

    return create(opts, pg_options)


def _register() -> None:
    from . import rendezvous

    rendezvous.register()
    rendezvous.set_variables()
    if not hasattr(dist.Backend, "MPIDIST"):
        dist.Backend.register_backend("mpidist", _create, extended_api=True, devices=["cpu"])


if dist.is_available():  # PyTorch may be built without
    _register()
