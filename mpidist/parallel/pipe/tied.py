"""Parameters that several stages share: equal values, and gradients added up over the ranks."""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from typing import Any

import numpy as np

from ...errors import InvalidArgument
from ..framework import ADAPTERS, library


class Tied:
    """The tied parameters of one rank; collective to make.

    Parameters
    ----------
    comm : Communicator
        Of the pipeline.
    given : mapping of str to parameter
        This rank's, by names that are the same on the ranks which share one.

    Attributes
    ----------
    names : list of str
        Of all ranks.

    Raises
    ------
    InvalidArgument
        On every rank, if one gives no mapping to parameters, a name is on one rank only, or shapes
        or dtypes differ.
    """

    def __init__(self, comm: Any, given: Mapping[str, Any]):
        mine, wrong = _described(given)
        everyone, errors = zip(*comm.allgather_object((mine, wrong)))
        for rank, error in enumerate(errors):
            if error:
                raise InvalidArgument(f"rank {rank}: Pipeline: {error}")
        self._parameters = dict(given)
        self._comms: dict[str, Any] = {}
        self._before: dict[str, np.ndarray] = {}
        self.names = sorted({name for found in everyone for name in found})
        for name in self.names:
            kinds = {rank: found[name] for rank, found in enumerate(everyone) if name in found}
            if len(kinds) == 1 or len(set(kinds.values())) > 1:
                listed = "; ".join(f"rank {rank}: {kind}" for rank, kind in kinds.items())
                raise InvalidArgument(
                    f"Pipeline: tied: {name!r} is {listed}: allowed are names that several ranks "
                    "give, for parameters of the same shape and dtype"
                )
            part = comm.split(0 if name in self._parameters else None)
            if part is not None:
                self._comms[name] = part
                part.broadcast(values := _array(self._parameters[name].data), 0, out=values)

    def begin(self) -> None:
        """Before a backward: put aside gradients of steps before, which are added up already."""
        for name in self._comms:
            grad = self._parameters[name].grad
            if grad is not None:
                array = _array(grad)
                self._before[name] = array.copy()
                array[...] = 0

    def sync(self) -> None:
        """Add to each gradient those of the other ranks that share the parameter."""
        for name, comm in self._comms.items():
            p = self._parameters[name]
            if p.grad is None:
                p.grad = _zeros(p.data)
            grad = _array(p.grad)
            comm.allreduce(grad, out=grad)
            if name in self._before:
                grad += self._before.pop(name)

    def free(self) -> None:
        """Give back the communicators; collective."""
        for comm in self._comms.values():
            comm.free()


def _described(given: Any) -> tuple[dict[str, str], str]:
    """Give dtypes and shapes by name, and what is wrong if anything is."""
    found: dict[str, str] = {}
    if not isinstance(given, Mapping):
        return found, f"tied={given!r}: allowed are mappings of names to parameters"
    for name, p in given.items():
        if not isinstance(name, str):
            return found, f"tied has the name {name!r}: allowed are strings"
        if not hasattr(p, "data") or not hasattr(p, "grad"):
            return found, f"tied[{name!r}] is a {type(p).__name__}: allowed are parameters"
        array = _array(p.data)
        found[name] = f"{array.dtype.name}{list(array.shape)}"
    return found, ""


def _array(x: Any) -> np.ndarray:
    """Give a tensor's memory to numpy."""
    name = library(x)
    return x if name is None else importlib.import_module(ADAPTERS[name]).as_array(x)


def _zeros(x: Any) -> Any:
    return np.zeros_like(x) if library(x) is None else x.new_zeros(x.shape)
