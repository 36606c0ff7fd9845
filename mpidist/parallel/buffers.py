"""Keeping replicas equal: copies from one rank, and equal buffers."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from ..arguments import one_of
from ..communicator.communicator import Communicator
from ..device.recognise import is_on_device
from ..errors import InvalidArgument
from .bucketing import choose_algorithms, choose_on_device, has_mean
from .consistency import Named


def broadcast(comm: Communicator, arrays: Sequence[Any], root: int) -> None:
    """Copy the arrays of `root` into those of every rank, in place; collective."""
    for array in arrays:
        comm.broadcast(array, root=root, out=array)


class BufferSync:
    """Makes the buffers of a model (running means, counters) equal on all ranks after a step.

    ``read()`` returns names and arrays of the buffers, which share memory with the model; they are
    read in each step, as a forward may replace a buffer.  `how` is "broadcast" (copy those of one
    rank to all), "average" (the mean of floating-point buffers; others are copied), or "keep".
    """

    HOW = ("broadcast", "average", "keep")

    def __init__(self, comm: Communicator, read: Callable[[], Named], how: str):
        one_of("buffers", how, self.HOW, f"rank {comm.rank}: ")
        self._comm, self._read, self.how = comm, read, how
        # One flat array for each dtype and device: a model has many small buffers, each of which
        # would be a collective of its own.
        groups: dict[Any, dict[str, Any]] = {}
        for name, array in read() if how != "keep" else ():
            groups.setdefault((array.dtype, is_on_device(array)), {})[name] = array
        self._groups: list[tuple[Any, dict[str, tuple[int, ...]], str]] = []
        for (dtype, on_device), group in groups.items():
            count = sum(math.prod(a.shape) for a in group.values())
            flat, algorithm = _empty_like(next(iter(group.values())), count), ""
            if how == "average" and has_mean(dtype) and comm.size > 1:
                algorithm = _algorithm(comm, flat, on_device)
            shapes = {name: tuple(array.shape) for name, array in group.items()}
            self._groups.append((flat, shapes, algorithm))

    @property
    def algorithms(self) -> dict[str, str]:
        """Algorithms of the buffers' means, the same in every step, by the name of the dtype."""
        return {str(flat.dtype): algorithm for flat, _, algorithm in self._groups if algorithm}

    @algorithms.setter
    def algorithms(self, known: Mapping[str, str]) -> None:
        self._groups = [
            (flat, shapes, algorithm and known.get(str(flat.dtype), algorithm))
            for flat, shapes, algorithm in self._groups
        ]

    @property
    def communicates(self) -> bool:
        """Whether :meth:`run` has buffers to send, and other ranks to send them to."""
        return bool(self._groups) and self._comm.size > 1

    def run(self, root: int) -> None:
        """Make the buffers equal on all ranks; `root` is the rank to copy from; collective."""
        now = dict(self._read())
        for flat, shapes, algorithm in self._groups:
            group = [self._checked(now, name, shapes[name], flat.dtype) for name in shapes]
            start = 0
            for array in group:
                stop = start + math.prod(array.shape)
                flat[start:stop] = array.reshape(-1)
                start = stop
            if algorithm:
                self._comm.allreduce(flat, op="mean", out=flat, algorithm=algorithm)
            else:
                self._comm.broadcast(flat, root=root, out=flat)
            start = 0
            for array in group:
                stop = start + math.prod(array.shape)
                array[...] = flat[start:stop].reshape(array.shape)
                start = stop

    def _checked(self, now: dict[str, Any], name: str, shape: tuple[int, ...], dtype: Any) -> Any:
        """Return the model's buffer of a name, or raise if it is not as when it was wrapped."""
        array = now.get(name)
        if array is None or (tuple(array.shape), array.dtype) != (shape, dtype):
            now_is = "missing" if array is None else f"{tuple(array.shape)} {array.dtype}"
            raise InvalidArgument(
                f"rank {self._comm.rank}: the buffer {name} was {shape} {dtype} when the module "
                f"was wrapped, and is {now_is}; buffers='keep' leaves buffers alone"
            )
        return array


def _empty_like(array: Any, count: int) -> Any:
    """Return a flat array of `count` elements, with the library, dtype and device of `array`."""
    if type(array) is np.ndarray:
        return np.empty(count, array.dtype)
    if hasattr(array, "new_empty"):
        return array.new_empty(count)
    return np.zeros_like(array, shape=(count,), order="C")


def _algorithm(comm: Communicator, flat: Any, on_device: bool) -> str:
    """Return the algorithm for the mean of a flat array of buffers; collective.

    It is chosen once for all steps, so that every step has the same bits.
    """
    if on_device:
        return choose_on_device(comm, comm, flat, "auto", "allreduce")
    return choose_algorithms(comm, [flat.nbytes], "auto", False, "allreduce")[0]
