"""What NCCL calls dtypes and operations, and where it may run at all; nothing of CUDA is needed."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from ..errors import Unsupported, UnsupportedDtype
from .sharing import shared_gpus

NAMES = ("int8", "uint8", "int32", "uint32", "int64", "uint64", "float16", "float32", "float64")
DTYPES: dict[str, int] = {**{name: code for code, name in enumerate(NAMES)}, "bfloat16": 9}
OPS: dict[str, int] = {"sum": 0, "prod": 1, "max": 2, "min": 3, "mean": 4}
LEAST = 21000  # NCCL 2.10, the first with bfloat16 and with the mean
_PAIRS = {"complex64": "float32", "complex128": "float64"}


def version_text(version: int) -> str:
    """Write a version as people do: 22703 is 2.27.3."""
    return f"{version // 10000}.{version // 100 % 100}.{version % 100}"


def check_version(version: int, rank: int) -> None:
    """Raise Unsupported for a library that is too old."""
    if version < LEAST:
        raise Unsupported(
            f"rank {rank}: NCCL {version_text(version)} is too old: needed is "
            f"{version_text(LEAST)}; install a newer nvidia-nccl-cu12"
        )


def has_sum(dtype: np.dtype) -> bool:
    """Tell whether NCCL adds elements of a dtype, and takes their mean."""
    return dtype.isnative and dtype.name in (*DTYPES, *_PAIRS)


def type_of(dtype: np.dtype, op: str | None, rank: int) -> tuple[int, int]:
    """Give NCCL's number of a dtype, and how many of it make up one element.

    Parameters
    ----------
    dtype : numpy.dtype
        Of the elements.
    op : str or None
        The operation; None where data are moved only, which any dtype can be, as bytes.
    rank : int
        For messages.

    Raises
    ------
    UnsupportedDtype
        If NCCL cannot combine such elements.
    """
    if op is not None and op not in OPS:
        raise UnsupportedDtype(f"rank {rank}: NCCL has no {op!r}; it has {', '.join(OPS)}")
    if dtype.isnative and dtype.name in DTYPES:
        return DTYPES[dtype.name], 1
    if dtype.isnative and dtype.name in _PAIRS and op in (None, "sum", "mean"):
        return DTYPES[_PAIRS[dtype.name]], 2
    if op is None:
        return DTYPES["uint8"], dtype.itemsize
    raise UnsupportedDtype(
        f"rank {rank}: NCCL has no {op!r} of {dtype}; it combines {', '.join(DTYPES)}, and sums "
        "and means of complex64 and complex128"
    )


def check_places(places: Sequence[tuple[str, str]], rank: int) -> None:
    """Raise Unsupported if two ranks are on one device.

    Parameters
    ----------
    places : sequence of (str, str)
        The host and the UUID of the device of every rank.
    rank : int
        For messages.
    """
    shared = shared_gpus(places)
    if shared is not None:
        raise Unsupported(
            f"rank {rank}: {shared}, and NCCL wants one rank for each: start fewer ranks, give "
            "each a GPU of its own (CUDA_VISIBLE_DEVICES by local rank), or leave MPIDIST_GPU unset"
        )
