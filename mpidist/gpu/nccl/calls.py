"""Collectives of NCCL as functions, with the names that they have in ferrotorch.

All ranks make the backend together, and close it before MPI ends::

    backend = NcclBackend(comm)
    nccl_allreduce(gradients, backend, "mean")
    backend.wait(0, timeout=60)  # the default stream
    backend.close()
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np

from ...calls.call import Caller
from ...device.array import DeviceArray
from ...device.recognise import as_device_array
from ...errors import InvalidArgument
from .backend import OPS, NcclBackend


def nccl_allreduce(buffer: Any, backend: NcclBackend, op: str = "sum") -> None:
    """Combine the buffers of all ranks; every buffer receives the result, in place.

    `buffer` is an array on the GPU, of the same length and dtype on every rank; `op` is "sum",
    "mean", "prod", "max" or "min".  Raises UnsupportedDtype if NCCL lacks it for this dtype.
    """
    x = _flat(buffer, backend, "buffer")
    backend.allreduce(x, x, _op(op, backend))


def nccl_allreduce_dtype(buffer: Any, backend: NcclBackend, op: str, dtype: Any) -> None:
    """Do :func:`nccl_allreduce` with the elements viewed as another dtype of the same width."""
    x = _as(buffer, backend, "buffer", dtype)
    backend.allreduce(x, x, _op(op, backend))


def nccl_broadcast(buffer: Any, backend: NcclBackend, root: int = 0) -> None:
    """Copy the root's buffer to the buffers of all ranks."""
    x = _flat(buffer, backend, "buffer")
    backend.broadcast(None, x, _root(root, backend))


def nccl_broadcast_dtype(buffer: Any, backend: NcclBackend, root: int, dtype: Any) -> None:
    """Do :func:`nccl_broadcast` with the elements viewed as another dtype of the same width."""
    x = _as(buffer, backend, "buffer", dtype)
    backend.broadcast(None, x, _root(root, backend))


def nccl_all_gather(send: Any, recv: Any, backend: NcclBackend) -> None:
    """Concatenate the `send` arrays of all ranks in `recv`, in rank order."""
    x, out = _pair(send, recv, backend, None)
    backend.all_gather(x, out)


def nccl_all_gather_dtype(send: Any, recv: Any, backend: NcclBackend, dtype: Any) -> None:
    """Do :func:`nccl_all_gather` with the elements viewed as another dtype of the same width."""
    x, out = _pair(send, recv, backend, dtype)
    backend.all_gather(x, out)


def nccl_reduce_scatter(send: Any, recv: Any, backend: NcclBackend, op: str = "sum") -> None:
    """Combine the `send` arrays of all ranks; `recv` on rank r receives part r of the result."""
    x, out = _pair(send, recv, backend, None)
    backend.reduce_scatter(x, out, _op(op, backend))


def nccl_reduce_scatter_dtype(
    send: Any, recv: Any, backend: NcclBackend, op: str, dtype: Any
) -> None:
    """Do :func:`nccl_reduce_scatter` with the elements viewed as another dtype of equal width."""
    x, out = _pair(send, recv, backend, dtype)
    backend.reduce_scatter(x, out, _op(op, backend))


def _flat(buffer: Any, backend: NcclBackend, argument: str) -> DeviceArray:
    if not isinstance(backend, NcclBackend):
        raise InvalidArgument(f"backend is a {type(backend).__name__}; expected an NcclBackend")
    x = as_device_array(buffer, backend.rank, argument).reshape(-1)
    if x.readonly and argument != "send":
        raise InvalidArgument(f"rank {backend.rank}: {argument} is read-only; it must be writable")
    return x


def _as(buffer: Any, backend: NcclBackend, argument: str, dtype: Any) -> DeviceArray:
    x = _flat(buffer, backend, argument)
    try:
        wanted = np.dtype(dtype)
    except TypeError:
        raise InvalidArgument(
            f"rank {backend.rank}: dtype={dtype!r}: expected a dtype of numpy"
        ) from None
    if wanted.itemsize != x.dtype.itemsize:
        raise InvalidArgument(
            f"rank {backend.rank}: {argument} has elements of {x.dtype.itemsize} bytes; "
            f"dtype={wanted} has {wanted.itemsize}: expected a dtype of the same width"
        )
    return replace(x, dtype=wanted)


def _pair(
    send: Any, recv: Any, backend: NcclBackend, dtype: Any
) -> tuple[DeviceArray, DeviceArray]:
    if dtype is not None:
        return _as(send, backend, "send", dtype), _as(recv, backend, "recv", dtype)
    x, out = _flat(send, backend, "send"), _flat(recv, backend, "recv")
    if x.dtype != out.dtype:
        raise InvalidArgument(
            f"rank {backend.rank}: send has dtype {x.dtype}, recv has {out.dtype}; they must agree"
        )
    return x, out


def _op(op: str, backend: NcclBackend) -> str:
    if not isinstance(op, str):
        raise InvalidArgument(f"rank {backend.rank}: op={op!r}: expected one of {', '.join(OPS)}")
    return op


def _root(root: int, backend: NcclBackend) -> int:
    return Caller(backend.rank, backend.size).check_root(root)
