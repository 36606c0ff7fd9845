"""Gradient clipping by the norm over all stages of a pipeline."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from ...errors import Unsupported
from ..clip import clip_by_norm
from .stage import Stage
from .tied import Tied


def clip(comm: Any, workers: Sequence[Stage], tied: Tied, divided: bool, max_norm: float) -> float:
    """Scale the gradients of all stages; give their norm before; collective.

    Raises
    ------
    Unsupported
        If a ZeroOptimizer has divided the gradients (`divided`).
    """
    if divided:
        raise Unsupported(
            f"rank {comm.rank}: clip_gradients() of a Pipeline with a ZeroOptimizer, which divides "
            "gradients: allowed is an optimizer of whole parameters"
        )
    every = {id(p): p for worker in workers for p in worker.module.parameters()}
    copies = {id(p): p for p in tied.copies}
    counted = [p.grad for key, p in every.items() if key not in copies and p.grad is not None]

    def total(squares: float) -> float:
        return float(comm.allreduce(np.array([squares]), op="sum")[0])

    beside = [p.grad for p in copies.values() if p.grad is not None]
    return clip_by_norm(counted, max_norm, comm.rank, total, beside)
