"""Whether an optimizer treats every element for itself, as dividing its state asks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from ..errors import Unsupported
from .framework import Framework

SHAPE = (4, 3)
CUT = 5  # within a row
STEPS = 2


def check_elementwise(
    framework: Framework, optimizer: Any, group: Mapping[str, Any], options: Any, rank: int
) -> None:
    """Try it on a small matrix, and on two flat pieces of the same.

    Raises
    ------
    Unsupported
        If the elements do not come out alike, or it cannot make such steps.
    """
    name = getattr(optimizer, "__name__", type(optimizer).__name__)

    def refuse(why: str) -> Unsupported:
        return Unsupported(
            f"rank {rank}: ZeroOptimizer: {name} {why}; allowed are optimizers that treat every "
            "element for itself, such as SGD and Adam"
        )

    count = SHAPE[0] * SHAPE[1]
    values, gradients = np.linspace(-1.0, 1.0, 2 * count).reshape(2, count)
    changes = []
    for parts in (((0, count),), ((0, CUT), (CUT, count))):
        data, grad = values.copy(), gradients.copy()
        pieces = [framework.piece(data, grad, *part) for part in parts]
        if len(parts) == 1:
            _shape(pieces[0])
        made = [_make(optimizer, group, options, piece, len(parts) > 1, refuse) for piece in pieces]
        _step(made, grad, refuse)
        changes.append(data - values)
    if not np.allclose(changes[1], changes[0], rtol=1e-4, atol=1e-13, equal_nan=True):
        raise refuse("changes a piece of a parameter in another way than the whole")


def _shape(p: Any) -> None:
    """Make a matrix of a flat parameter."""
    grad, p.grad = p.grad, None
    p.data = p.data.reshape(SHAPE)
    p.grad = grad.reshape(SHAPE)


def _make(
    optimizer: Any, group: Mapping[str, Any], options: Any, p: Any, cut: bool, refuse: Any
) -> Any:
    """Make an optimizer; what it says of its options is the user's to see."""
    try:
        return optimizer([{**group, "params": [p]}] if group else [p], **options)
    except Exception as error:
        if cut:
            raise refuse(f"does not take a piece of a parameter ({error})") from error
        raise


def _step(optimizers: Sequence[Any], grad: np.ndarray, refuse: Any) -> None:
    try:
        for _ in range(STEPS):
            for one in optimizers:
                one.step()
            grad *= 0.5
    except Exception as error:
        raise refuse(f"cannot make the steps of one ({error})") from error
