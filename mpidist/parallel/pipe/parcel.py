"""What goes over an edge: the form of a value, and its tensors as flat arrays."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple, Protocol

import numpy as np

from .structure import Tree


class Form(NamedTuple):
    """All of a value but its tensors' elements; two ranks agree on it once for an edge.

    Attributes
    ----------
    tree
        How tensors lie in the value, see :mod:`.structure`.
    tensors : tuple of (str, tuple of int, bool)
        Each one's dtype (numpy's name), shape, and whether its gradient is asked for.
    rows : int
        Of the batch that this microbatch has, as the first stage counted them.
    """

    tree: Tree
    tensors: tuple[tuple[str, tuple[int, ...], bool], ...]
    rows: int

    def describe(self) -> str:
        """Name dtypes and shapes."""
        return ", ".join(f"{dtype}{list(shape)}" for dtype, shape, _ in self.tensors) or "nothing"


class Parcel(NamedTuple):
    """A value on its way.

    Attributes
    ----------
    form : Form
        What it is made of.
    arrays : sequence of ndarray
        One flat array of host memory for each tensor.
    """

    form: Form
    arrays: Sequence[np.ndarray]


class Tensors(Protocol):
    """One library's tensors as parcels need them."""

    def form(self, x: Any) -> tuple[str, tuple[int, ...], bool]:
        """Give dtype, shape and whether the gradient with respect to it is asked for."""

    def array(self, x: Any) -> np.ndarray:
        """Give the elements as a flat array, which shares memory if it can."""

    def own(self, x: Any) -> np.ndarray:
        """Give the elements as a flat array that nobody else has: what `x` is in may be reused."""

    def result(self, x: Any) -> Any:
        """Give an output of the last stage as the user may keep it."""

    def empty(self, dtype: str, count: int) -> np.ndarray:
        """Make a flat array to receive into."""

    def tensor(self, array: np.ndarray, form: tuple[str, tuple[int, ...], bool]) -> Any:
        """Give a tensor on the memory of a flat array."""
