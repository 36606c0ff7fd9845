"""Gradient clipping by the norm of all gradients together."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from numbers import Real
from typing import Any

from ..device.recognise import is_on_device
from ..errors import InvalidArgument

ON_HOST, ON_DEVICE = 1 << 16, 1 << 24  # elements in a step


def clip_by_norm(
    gradients: Sequence[Any],
    max_norm: float,
    rank: int,
    total: Callable[[float], float] = lambda squares: squares,
    copies: Sequence[Any] = (),
) -> float:
    """Scale gradients in place so that their norm is at most `max_norm`.

    Parameters
    ----------
    gradients : sequence of array
        numpy, cupy or torch.
    max_norm : float
        > 0.
    rank : int
        For the error message.
    total : callable, optional
        Adds up the sum of squares over ranks that hold parts.
    copies : sequence of array, optional
        Gradients that are scaled as well, and counted elsewhere.

    Returns
    -------
    float
        The norm before.  If it is not finite, gradients stay as they are.
    """
    if isinstance(max_norm, bool) or not isinstance(max_norm, Real) or not max_norm > 0:
        raise InvalidArgument(f"rank {rank}: max_norm={max_norm!r}: allowed are numbers > 0")
    squares = sum((_squares(gradient) for gradient in gradients), 0.0)
    norm = math.sqrt(total(squares))
    if math.isfinite(norm) and norm > max_norm:
        for gradient in (*gradients, *copies):
            gradient *= max_norm / norm
    return norm


def _squares(gradient: Any) -> float:
    """Give the sum of squares in float64; a step at a time, so that no large copy is made.

    Of an array on a GPU the host waits for the whole only.
    """
    if getattr(gradient, "is_sparse", False):
        gradient = gradient.coalesce().values()
    if "complex" in str(gradient.dtype):
        return _squares(gradient.real) + _squares(gradient.imag)
    flat, there = gradient.reshape(-1), is_on_device(gradient)
    total: Any = 0.0
    each = ON_DEVICE if there else ON_HOST
    for start in range(0, len(flat), each):
        piece = flat[start : start + each]
        piece = piece.double() if hasattr(piece, "double") else piece.astype("float64")
        squares = (piece * piece).sum()
        total = total + (squares if there else float(squares))
    return float(total)
