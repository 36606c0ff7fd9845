"""ZeRO, stage 1 (Rajbhandari et al., SC 2020): each rank keeps a part of the optimizer's state."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from ..errors import InvalidArgument, Unsupported
from ..schedule import blocks
from .bucket import Bucket
from .clip import clip_by_norm
from .pieces import Part, Piece, part_of
from .progress import Average


class Scatter:
    """The hook with which each rank gets the mean of its slice of a bucket, and of nothing else."""

    lossless = True
    divides = True

    def __init__(
        self, slices: Sequence[slice], counts: Sequence[tuple[int, ...]], names: list[str]
    ):
        self._slices, self._counts, self._names = slices, counts, names

    def _arguments(self, bucket: Bucket) -> dict[str, Any]:
        return {
            "op": "mean",
            "out": bucket.flat[self._slices[bucket.index]],
            "counts": self._counts[bucket.index],
            "algorithm": self._names[bucket.index],
        }

    def __call__(self, bucket: Bucket) -> Any:
        """Begin in the background."""
        return bucket.comm.ireduce_scatter(bucket.flat, **self._arguments(bucket))

    def blocking(self, bucket: Bucket) -> None:
        """Do it at once."""
        bucket.comm.reduce_scatter(bucket.flat, **self._arguments(bucket))


class ZeroOptimizer:
    """An optimizer whose state is divided among the ranks.

    Each bucket of the model is cut into one slice per rank.  Gradients are reduced and scattered,
    each rank's optimizer changes its slices, and the parameters are gathered: as many bytes as an
    allreduce, and a p-th of the memory for moments.  The parameters' memory moves into buckets.

    Parameters
    ----------
    optimizer : type
        Of PyTorch or :mod:`mpidist.nn`; it must treat every element for itself, as SGD and Adam do:
        it sees pieces of parameters, flat.
    model : DDP
        Whose parameters are learnt.  To be made before its first step; the buckets stay as they
        are then.
    groups : iterable of dict, optional
        PyTorch's parameter groups; by default all parameters of the model.
    **options
        Of the optimizer.

    Attributes
    ----------
    optimizer : object
        The one of this rank, for a scheduler of learning rates for instance.
    takes_parts : bool
        True: of a checkpoint it reads what it needs, not whole arrays.

    Notes
    -----
    After ``model.sync_gradients()`` only this rank's slices hold the mean: clip with
    :meth:`clip_gradients`.
    """

    takes_parts = True

    def __init__(
        self,
        optimizer: Any,
        model: Any,
        groups: Iterable[Mapping[str, Any]] | None = None,
        **options: Any,
    ):
        if not callable(optimizer) or not hasattr(model, "reducer"):
            raise InvalidArgument(
                f"optimizer={optimizer!r}, model of {type(model).__name__}: allowed are a type of "
                "optimizers, which is made here, and a DDP"
            )
        self._model, self._reducer = model, model.reducer
        self._comm = self._reducer.comm
        rank, size = self._comm.rank, self._comm.size
        if self._reducer.clock.steps:
            raise InvalidArgument(
                f"rank {rank}: the model has made {self._reducer.clock.steps} steps; a "
                "ZeroOptimizer is to be made before the first"
            )
        if not model.buckets:
            raise InvalidArgument(f"rank {rank}: the model has no parameters to be learnt")
        if not isinstance(self._reducer.hook, Average):
            raise Unsupported(f"rank {rank}: a model with a communication hook cannot scatter")
        buckets = model.buckets
        self._counts = [
            tuple(s.stop - s.start for s in _slices(bucket.starts[-1], size)) for bucket in buckets
        ]
        self._mine = [_slices(bucket.starts[-1], size)[rank] for bucket in buckets]
        nbytes, grouping = [bucket.nbytes for bucket in buckets], self._reducer.grouping
        scatters = grouping.choose(nbytes, "reduce_scatter")
        self._gathers = grouping.choose(nbytes, "allgather")
        self._reducer.lock(Scatter(self._mine, self._counts, scatters) if size > 1 else None)
        self._values = [self._adopt(bucket) for bucket in buckets]
        self.pieces = [piece for bucket in buckets for piece in self._cut(bucket)]
        self.optimizer = optimizer(self._grouped(groups), **options)

    def _adopt(self, bucket: Bucket) -> Any:
        """Move the parameters of a bucket into one flat array."""
        framework, grouping = self._model.framework, self._reducer.grouping
        flat = grouping.allocate(bucket.parameters[0], bucket.starts[-1], self._comm)
        for start, p in zip(bucket.starts, bucket.parameters):
            view = framework.view(flat, start, p)
            framework.copy(view, p.data)
            p.data = view
        return flat

    def _cut(self, bucket: Bucket) -> list[Piece]:
        """Give this rank's pieces of a bucket's parameters."""
        mine, values = self._mine[bucket.index], self._values[bucket.index]
        found = []
        for k, (name, p) in enumerate(zip(bucket.names, bucket.parameters, strict=True)):
            begin = bucket.starts[k]
            start, stop = max(mine.start, begin), min(mine.stop, bucket.starts[k + 1])
            if start < stop:
                made = self._model.framework.piece(values, bucket.flat, start, stop)
                shape = bucket.shapes[k]
                found.append(Piece(name, p, made, start - begin, stop - begin, shape))
        return found

    def _grouped(self, groups: Iterable[Mapping[str, Any]] | None) -> list[Any]:
        """Give the pieces, in groups as their parameters are."""
        if groups is None:
            return [piece.made for piece in self.pieces] or [self._nothing()]
        grouped = []
        known = {id(p) for p in self._model.parameters()}
        for number, group in enumerate(groups):
            wanted = {id(p) for p in group["params"]}
            if not wanted <= known:
                raise InvalidArgument(
                    f"rank {self._comm.rank}: groups[{number}] has params that are not among the "
                    "model's: allowed are lists of those"
                )
            made = [piece.made for piece in self.pieces if id(piece.parameter) in wanted]
            grouped.append({**group, "params": made or [self._nothing()]})
        return grouped

    def _nothing(self) -> Any:
        """Give a piece without elements: optimizers refuse to have nothing to do."""
        bucket = self._model.buckets[0]
        return self._model.framework.piece(self._values[0], bucket.flat, 0, 0)

    def step(self) -> None:
        """Change this rank's slices, and gather those of all; collective."""
        self.optimizer.step()
        if self._comm.size == 1:
            return
        for values, mine, counts, name in zip(
            self._values, self._mine, self._counts, self._gathers, strict=True
        ):
            self._comm.allgather(values[mine], out=values, counts=counts, algorithm=name)

    def zero_grad(self) -> None:
        """Forget the model's gradients."""
        self._model.zero_grad()

    def clip_gradients(self, max_norm: float) -> float:
        """Do what :meth:`DDP.clip_gradients` does, on gradients that are divided; collective."""

        def total(squares: float) -> float:
            return float(self._comm.allreduce(np.array([squares]), op="sum", algorithm="linear")[0])

        parts = [bucket.flat[mine] for bucket, mine in zip(self._model.buckets, self._mine)]
        return clip_by_norm(parts, max_norm, self._comm.rank, total)

    # -- state ------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """Give this rank's part of the state, by parameter: only a :class:`Checkpoint` joins it."""
        state: dict[str, dict[str, Any]] = {}
        for piece in self.pieces:
            kept = self._model.framework.optimizer_state(self.optimizer, piece.made)
            state[piece.name] = {
                key: Part(value, piece.start, piece.shape) if piece.is_like(value) else value
                for key, value in kept.items()
            }
        groups = getattr(self.optimizer, "param_groups", [])
        options = [{k: v for k, v in group.items() if k != "params"} for group in groups]
        return {"options": options, "state": state}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take this rank's part of the state that a checkpoint holds, for any number of ranks."""
        for piece in self.pieces:
            kept = self._model.framework.optimizer_state(self.optimizer, piece.made)
            kept.clear()
            for key, value in state["state"].get(piece.name, {}).items():
                kept[key] = part_of(value, piece.start, piece.stop)
        groups = getattr(self.optimizer, "param_groups", [])
        for group, options in zip(groups, state["options"], strict=True):
            group.update(options)


def _slices(count: int, size: int) -> list[slice]:
    return [slice(b.start, b.stop) for b in blocks(count, size)]
