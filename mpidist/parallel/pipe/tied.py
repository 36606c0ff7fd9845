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
    given : mapping of str to parameter, or to a list of parameters
        This rank's, by names that are the same on the ranks which share one.

    Attributes
    ----------
    names : list of str
        Of all ranks.

    Raises
    ------
    InvalidArgument
        On every rank, if one gives no mapping to parameters, only one parameter has a name, or
        shapes or dtypes differ.
    """

    def __init__(self, comm: Any, given: Mapping[str, Any]):
        mine, wrong = _described(given)
        everyone, errors = zip(*comm.allgather_object((mine, wrong)))
        for rank, error in enumerate(errors):
            if error:
                raise InvalidArgument(f"rank {rank}: Pipeline: {error}")
        self._parameters = {name: _listed(p) for name, p in given.items()}
        self._comms: dict[str, Any] = {}
        self._before: dict[tuple[str, int], np.ndarray] = {}
        self._copies: list[Any] = []
        self.names = sorted({name for found in everyone for name in found})
        for name in self.names:
            kinds = {rank: found[name] for rank, found in enumerate(everyone) if name in found}
            every = [kind for found in kinds.values() for kind in found]
            if len(every) < 2 or len(set(every)) > 1:
                shown = "; ".join(f"rank {r}: {', '.join(found)}" for r, found in kinds.items())
                raise InvalidArgument(
                    f"Pipeline: tied: {name!r} is {shown}: allowed are names that several ranks "
                    "give, or one for several, for parameters of the same shape and dtype"
                )
            part = comm.split(0 if name in self._parameters else None)
            if part is not None:
                self._comms[name] = part
                self._begin_equal(name, part)

    def _begin_equal(self, name: str, part: Any) -> None:
        """Take over the values of the lowest rank's first one."""
        first, *others = self._parameters[name]
        part.broadcast(values := _array(first.data), 0, out=values)
        for p in others:
            _array(p.data)[...] = values
        self._copies += others if part.rank == 0 else [first, *others]

    @property
    def copies(self) -> list[Any]:
        """The parameters of this rank that stand for one which comes before them."""
        return self._copies

    def begin(self) -> None:
        """Before a backward: put aside gradients of steps before, which are added up already."""
        for name in self._comms:
            for k, p in enumerate(self._parameters[name]):
                if p.grad is not None:
                    array = _gradient(p)
                    self._before[name, k] = (
                        array.clone() if hasattr(array, "clone") else array.copy()
                    )
                    array[...] = 0

    def sync(self) -> None:
        """Add to each gradient those of all others that share the parameter."""
        for name, comm in self._comms.items():
            own = self._parameters[name]
            for p in own:
                if p.grad is None:
                    p.grad = _zeros(p.data)
            whole, *others = [_gradient(p) for p in own]
            for grad in others:
                whole += grad
            comm.allreduce(whole, out=whole)
            for grad in others:
                grad[...] = whole
            for k, p in enumerate(own):
                if (name, k) in self._before:
                    grad = _gradient(p)
                    grad += self._before.pop((name, k))

    def free(self) -> None:
        """Give back the communicators; collective."""
        for comm in self._comms.values():
            comm.free()


def _listed(given: Any) -> list[Any]:
    """List the parameters; one that two chunks of a rank hold as the same object counts once."""
    several = given if isinstance(given, (list, tuple)) else [given]
    return list({id(p): p for p in several}.values())


def _described(given: Any) -> tuple[dict[str, list[str]], str]:
    """Give dtypes and shapes by name, and what is wrong if anything is."""
    found: dict[str, list[str]] = {}
    names: dict[int, str] = {}
    if not isinstance(given, Mapping):
        return found, f"tied={given!r}: allowed are mappings of names to parameters"
    for name, own in given.items():
        if not isinstance(name, str):
            return found, f"tied has the name {name!r}: allowed are strings"
        found[name] = []
        if not _listed(own):
            return found, f"tied[{name!r}] is {own!r}: allowed is at least one parameter"
        for p in _listed(own):
            before = names.setdefault(id(p), name)
            if before != name:
                return found, (
                    f"tied has the same parameter as {before!r} and as {name!r}: allowed is one "
                    "name for each"
                )
            try:
                if not hasattr(p, "data") or not hasattr(p, "grad"):
                    kind = type(p).__name__
                    return (
                        found,
                        f"tied[{name!r}] is a {kind}: allowed are parameters, and lists of these",
                    )
                array = _array(p.data)
            except Exception as error:  # a lazy one, for example; the other ranks must learn of it
                return found, f"tied[{name!r}] cannot be read: {type(error).__name__}: {error}"
            found[name].append(f"{getattr(array.dtype, 'name', array.dtype)}{list(array.shape)}")
    return found, ""


def _array(x: Any) -> Any:
    """Give a tensor's memory to numpy; one on a GPU stays what it is."""
    name = library(x)
    return x if name is None else importlib.import_module(ADAPTERS[name]).FRAMEWORK.values(x)


def _gradient(p: Any) -> np.ndarray:
    """Give a gradient's memory to numpy; a sparse one becomes a plain one, as in a DDP."""
    if getattr(p.grad, "is_sparse", False):
        p.grad = p.grad.to_dense()
    return _array(p.grad)


def _zeros(x: Any) -> Any:
    return np.zeros_like(x) if library(x) is None else x.new_zeros(x.shape)
