"""Pieces of parameters, and of the state that belongs to them."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Piece:
    """Some elements of a parameter, flat, as an optimizer sees them.

    Attributes
    ----------
    name : str
        Of the parameter.
    parameter, made : object
        The parameter, and the flat one that holds elements `start` to `stop` of it.
    shape : tuple of int
        Of the parameter.
    """

    name: str
    parameter: Any
    made: Any
    start: int
    stop: int
    shape: tuple[int, ...]

    def is_like(self, value: Any) -> bool:
        """Tell whether an entry of the state has an element for each of the piece's."""
        return tuple(getattr(value, "shape", ())) == (self.stop - self.start,)


@dataclass(frozen=True)
class Part:
    """Some elements of an array that all ranks have together.

    Attributes
    ----------
    array : array, 1-D
        The elements, of numpy or torch.
    start : int
        Where they begin in the whole array, flat.
    shape : tuple of int
        Of the whole array.
    """

    array: Any
    start: int
    shape: tuple[int, ...]

    @property
    def count(self) -> int:
        """Number of elements of the whole array."""
        return math.prod(self.shape)


class Divided(dict):
    """A dict of a state whose entries belong to some of the ranks; elsewhere all have all of them.

    What several ranks have under one key must be the same on those.
    """


@dataclass(frozen=True)
class Led:
    """An array of a state that may differ between ranks: the one of the lowest rank counts."""

    array: Any


def part_of(value: Any, start: int, stop: int) -> Any:
    """Give elements `start` to `stop` of an array that is stored; another value as it is."""
    read = getattr(value, "read", None)
    return value if read is None else read(start, stop)
