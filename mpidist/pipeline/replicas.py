"""Replicas of stages: averaged gradients, tied weights, and clipping over the whole model."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from typing import Any

import numpy as np

from ..errors import InvalidArgument, Unsupported
from ..frameworks.base import framework_of, library
from ..parallel.clip import clip_by_norm
from ..parallel.ddp import DDP
from .stage import Stage


class Averaging:
    """The chunks of a rank that are in a :class:`~mpidist.parallel.DDP`.

    Parameters
    ----------
    modules : sequence of module
        The chunks, as the user gave them.
    rank : int
        For error messages.

    Attributes
    ----------
    replicas : int
        How many ranks hold the same stage.
    """

    def __init__(self, modules: Sequence[Any], rank: int):
        self._wrapped = {k: m for k, m in enumerate(modules) if isinstance(m, DDP)}
        if self._wrapped and len(self._wrapped) < len(modules):
            raise InvalidArgument(
                f"rank {rank}: chunks {sorted(self._wrapped)} of {len(modules)} are in a DDP: "
                "allowed are all or none"
            )
        comms = [ddp.comm for ddp in self._wrapped.values()]
        if any(comm is not comms[0] for comm in comms):
            raise InvalidArgument(
                f"rank {rank}: the chunks' DDPs have different communicators: allowed is one"
            )
        self._comm = comms[0] if comms else None
        self.replicas = self._comm.size if self._comm is not None else 1
        self._paused: dict[int, ExitStack] = {}

    @property
    def divided(self) -> bool:
        """Whether a rank gets the mean of its slices only (ZeRO)."""
        return any(ddp.reducer.divided for ddp in self._wrapped.values())

    def begin(self) -> None:
        """Begin a backward: gradients are added up and stay here."""
        for chunk, ddp in self._wrapped.items():
            self._paused[chunk] = ExitStack()
            self._paused[chunk].enter_context(ddp.no_sync())

    def completes(self, chunk: int) -> None:
        """Let the gradients of a chunk go as they become complete."""
        paused = self._paused.pop(chunk, None)
        if paused is not None:
            paused.close()

    def end(self) -> None:
        """Let all go, if only after an error."""
        for chunk in list(self._paused):
            self.completes(chunk)

    def sync(self) -> None:
        """Replace gradients by their means; collective among the replicas."""
        for ddp in self._wrapped.values():
            ddp.sync_gradients()

    def rows(self, rows: float) -> float:
        """Give the mean over the replicas of their numbers of rows; collective among them."""
        return self._mean(rows)

    def loss(self, loss: float) -> float:
        """Give the mean over the replicas of their losses; collective among them."""
        return self._mean(loss)

    def _mean(self, x: float) -> float:
        if self.replicas == 1:
            return x
        assert self._comm is not None
        return float(self._comm.allreduce(np.array([x], np.float64), op="mean")[0])


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
    return x if library(x) is None else framework_of(x).values(x)


def _gradient(p: Any) -> np.ndarray:
    """Give a gradient's memory to numpy; a sparse one becomes a plain one, as in a DDP."""
    if getattr(p.grad, "is_sparse", False):
        p.grad = p.grad.to_dense()
    return _array(p.grad)


def _zeros(x: Any) -> Any:
    return np.zeros_like(x) if library(x) is None else x.new_zeros(x.shape)


def clip(comm: Any, workers: Sequence[Stage], tied: Tied, divided: bool, max_norm: float) -> float:
    """Scale the gradients of all stages; give their norm before; collective.

    Raises
    ------
    Unsupported
        If a ZeroOptimizer has divided the gradients (`divided`).
    """
    if divided:
        raise Unsupported(
            f"rank {comm.rank}: clip_gradients() of a Pipeline with a ZeroOptimizer, which divides "
            "gradients: allowed is an optimizer of whole parameters"
        )
    every = {id(p): p for worker in workers for p in worker.module.parameters()}
    copies = {id(p): p for p in tied.copies}
    counted = [p.grad for key, p in every.items() if key not in copies and p.grad is not None]

    def total(squares: float) -> float:
        return float(comm.allreduce(np.array([squares]), op="sum")[0])

    beside = [p.grad for p in copies.values() if p.grad is not None]
    return clip_by_norm(counted, max_norm, comm.rank, total, beside)
