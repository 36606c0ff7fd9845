"""The state of an object, and how it marks what is not the same on all ranks."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Part:
    """A rank's slice of an array that is distributed over the ranks; `array` is flat."""

    array: Any
    start: int  # first element of the slice in the flattened array
    shape: tuple[int, ...]  # of the whole array

    @property
    def count(self) -> int:
        """Number of elements of the whole array."""
        return math.prod(self.shape)


class Divided(dict):
    """A dict of which each rank has only some of the keys; in the checkpoint they are joined.

    Entries that several ranks have under the same key must be equal.
    """


@dataclass(frozen=True)
class MayDiffer:
    """Marker of an array that may differ between ranks; the lowest rank that has it saves it."""

    array: Any


def is_zero_state(state: Any) -> bool:
    """Return whether a state is that of a :class:`~mpidist.ZeroOptimizer`, by its keys."""
    needed, known = {"state", "options"}, {"state", "options", "sending"}
    return isinstance(state, Mapping) and needed <= set(state) <= known


def state_of(value: Any) -> Any:
    """Return an object's ``checkpoint_state()`` or ``state_dict()``; other values unchanged."""
    for name in ("checkpoint_state", "state_dict"):
        if hasattr(value, name):
            return getattr(value, name)()
    return value


def read_all(state: Any) -> Any:
    """Return a state with every :class:`Stored` array read."""
    if isinstance(state, Mapping):
        return {key: read_all(value) for key, value in state.items()}
    if isinstance(state, (list, tuple)):
        return type(state)(map(read_all, state))
    whole = getattr(state, "whole", None)
    return state if whole is None else whole()
