"""An array in a device's memory, whatever library made it: address, shape, dtype and stream."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np

from .base import Device


class Flags(NamedTuple):
    """As much of numpy's flags as is asked for."""

    c_contiguous: bool
    writeable: bool


@dataclass(frozen=True, eq=False)
class DeviceArray:
    """A C-contiguous array on a device; it refers to memory and never reads it.

    It has as much of numpy's interface as preparing a call needs.

    Attributes
    ----------
    pointer : int
        Address of the first element; of no meaning if there is none.
    shape : tuple of int
        Of the array.
    dtype : numpy.dtype
        Of the elements.
    stream : int
        On which its contents were produced; where results are ordered, too.
    device : Device
        Where it is.
    owner : object
        The user's array.  As long as it lives, the memory does.
    make : callable
        ``make(shape, dtype)`` gives a new array of the same library on the same device.
    readonly : bool
        Whether it must not be written.
    """

    pointer: int
    shape: tuple[int, ...]
    dtype: np.dtype
    stream: int
    device: Device
    owner: Any
    make: Callable[[tuple[int, ...], np.dtype], Any]
    readonly: bool = False

    @property
    def ndim(self) -> int:
        """Number of dimensions."""
        return len(self.shape)

    @property
    def size(self) -> int:
        """Number of elements."""
        return math.prod(self.shape)

    @property
    def nbytes(self) -> int:
        """Bytes of all elements."""
        return self.size * self.dtype.itemsize

    @property
    def strides(self) -> tuple[int, ...]:
        """Bytes from one element to the next, by dimension."""
        return contiguous_strides(self.shape, self.dtype.itemsize)

    @property
    def flags(self) -> Flags:
        """Whether it can be written; it is contiguous."""
        return Flags(True, not self.readonly)

    def reshape(self, *shape: int) -> DeviceArray:
        """Give the same memory as one row of elements, which is all that is asked for."""
        assert shape == (-1,)
        return replace(self, shape=(self.size,))

    def part(self, start: int, stop: int) -> DeviceArray:
        """Give elements of a flat array."""
        return replace(
            self, pointer=self.pointer + start * self.dtype.itemsize, shape=(stop - start,)
        )

    def overlaps(self, other: DeviceArray) -> bool:
        """Tell whether two arrays share memory."""
        first, second = sorted((self, other), key=lambda x: x.pointer)
        return bool(first.nbytes and second.nbytes) and (
            second.pointer < first.pointer + first.nbytes
        )


def contiguous_strides(shape: tuple[int, ...], itemsize: int) -> tuple[int, ...]:
    """Give the strides of a C-contiguous array."""
    strides, step = [], itemsize
    for n in reversed(shape):
        strides.append(step)
        step *= max(n, 1)
    return tuple(reversed(strides))
