"""Gradient clipping by the norm of all gradients together."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from numbers import Real
from typing import Any

from ..device.recognise import is_on_device
from ..errors import InvalidArgument

ON_HOST, ON_DEVICE = 1 << 16, 1 << 24  # elements converted to float64 at a time


def clip_by_norm(
    gradients: Sequence[Any],
    max_norm: float,
    rank: int,
    total: Callable[[float], float] = lambda squares: squares,
    copies: Sequence[Any] = (),
) -> float:
    """Scale gradients in place so that their norm is at most `max_norm`; return what it was.

    If it is not finite, gradients are not scaled.  ``total(squares)`` returns the sum of squares
    over all ranks, given that of this rank, where gradients are divided among ranks.  `copies` are
    scaled, too, but left out of the norm, because equal ones are counted already.
    """
    if isinstance(max_norm, bool) or not isinstance(max_norm, Real) or not max_norm > 0:
        raise InvalidArgument(f"rank {rank}: max_norm={max_norm!r}: expected a number > 0")
    squares = sum((_squares(gradient) for gradient in gradients), 0.0)
    norm = math.sqrt(total(squares))
    if math.isfinite(norm) and norm > max_norm:
        for gradient in (*gradients, *copies):
            gradient *= max_norm / norm
    return norm


def _squares(gradient: Any) -> float:
    """Return the sum of squares in float64, without a converted copy of the whole gradient."""
    if getattr(gradient, "is_sparse", False):
        gradient = gradient.coalesce().values()
    if "complex" in str(gradient.dtype):
        return _squares(gradient.real) + _squares(gradient.imag)
    flat, on_device = gradient.reshape(-1), is_on_device(gradient)
    total: Any = 0.0
    each = ON_DEVICE if on_device else ON_HOST
    for start in range(0, len(flat), each):
        part = flat[start : start + each]
        part = part.double() if hasattr(part, "double") else part.astype("float64")
        squares = (part * part).sum()
        # The host waits for a GPU once, at the end.
        total = total + (squares if on_device else float(squares))
    return float(total)
