"""What a pipeline is given, checked."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from ...errors import InvalidArgument
from .stage import Stage


def check_communicator(comm: Any) -> None:
    """Raise InvalidArgument for what is no communicator, or too small for a pipeline."""
    if not isinstance(getattr(comm, "rank", None), int):
        raise InvalidArgument(
            f"comm={comm!r}: allowed are communicators, as mpidist.init() gives them"
        )
    if comm.size < 2:
        raise InvalidArgument(
            f"rank {comm.rank}: Pipeline: comm has size {comm.size}: the size must be >= 2, one "
            "rank is no pipeline"
        )


def check_differentiates(rank: int, workers: Sequence[Stage], what: str) -> None:
    """Raise InvalidArgument where gradients are asked for, and no graph would be made."""
    if any(worker.differentiates is False for worker in workers):
        raise InvalidArgument(
            f"rank {rank}: {what} within torch.no_grad() or inference_mode(): no parameter would "
            "get a gradient; allowed is calling it outside, and forward() to evaluate a model"
        )


def will_go_back(comm: Any, workers: Sequence[Stage]) -> bool:
    """Agree on whether a forward keeps what a backward needs; collective.

    It does if any stage of any rank is in training, and PyTorch makes graphs.

    Raises
    ------
    InvalidArgument
        On every rank, if PyTorch does so on some ranks only.
    """
    differentiates = [w.differentiates for w in workers if w.differentiates is not None]
    mine = [any(w.training for w in workers), True in differentiates, False in differentiates]
    everyone = comm.allgather(np.array(mine, np.uint8)).reshape(comm.size, len(mine))
    training, on, off = everyone.any(axis=0).tolist()
    if on and off:
        ranks = np.flatnonzero(everyone[:, 2]).tolist()
        raise InvalidArgument(
            f"forward() within torch.no_grad() or inference_mode() on ranks {ranks} of "
            f"{comm.size} only: allowed are all that hold stages of PyTorch, or none"
        )
    return training and not off
