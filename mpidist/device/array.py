"""The description of an array in a device's memory, of any library."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np

from .base import Device


class Flags(NamedTuple):
    """The flags of numpy's ``ndarray.flags`` that preparing a call reads."""

    c_contiguous: bool
    writeable: bool


@dataclass(frozen=True, eq=False)
class DeviceArray:
    """Reference to a C-contiguous array in device memory; the elements are never read here.

    It has the part of numpy's interface that preparing a call needs.
    """

    pointer: int  # of the first element; meaningless for an empty array
    shape: tuple[int, ...]
    dtype: np.dtype
    stream: int  # on which the contents were written, and on which later work may follow
    device: Device
    owner: Any  # the user's array, which keeps the memory alive
    make: Callable[[tuple[int, ...], np.dtype], Any]  # a new array of its library and device
    readonly: bool = False

    @property
    def ndim(self) -> int:
        """The number of dimensions."""
        return len(self.shape)

    @cached_property
    def size(self) -> int:
        """The number of elements."""
        return math.prod(self.shape)

    @cached_property
    def nbytes(self) -> int:
        """The bytes of all elements."""
        return self.size * self.dtype.itemsize

    @property
    def strides(self) -> tuple[int, ...]:
        """The bytes from one element to the next, by dimension."""
        return contiguous_strides(self.shape, self.dtype.itemsize)

    @property
    def flags(self) -> Flags:
        """C-contiguous (always True) and writeable, as in numpy."""
        return Flags(True, not self.readonly)

    def reshape(self, *shape: int) -> DeviceArray:
        """Return the same memory as a flat array; the only shape allowed is -1."""
        assert shape == (-1,)
        if len(self.shape) == 1:
            return self
        return replace(self, shape=(self.size,))

    def part(self, start: int, stop: int) -> DeviceArray:
        """Return a view of the elements from `start` to `stop`; the array must be flat."""
        return replace(
            self, pointer=self.pointer + start * self.dtype.itemsize, shape=(stop - start,)
        )

    def overlaps(self, other: DeviceArray) -> bool:
        """Return whether two arrays share memory."""
        first, second = sorted((self, other), key=lambda x: x.pointer)
        return bool(first.nbytes and second.nbytes) and (
            second.pointer < first.pointer + first.nbytes
        )


def contiguous_strides(shape: tuple[int, ...], itemsize: int) -> tuple[int, ...]:
    """Return the strides in bytes of a C-contiguous array."""
    strides, step = [], itemsize
    for n in reversed(shape):
        strides.append(step)
        step *= max(n, 1)
    return tuple(reversed(strides))
