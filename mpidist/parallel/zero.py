"""ZeRO-1: each rank updates its shard of the parameters, and has that shard's optimizer state."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np

from ..checkpoint.state import Divided, Part, is_zero_state
from ..errors import InvalidArgument, Unsupported
from ..frameworks.base import WeakHook, library
from ..measure import counted
from ..schedule import blocks
from .bucket import Bucket, Shard
from .clip import clip_by_norm
from .consistency import NotCopyable
from .ddp import DDP


@dataclass(frozen=True)
class ShardPiece:
    """Consecutive elements of a parameter: its part in this rank's shard of a bucket."""

    name: str
    parameter: Any
    flat: Any  # the flat parameter that the optimizer is given: elements `start` to `stop`
    grad: Any  # of `flat`, a view of the bucket
    start: int
    stop: int
    shape: tuple[int, ...]  # of the whole parameter

    def is_like(self, value: Any) -> bool:
        """Return whether a value of the optimizer's state is an array with the piece's length."""
        return tuple(getattr(value, "shape", ())) == (self.stop - self.start,)

    def read(self, value: Any) -> Any:
        """Return elements `start` to `stop` of an array in a checkpoint; other values unchanged."""
        read = getattr(value, "read", None)
        return value if read is None else read(self.start, self.stop)


class ZeroOptimizer(NotCopyable):
    """An optimizer whose state is divided among the ranks (ZeRO-1).

    Each bucket of the model is divided into one shard per rank.  Gradients are reduced and
    scattered, each rank's optimizer updates its shards, and the parameters are gathered.  A step
    sends as many bytes as an allreduce, and on p ranks each has 1/p of the optimizer's state, such
    as Adam's moments.  The parameters move into flat buffers like those of the gradients.

    Parameters
    ----------
    optimizer : type
        Optimizer of PyTorch or :mod:`mpidist.nn`.  It must update each element of a parameter by
        itself, as SGD and Adam do, because it is given flat pieces of parameters.
    model : DDP
        The model to be trained, before its first step; its buckets do not change after this.
    groups : iterable of dict, optional
        Parameter groups of PyTorch; by default one group with all parameters of the model.
    elementwise : bool
        Set True to allow an optimizer that updates each element by itself, but is not in the list
        of those known to.
    **options
        Options of the optimizer.

    Attributes
    ----------
    comm : Communicator
        The communicator of the model's buckets.
    optimizer : object
        The optimizer of this rank's pieces, for a learning-rate scheduler, say.
    takes_parts : bool
        True tells a :class:`Checkpoint` to pass arrays unread: only the needed parts are read.
    takes_slices : bool
        True tells a :class:`Checkpoint` that a state saved in parts, on any number of ranks, can be
        loaded.

    Raises
    ------
    Unsupported
        If the optimizer is not known to update each element by itself, as LBFGS does not, or the
        model has a communication hook or sparse gradients.
    InvalidArgument
        If the model has made steps, or an argument is wrong.

    Notes
    -----
    After ``model.sync_gradients()`` each rank has the mean of its shards only: clip with
    :meth:`clip_gradients`.
    """

    takes_parts = True
    takes_slices = True

    def __init__(
        self,
        optimizer: Any,
        model: DDP,
        groups: Iterable[Mapping[str, Any]] | None = None,
        *,
        elementwise: bool = False,
        **options: Any,
    ):
        if not callable(optimizer) or not isinstance(model, DDP):
            raise InvalidArgument(
                f"optimizer={optimizer!r}, model of type {type(model).__name__}: expected an "
                "optimizer class, and a DDP"
            )
        self._model, self._reducer = model, model.reducer
        self.comm = self._reducer.comm
        rank = self.comm.rank
        if self._reducer.clock.steps:
            raise InvalidArgument(
                f"rank {rank}: the model has made {counted(self._reducer.clock.steps, 'step')}; "
                "create a ZeroOptimizer before the first"
            )
        if not model.reducer.grouping.named:
            raise InvalidArgument(
                f"rank {rank}: ZeroOptimizer: the model has no trainable parameters"
            )
        grouping = self._reducer.grouping
        if grouping.sparse:
            names = ", ".join(gradient.name for gradient in grouping.sparse)
            raise Unsupported(
                f"rank {rank}: ZeroOptimizer: the gradients of {names} are sparse, and only dense "
                "ones can be divided among the ranks: expected an embedding with sparse=False"
            )
        if self._reducer.hook is not None:
            what = "a communication hook" if self._reducer.microbatches is None else "reproducible="
            raise Unsupported(f"rank {rank}: ZeroOptimizer: the model has {what}: expected none")
        inner = optimizer.func if isinstance(optimizer, partial) else optimizer
        if not elementwise and not model.framework.is_elementwise(inner):
            raise Unsupported(
                f"rank {rank}: ZeroOptimizer: {getattr(inner, '__name__', inner)} is not known to "
                "update each element of a parameter by itself, as SGD and Adam do; pass "
                "elementwise=True if it does, since it gets flat pieces of parameters"
            )
        self._groups = self._check_groups(groups)
        self._divide()
        self._reducer.fix(WeakHook(self._regroup))
        given = self._groups or [{}]
        made = [{**group, "params": p} for group, p in zip(given, self._group_pieces())]
        self.optimizer = optimizer(made if self._groups else made[0]["params"], **options)

    def _check_groups(self, groups: Iterable[Mapping[str, Any]] | None) -> list[dict[str, Any]]:
        """Return copies of the user's parameter groups; InvalidArgument if they are wrong."""
        if groups is None:
            return []
        where, copies = f"rank {self.comm.rank}: groups", [dict(group) for group in groups]
        if library(self._model.module) is None:
            raise InvalidArgument(
                f"{where}: expected None: only modules of PyTorch can have parameter groups"
            )
        module = self._model.module
        ignored = self._model.framework.ignored(module)
        named = module.named_parameters()
        known = {id(p): name for name, p in named if name not in ignored}
        seen: set[int] = set()
        for number, group in enumerate(copies):
            group["params"] = list(group["params"])
            for p in group["params"]:
                if id(p) in seen:
                    name = known[id(p)]
                    raise InvalidArgument(
                        f"{where}[{number}] has {name}, which is in the groups twice"
                    )
                if id(p) not in known:
                    raise InvalidArgument(
                        f"{where}[{number}] has params that do not belong to the model, or that "
                        "it ignores: expected only those that the ranks share"
                    )
                seen.add(id(p))
        return copies

    # -- shards -----------------------------------------------------------------------------------

    def _divide(self) -> None:
        """Divide the buckets into shards, and move the memory of the parameters into buckets.

        ::

            parameters   |      weight       | bias |   weight   |
            shards       |   rank 0    |   rank 1    |   rank 2   |
            pieces       |             |     |       |            |
        """
        grouping, buckets, comm = self._reducer.grouping, self._model.buckets, self.comm
        nbytes = [bucket.nbytes for bucket in buckets]
        scatters = grouping.choose(nbytes, "reduce_scatter")
        self._gathers = grouping.choose(nbytes, "allgather")
        self._shards: list[Shard] = []
        self._values: list[Any] = []  # the parameters of each bucket, flat
        self._pieces: list[ShardPiece] = []
        for bucket, algorithm in zip(buckets, scatters, strict=True):
            cut = blocks(bucket.starts[-1], comm.size)
            mine = slice(cut[comm.rank].start, cut[comm.rank].stop)
            shard = Shard(mine, tuple(block.stop - block.start for block in cut), algorithm)
            bucket.shard = shard if comm.size > 1 else None
            values = grouping.allocate(bucket.parameters[0], bucket.starts[-1], comm)
            for start, p in zip(bucket.starts, bucket.parameters):
                view = bucket.framework.view(values, start, p)
                bucket.framework.copy(view, p.data)
                p.data = view
            self._shards.append(shard)
            self._values.append(values)
            self._pieces += _pieces_of(bucket, shard.mine, values)

    def _regroup(self) -> None:
        """Divide the buckets of a loaded checkpoint, and give the optimizer the new pieces."""
        self._divide()
        self._model.framework.set_parameters(self.optimizer, self._group_pieces())

    def _group_pieces(self) -> list[list[Any]]:
        """Return the flat pieces of each group on this rank.

        A group without pieces here gets one of length 0, because optimizers refuse empty groups.
        """
        groups = self._groups or [{"params": list(self._model.parameters())}]
        members = [{id(p) for p in group["params"]} for group in groups]
        bucket, values = self._model.buckets[0], self._values[0]
        return [
            [piece.flat for piece in self._pieces if id(piece.parameter) in ids]
            or [bucket.framework.flat_parameter(values, bucket.flat, 0, 0)]
            for ids in members
        ]

    @property
    def pieces(self) -> list[ShardPiece]:
        """The pieces of parameters that this rank optimizes."""
        return self._pieces

    # -- a step -----------------------------------------------------------------------------------

    def step(self) -> None:
        """Update this rank's shards of the parameters, then gather all shards; collective."""
        self._model.check_averaged()
        for piece in self._pieces:  # None for a parameter that no rank has used
            piece.flat.grad = None if piece.parameter.grad is None else piece.grad
        self.optimizer.step()
        if self.comm.size == 1:
            return
        for values, shard, algorithm in zip(self._values, self._shards, self._gathers, strict=True):
            self.comm.allgather(
                values[shard.mine], out=values, counts=shard.counts, algorithm=algorithm
            )

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Set the model's gradients to None, or (False) to zeros in place."""
        self._model.zero_grad(set_to_none)

    def clip_gradients(self, max_norm: float) -> float:
        """Scale the gradients so that their norm over all ranks is at most `max_norm`; collective.

        Returns
        -------
        float
            The norm before scaling, from sums in float64.
        """

        def total(squares: float) -> float:
            return float(self.comm.allreduce(np.array([squares]), op="sum", algorithm="linear")[0])

        pairs = zip(self._model.buckets, self._shards, strict=True)
        parts = [bucket.flat[shard.mine] for bucket, shard in pairs]
        return clip_by_norm(parts, max_norm, self.comm.rank, total)

    # -- state ------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """Return this rank's part of the state, by parameter.

        A :class:`Checkpoint` joins the parts of all ranks.
        """
        state: dict[str, dict[str, Any]] = Divided()
        for piece in self._pieces:
            entries = self._model.framework.optimizer_state(self.optimizer, piece.flat)
            state[piece.name] = {
                key: Part(value, piece.start, piece.shape) if piece.is_like(value) else value
                for key, value in entries.items()
            }
        groups = getattr(self.optimizer, "param_groups", [])
        options = [{k: v for k, v in group.items() if k != "params"} for group in groups]
        sending = {
            "ranks": self.comm.size,
            "buckets": self._reducer.grouping.names(),
            "scatters": [shard.algorithm for shard in self._shards],
            "gathers": list(self._gathers),
        }
        return {"options": options, "state": state, "sending": sending}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Load this rank's part of a state, saved on any number of ranks; collective.

        Raises
        ------
        InvalidArgument
            If it is not the state of a ZeroOptimizer with as many groups.
        """
        where = f"rank {self.comm.rank}: state is not that of a ZeroOptimizer in a checkpoint"
        if not is_zero_state(state):
            raise InvalidArgument(f"{where}; load it into an optimizer that is not a ZeroOptimizer")
        groups = getattr(self.optimizer, "param_groups", [])
        if len(groups) != len(state["options"]):
            raise InvalidArgument(
                f"rank {self.comm.rank}: state has {len(state['options'])} groups of parameters, "
                f"this ZeroOptimizer has {len(groups)}: expected as many"
            )
        self._load_sending(state.get("sending"))
        framework = self._model.framework
        for piece in self._pieces:
            entries = framework.optimizer_state(self.optimizer, piece.flat)
            entries.clear()
            for key, value in state["state"].get(piece.name, {}).items():
                part = piece.read(value)
                entries[key] = framework.place(part, piece.flat) if piece.is_like(part) else part
        for group, options in zip(groups, state["options"], strict=True):
            group.update(options)

    def _load_sending(self, sending: Mapping[str, Any] | None) -> None:
        """Adopt the buckets of the saved run, so that a resumed one has the same bits; collective.

        `sending` is the entry "sending" of a result of :meth:`state_dict`; None changes nothing.
        If the saved run had as many ranks as this one, its algorithms are adopted, too.
        """
        if sending is None:
            return
        grouping = self._reducer.grouping
        layout = grouping.layout_of(sending["buckets"])
        if layout is None:
            return
        if layout != grouping.layout:
            self._reducer.regroup(layout)
        if sending["ranks"] == self.comm.size:
            self._gathers = list(sending["gathers"])
            for shard, algorithm in zip(self._shards, sending["scatters"], strict=True):
                shard.algorithm = algorithm


def _pieces_of(bucket: Bucket, mine: slice, values: Any) -> list[ShardPiece]:
    """Return the pieces of a bucket's parameters that lie in its slice `mine`.

    `values` is the buffer that holds the values of these parameters, in the bucket's order.
    """
    pieces = []
    for i, (name, p) in enumerate(zip(bucket.names, bucket.parameters, strict=True)):
        begin = bucket.starts[i]
        start, stop = max(mine.start, begin), min(mine.stop, bucket.starts[i + 1])
        if start < stop:
            flat = bucket.framework.flat_parameter(values, bucket.flat, start, stop)
            shape = bucket.shapes[i]
            pieces.append(ShardPiece(name, p, flat, flat.grad, start - begin, stop - begin, shape))
    return pieces
