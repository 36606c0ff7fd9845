"""Pickled Python objects as arrays of bytes, which collectives move, and back."""

from __future__ import annotations

import pickle
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import reduce
from itertools import accumulate
from typing import Any

import numpy as np

from ..calls.call import Caller
from ..engine.messages import as_bytes
from ..errors import InvalidArgument


@dataclass
class Pickled:
    """Objects of one rank as bytes, or the error that prevented it: it must reach the other ranks.

    `data` has the pickled objects one behind the other, or the text of `error`; `counts` the bytes
    of each, or of the text, as a negative number for each object.
    """

    data: np.ndarray
    counts: list[int]
    error: InvalidArgument | None = None

    @property
    def reason(self) -> np.ndarray:
        """The text of the error, empty without one."""
        return self.data if self.error is not None else self.data[:0]


def pickled(place: Caller, value: Any) -> Pickled:
    """Return the object of a rank, pickled."""
    try:
        data = as_bytes(value, place.rank)
    except InvalidArgument as error:
        return _failed(error, 1)
    return Pickled(data, [data.size])


def all_pickled(place: Caller, values: Any) -> Pickled:
    """Return the objects of a rank for all ranks, pickled; `values` must have one for each."""
    try:
        parts = [as_bytes(value, place.rank) for value in _one_each(place, values)]
    except InvalidArgument as error:
        return _failed(error, place.size)
    return Pickled(np.concatenate(parts), [part.size for part in parts])


def unpickled(joined: np.ndarray, counts: Sequence[int]) -> list[Any]:
    """Return the objects in `joined`, pickled one behind the other in `counts` bytes."""
    starts = [0, *accumulate(counts)]
    return [pickle.loads(joined[a:b].data) for a, b in zip(starts, starts[1:])]


def reasons(joined: np.ndarray, counts: Sequence[int]) -> str:
    """Return the texts in `joined`, of the ranks with negative `counts`, as one."""
    starts = [0, *accumulate(max(-count, 0) for count in counts)]
    texts = [bytes(joined[a:b]).decode() for a, b in zip(starts, starts[1:]) if b > a]
    return "; ".join(texts)


def combined(place: Caller, values: list[Any], function: Callable[[Any, Any], Any]) -> Any:
    """Return the objects combined from left to right; InvalidArgument if the function raised."""
    try:
        return reduce(function, values)
    except Exception as error:
        name = getattr(function, "__name__", repr(function))
        text = f"{type(error).__name__}: {error}"
        raise place.wrong(f"function={name} raised {text}") from error


def _one_each(place: Caller, values: Any) -> list[Any]:
    try:
        found = list(values)
    except Exception as error:
        text = f"values={values!r:.80}: expected a sequence of {place.size} objects, one per rank"
        raise place.wrong(text) from error
    if len(found) != place.size:
        raise place.wrong(f"values has {len(found)} objects: expected {place.size}, one per rank")
    return found


def _failed(error: InvalidArgument, objects: int) -> Pickled:
    data = np.frombuffer(str(error).encode(errors="replace"), np.uint8)
    return Pickled(data, [-data.size] * objects, error)
