"""Replicas of stages: averaged gradients, tied weights, and clipping over the whole model."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from typing import Any

import numpy as np

from ..communicator.communicator import Communicator
from ..errors import InvalidArgument, Unsupported
from ..frameworks.base import framework_of, library
from ..parallel.clip import clip_by_norm
from ..parallel.ddp import DDP
from .stage import Stage

Forms = tuple[dict[str, list[str]], dict[str, list[str]]]
"""Dtype and shape of a rank's tied parameters by name: of those given, and of those found."""


class Replicas:
    """The DDPs around the chunks of a rank: they average over the ranks that hold the same stages.

    Without DDPs the rank is the only replica (`count` 1), and all methods leave its values as they
    are.
    """

    def __init__(self, modules: Sequence[Any], rank: int):
        self._wrapped = {k: m for k, m in enumerate(modules) if isinstance(m, DDP)}
        if self._wrapped and len(self._wrapped) < len(modules):
            raise InvalidArgument(
                f"rank {rank}: chunks {sorted(self._wrapped)} of {len(modules)} are in a DDP: "
                "expected all or none"
            )
        comms = [ddp.comm for ddp in self._wrapped.values()]
        if any(comm is not comms[0] for comm in comms):
            raise InvalidArgument(
                f"rank {rank}: the chunks' DDPs have different communicators: expected one"
            )
        for ddp in self._wrapped.values():
            ddp.sync = "manual"  # a stage has several backward passes in a step
        self._comm = comms[0] if comms else None
        self.count = self._comm.size if self._comm is not None else 1
        self._paused: dict[int, ExitStack] = {}

    @property
    def sharded(self) -> bool:
        """Whether each rank gets only its slices of the mean gradients (ZeRO)."""
        return any(ddp.reducer.sharded for ddp in self._wrapped.values())

    def pause(self) -> None:
        """Let all DDPs add up gradients locally, without sending, until :meth:`resume`."""
        for chunk, ddp in self._wrapped.items():
            self._paused[chunk] = ExitStack()
            self._paused[chunk].enter_context(ddp.no_sync())

    def resume(self, chunk: int) -> None:
        """End a chunk's pause: its next backward sends the gradients as they are complete."""
        paused = self._paused.pop(chunk, None)
        if paused is not None:
            paused.close()

    def resume_all(self) -> None:
        """End the pauses of all chunks, after an error."""
        for chunk in list(self._paused):
            self.resume(chunk)

    def sync(self) -> None:
        """Replace the gradients by their means over the replicas; collective among them."""
        for ddp in self._wrapped.values():
            ddp.sync_gradients()

    def mean(self, x: float) -> float:
        """Return the mean of a number over the replicas; collective among them."""
        if self._comm is None or self.count == 1:
            return x
        return float(self._comm.allreduce(np.array([x], np.float64), op="mean")[0])


class Tied:
    """The tied parameters of one rank; created collectively.

    `given` is the argument `tied` of :class:`Pipeline`, `found` the parameters in stages of this
    rank that a Partition found in other stages, too; `forms` has what :func:`tied_forms` returned
    for them on each rank.  InvalidArgument on every rank if a name has only one parameter over all
    ranks, or if shapes or dtypes under a name differ.
    """

    def __init__(
        self,
        comm: Communicator,
        given: Mapping[str, Any],
        found: Mapping[str, Any],
        forms: Sequence[Forms],
    ):
        everyone, others = [dict(own) for own, _ in forms], [more for _, more in forms]
        # All stages that share a parameter may be on one rank, which then adds it up by itself.
        count = Counter(name for names in others for name in names)
        for own, more in zip(everyone, others, strict=True):
            own.update({f"partition {n}": kinds for n, kinds in more.items() if count[n] > 1})
        mine = {n: p for n, p in found.items() if n in others[comm.rank] and count[n] > 1}
        given = {**given, **{f"partition {n}": p for n, p in mine.items()}}
        self._parameters = {name: _listed(p) for name, p in given.items()}
        self._comms: dict[str, Communicator] = {}
        self._before: dict[tuple[str, int], np.ndarray] = {}
        # Those that the norm of gradients must not count again: a lower rank has them, or they
        # follow another parameter of the same name on this rank.
        self.copies: list[Any] = []
        self.names = sorted({name for found in everyone for name in found})
        for name in self.names:
            kinds = {rank: found[name] for rank, found in enumerate(everyone) if name in found}
            every = [kind for found in kinds.values() for kind in found]
            if len(every) < 2 or len(set(every)) > 1:
                shown = "; ".join(f"{', '.join(found)} on rank {r}" for r, found in kinds.items())
                raise InvalidArgument(
                    f"Pipeline: tied: {name!r} is {shown}: expected at least two parameters "
                    "under each name, on one rank or several, of the same shape and dtype"
                )
            part = comm.split(0 if name in self._parameters else None)
            if part is not None:
                self._comms[name] = part
                self._begin_equal(name, part)

    def _begin_equal(self, name: str, part: Communicator) -> None:
        """Make the parameters of one name equal: copy the first of the lowest rank; collective.

        `part` has the ranks that share the name.
        """
        first, *others = self._parameters[name]
        part.broadcast(values := _array(first.data), 0, out=values)
        for p in others:
            _array(p.data)[...] = values
        self.copies += others if part.rank == 0 else [first, *others]

    def begin(self) -> None:
        """Set aside the gradients of tied parameters from earlier steps, which are sums already.

        :meth:`sync` sums the gradients of this step only, then adds those that were set aside.
        """
        for name in self._comms:
            for k, p in enumerate(self._parameters[name]):
                if p.grad is not None:
                    array = _gradient(p)
                    self._before[name, k] = (
                        array.clone() if hasattr(array, "clone") else array.copy()
                    )
                    array[...] = 0

    def sync(self) -> None:
        """Replace the gradients of each tied parameter by their sum over ranks; collective.

        Gradients that :meth:`begin` set aside are added to the sum.
        """
        for name, comm in self._comms.items():
            own = self._parameters[name]
            for p in own:
                if p.grad is None:
                    p.grad = _zeros(p.data)
            # Those of this rank first: then each rank sends one array, however many chunks have it.
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
        """Free the communicators of the ranks that share a parameter; collective."""
        for comm in self._comms.values():
            comm.free()


def _listed(given: Any) -> list[Any]:
    """List the parameters tied under one name; an object that is given twice counts once."""
    several = given if isinstance(given, (list, tuple)) else [given]
    return list({id(p): p for p in several}.values())


def tied_forms(given: Any, found: Mapping[str, Any], rank: int) -> Forms:
    """Return dtype and shape of each tied parameter by name: of those given, and of those found.

    What is given under a name counts as given only.  InvalidArgument for anything but parameters.
    """
    forms = _forms(given, rank)
    known = {id(p) for own in given.values() for p in _listed(own)}
    return forms, _forms({name: p for name, p in found.items() if id(p) not in known}, rank)


def _forms(given: Any, rank: int) -> dict[str, list[str]]:
    where = f"rank {rank}: Pipeline: tied"
    found: dict[str, list[str]] = {}
    names: dict[int, str] = {}
    if not isinstance(given, Mapping):
        raise InvalidArgument(f"{where}={given!r}: expected a mapping of names to parameters")
    for name, own in given.items():
        if not isinstance(name, str):
            raise InvalidArgument(f"{where} has the name {name!r}: expected strings")
        found[name] = []
        if not _listed(own):
            raise InvalidArgument(f"{where}[{name!r}] is {own!r}: expected at least one parameter")
        for p in _listed(own):
            before = names.setdefault(id(p), name)
            if before != name:
                raise InvalidArgument(
                    f"{where} has the same parameter as {before!r} and as {name!r}: expected one "
                    "name for each"
                )
            try:
                parameter = hasattr(p, "data") and hasattr(p, "grad")
                array = _array(p.data) if parameter else None
            except Exception as error:  # whatever a parameter raises, such as a lazy one
                raise InvalidArgument(
                    f"{where}[{name!r}] cannot be read: {type(error).__name__}: {error}"
                ) from error
            if array is None:
                raise InvalidArgument(
                    f"{where}[{name!r}] is a {type(p).__name__}: expected a parameter, or a list "
                    "of these"
                )
            found[name].append(f"{getattr(array.dtype, 'name', array.dtype)}{list(array.shape)}")
    return found


def _array(x: Any) -> Any:
    """Return an array that shares the tensor's memory (on a GPU, the tensor itself)."""
    return x if library(x) is None else framework_of(x).values(x)


def _gradient(p: Any) -> np.ndarray:
    """Return an array that shares the memory of a parameter's gradient.

    A sparse gradient is replaced by a dense one first.
    """
    if getattr(p.grad, "is_sparse", False):
        p.grad = p.grad.to_dense()
    return _array(p.grad)


def _zeros(x: Any) -> Any:
    return np.zeros_like(x) if library(x) is None else x.new_zeros(x.shape)


def clip(
    comm: Communicator,
    stages: Sequence[Stage],
    replicas: Replicas,
    tied: Tied,
    max_norm: float,
) -> float:
    """Scale all gradients so that their norm over all stages is at most `max_norm`; collective.

    Return the norm before scaling, on every rank; Unsupported with a ZeroOptimizer.
    """
    if replicas.sharded:
        raise Unsupported(
            f"rank {comm.rank}: clip_gradients() of a Pipeline with a ZeroOptimizer, which divides "
            "gradients: expected an optimizer of whole parameters"
        )
    every = {id(p): p for stage in stages for p in stage.module.parameters()}
    copies = {id(p): p for p in tied.copies}
    counted = [p.grad for key, p in every.items() if key not in copies and p.grad is not None]

    def total(squares: float) -> float:
        return float(comm.allreduce(np.array([squares]), op="sum")[0])

    copied = [p.grad for p in copies.values() if p.grad is not None]
    return clip_by_norm(counted, max_norm, comm.rank, total, copied)
