"""The device of a benchmark's arrays and tensors: the host, or the GPU of each rank."""

from __future__ import annotations

from typing import Any

import numpy as np

from ..communicator.agreement import answers
from ..communicator.communicator import Communicator
from ..device.find import find_device
from ..errors import InvalidArgument, Unsupported
from .race import Wait, nothing
from .results import Results

HOST = "cpu"  # PyTorch's name; a GPU's is "cuda"


def _check_torch() -> None:
    """Raise Unsupported if PyTorch is missing here, or sees no GPU."""
    try:
        import torch
    except ImportError as error:
        raise Unsupported(f"PyTorch cannot be imported ({error}): pip install torch") from None
    if not torch.backends.cuda.is_built():
        raise Unsupported(f"PyTorch {torch.__version__} is built without CUDA")
    if not torch.cuda.is_available():
        raise Unsupported(f"PyTorch {torch.__version__} sees no GPU")


def use_device(comm: Communicator, device: str, results: Results) -> None:
    """Make a GPU the current one of each rank, and name all in `results`; collective.

    Do nothing if `device` is "cpu".  Raise InvalidArgument on every rank if one cannot use a GPU by
    PyTorch or by cupy.
    """
    if device == HOST:
        return
    checked = answers(comm, _check_torch)
    if checked.errors:
        raise InvalidArgument(f"--device {device}: {checked.told()}")
    try:
        number = comm.use_gpu()
    except Unsupported as error:
        raise InvalidArgument(f"--device {device}: {error}") from None
    import torch

    torch.cuda.set_device(number)
    name_gpus(comm, results)


def name_gpus(comm: Communicator, results: Results) -> None:
    """Add the GPU of each rank to the header and the notes of results; collective."""
    found = find_device()
    gpus = comm.allgather_object(f"{found.describe()} {found.identity()}")
    results.header["gpus"] = gpus
    results.notes += [f"rank {rank}: {gpu}" for rank, gpu in enumerate(gpus)]


def until_idle(device: str) -> Wait:
    """Return a function that waits until the device has done all work queued on it."""
    return nothing if device == HOST else find_device().finish


def filled(device: str, shape: tuple[int, ...], value: float, dtype: Any = np.float64) -> Any:
    """Return an array on the device, numpy's or cupy's, with all elements equal to `value`."""
    known = np.dtype(dtype)
    made = np.empty(shape, known) if device == HOST else find_device().empty(shape, known)
    made[...] = value
    return made
