"""ZeRO-1: each rank optimizes, and keeps the optimizer's state of, its shard of the parameters."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from ..checkpoint.format import Divided, Part, is_divided
from ..errors import InvalidArgument, Unsupported
from ..frameworks.base import Framework, Weakly, library
from ..schedule import blocks
from .bucket import Bucket
from .clip import clip_by_norm
from .consistency import Uncopied
from .transport import Average


@dataclass(frozen=True)
class Piece:
    """Some elements of a parameter, flat, as an optimizer sees them.

    Attributes
    ----------
    name : str
        Of the parameter.
    parameter, made : object
        The parameter, and the flat one that holds elements `start` to `stop` of it.
    shape : tuple of int
        Of the parameter.
    """

    name: str
    parameter: Any
    made: Any
    start: int
    stop: int
    shape: tuple[int, ...]

    def is_like(self, value: Any) -> bool:
        """Tell whether an entry of the state has an element for each of the piece's."""
        return tuple(getattr(value, "shape", ())) == (self.stop - self.start,)


def part_of(value: Any, start: int, stop: int) -> Any:
    """Give elements `start` to `stop` of an array that is stored; another value as it is."""
    read = getattr(value, "read", None)
    return value if read is None else read(start, stop)


class Division:
    """One slice of each bucket for each rank; the parameters' memory moves into buckets.

    Parameters
    ----------
    buckets : sequence of Bucket
        Of the model.
    allocate : callable
        As buckets take it.
    comm : Communicator
        The ranks.

    Attributes
    ----------
    slices : list of slice
        This rank's, of each bucket.
    counts : list of tuple of int
        Elements of every rank's slice, of each bucket.
    values : list of array, 1-D
        The parameters of each bucket.
    pieces : list of Piece
        What this rank has of the parameters.
    """

    def __init__(self, buckets: Sequence[Bucket], allocate: Callable[..., Any], comm: Any):
        cuts = [blocks(bucket.starts[-1], comm.size) for bucket in buckets]
        self.slices = [slice(cut[comm.rank].start, cut[comm.rank].stop) for cut in cuts]
        self.counts = [tuple(block.stop - block.start for block in cut) for cut in cuts]
        self._buckets = buckets
        self.values = [self._adopt(bucket, allocate, comm) for bucket in buckets]
        self.pieces = [piece for k in range(len(buckets)) for piece in self._cut(k)]

    def _adopt(self, bucket: Bucket, allocate: Callable[..., Any], comm: Any) -> Any:
        """Move the parameters of a bucket into one flat array."""
        flat = allocate(bucket.parameters[0], bucket.starts[-1], comm)
        for start, p in zip(bucket.starts, bucket.parameters):
            view = bucket.framework.view(flat, start, p)
            bucket.framework.copy(view, p.data)
            p.data = view
        return flat

    def _cut(self, k: int) -> list[Piece]:
        """Give this rank's pieces of the parameters of a bucket."""
        bucket, mine, values = self._buckets[k], self.slices[k], self.values[k]
        found = []
        for i, (name, p) in enumerate(zip(bucket.names, bucket.parameters, strict=True)):
            begin = bucket.starts[i]
            start, stop = max(mine.start, begin), min(mine.stop, bucket.starts[i + 1])
            if start < stop:
                made = bucket.framework.piece(values, bucket.flat, start, stop)
                found.append(Piece(name, p, made, start - begin, stop - begin, bucket.shapes[i]))
        return found

    def nothing(self) -> Any:
        """Give a piece without elements: optimizers refuse to have nothing to do."""
        return self._buckets[0].framework.piece(self.values[0], self._buckets[0].flat, 0, 0)


class Scatter:
    """The hook with which each rank gets the mean of its slice of a bucket, and of nothing else.

    Parameters
    ----------
    slices : sequence of slice
        Of each bucket that of this rank.
    counts : sequence of tuple of int
        Of each bucket the elements of every rank's slice.
    algorithms : list of str
        Of the reduce_scatter of each bucket.
    """

    lossless = True
    divides = True

    def __init__(
        self, slices: Sequence[slice], counts: Sequence[tuple[int, ...]], algorithms: list[str]
    ):
        self._slices, self._counts, self.algorithms = slices, counts, algorithms

    def _arguments(self, bucket: Bucket) -> dict[str, Any]:
        return {
            "op": "mean",
            "out": bucket.flat[self._slices[bucket.index]],
            "counts": self._counts[bucket.index],
            "algorithm": self.algorithms[bucket.index],
        }

    def __call__(self, bucket: Bucket) -> Any:
        """Begin in the background."""
        return bucket.comm.ireduce_scatter(bucket.flat, **self._arguments(bucket))

    def blocking(self, bucket: Bucket) -> None:
        """Do it at once."""
        bucket.comm.reduce_scatter(bucket.flat, **self._arguments(bucket))


SHAPE = (4, 3)
CUT = 5  # within a row
STEPS = 2


def check_elementwise(
    framework: Framework, optimizer: Any, group: Mapping[str, Any], options: Any, rank: int
) -> None:
    """Try it on a small matrix, and on two flat pieces of the same.

    Raises
    ------
    Unsupported
        If the elements do not come out alike, or it cannot make such steps.
    """
    name = getattr(optimizer, "__name__", type(optimizer).__name__)

    def refuse(why: str) -> Unsupported:
        return Unsupported(
            f"rank {rank}: ZeroOptimizer: {name} {why}; allowed are optimizers that treat every "
            "element for itself, such as SGD and Adam"
        )

    count = SHAPE[0] * SHAPE[1]
    values, gradients = np.linspace(-1.0, 1.0, 2 * count).reshape(2, count)
    changes = []
    for parts in (((0, count),), ((0, CUT), (CUT, count))):
        data, grad = values.copy(), gradients.copy()
        pieces = [framework.piece(data, grad, *part) for part in parts]
        if len(parts) == 1:
            _shape(pieces[0])
        made = [_make(optimizer, group, options, piece, len(parts) > 1, refuse) for piece in pieces]
        _step(made, grad, refuse)
        changes.append(data - values)
    if not np.allclose(changes[1], changes[0], rtol=1e-4, atol=1e-13, equal_nan=True):
        raise refuse("changes a piece of a parameter in another way than the whole")


def _shape(p: Any) -> None:
    """Make a matrix of a flat parameter."""
    grad, p.grad = p.grad, None
    p.data = p.data.reshape(SHAPE)
    p.grad = grad.reshape(SHAPE)


def _make(
    optimizer: Any, group: Mapping[str, Any], options: Any, p: Any, cut: bool, refuse: Any
) -> Any:
    """Make an optimizer; what it says of its options is the user's to see."""
    try:
        return optimizer([{**group, "params": [p]}] if group else [p], **options)
    except Exception as error:
        if cut:
            raise refuse(f"does not take a piece of a parameter ({error})") from error
        raise


def _step(optimizers: Sequence[Any], grad: np.ndarray, refuse: Any) -> None:
    try:
        for _ in range(STEPS):
            for one in optimizers:
                one.step()
            grad *= 0.5
    except Exception as error:
        raise refuse(f"cannot make the steps of one ({error})") from error


class ZeroOptimizer(Uncopied):
    """An optimizer whose state is divided among the ranks.

    Each bucket of the model is cut into one slice per rank.  Gradients are reduced and scattered,
    each rank's optimizer changes its slices, and the parameters are gathered: as many bytes as an
    allreduce, and a p-th of the memory for moments.  The parameters' memory moves into buckets.

    Parameters
    ----------
    optimizer : type
        Of PyTorch or :mod:`mpidist.nn`; it must treat every element for itself, as SGD and Adam do:
        it sees pieces of parameters, flat.  Whether it does is tried on a few numbers.
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
    takes_slices : bool
        True: it loads what was saved by slices, on any number of ranks.

    Raises
    ------
    Unsupported
        If the optimizer does not treat every element for itself, such as LBFGS, or the model has a
        communication hook.
    InvalidArgument
        If the model has made steps, or an argument is not allowed.

    Notes
    -----
    After ``model.sync_gradients()`` only this rank's slices hold the mean: clip with
    :meth:`clip_gradients`.
    """

    takes_parts = True
    takes_slices = True

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
        rank = self._comm.rank
        if self._reducer.clock.steps:
            raise InvalidArgument(
                f"rank {rank}: the model has made {self._reducer.clock.steps} steps; a "
                "ZeroOptimizer is to be made before the first"
            )
        if not model.buckets:
            raise InvalidArgument(f"rank {rank}: the model has no parameters to be learnt")
        if not isinstance(self._reducer.hook, Average):
            raise Unsupported(f"rank {rank}: a model with a communication hook cannot scatter")
        self._groups = self._checked(groups)
        first = {k: v for k, v in (self._groups or [{}])[0].items() if k != "params"}
        check_elementwise(model.framework, optimizer, first, options, rank)
        self._divide()
        self._reducer.lock(Weakly(self._follow))
        given = self._groups or [{}]
        made = [{**group, "params": p} for group, p in zip(given, self._lists(), strict=True)]
        self.optimizer = optimizer(made if self._groups else made[0]["params"], **options)

    def _checked(self, groups: Iterable[Mapping[str, Any]] | None) -> list[dict[str, Any]]:
        """Give copies of the groups, and raise InvalidArgument if they cannot be."""
        if groups is None:
            return []
        where, found = f"rank {self._comm.rank}: groups", [dict(group) for group in groups]
        if library(self._model.module) is None:
            raise InvalidArgument(f"{where}: allowed are those of PyTorch's modules")
        known = {id(p): name for name, p in self._model.module.named_parameters()}
        seen: set[int] = set()
        for number, group in enumerate(found):
            group["params"] = list(group["params"])
            for p in group["params"]:
                if id(p) in seen:
                    name = known[id(p)]
                    raise InvalidArgument(f"{where}[{number}] has {name}, which is in groups twice")
                if id(p) not in known:
                    raise InvalidArgument(
                        f"{where}[{number}] has params that are not among the model's: allowed are "
                        "lists of those"
                    )
                seen.add(id(p))
        return found

    def _divide(self) -> None:
        """Cut the buckets into slices, and choose how these are sent."""
        grouping, buckets = self._reducer.grouping, self._model.buckets
        nbytes = [bucket.nbytes for bucket in buckets]
        scatters = grouping.choose(nbytes, "reduce_scatter")
        self._gathers = grouping.choose(nbytes, "allgather")
        self._division = division = Division(buckets, grouping.allocate, self._comm)
        self._scatter = Scatter(division.slices, division.counts, scatters)
        if self._comm.size > 1:
            self._reducer.send_by(self._scatter)

    def _follow(self) -> None:
        """Go on with other buckets: those of a checkpoint."""
        self._divide()
        self._model.framework.hand_over(self.optimizer, self._lists())

    def _lists(self) -> list[list[Any]]:
        """Give the pieces of each group."""
        groups = self._groups or [{"params": self._model.parameters()}]
        wanted = [{id(p) for p in group["params"]} for group in groups]
        return [
            [piece.made for piece in self.pieces if id(piece.parameter) in members]
            or [self._division.nothing()]
            for members in wanted
        ]

    @property
    def pieces(self) -> list[Piece]:
        """What this rank changes."""
        return self._division.pieces

    def step(self) -> None:
        """Change this rank's slices, and gather those of all; collective."""
        self.optimizer.step()
        if self._comm.size == 1:
            return
        division = self._division
        for values, mine, counts, name in zip(
            division.values, division.slices, division.counts, self._gathers, strict=True
        ):
            self._comm.allgather(values[mine], out=values, counts=counts, algorithm=name)

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Forget the model's gradients, or (False) fill them with zeros where they are."""
        self._model.zero_grad(set_to_none)

    def clip_gradients(self, max_norm: float) -> float:
        """Do what :meth:`DDP.clip_gradients` does, on gradients that are divided; collective."""

        def total(squares: float) -> float:
            return float(self._comm.allreduce(np.array([squares]), op="sum", algorithm="linear")[0])

        pairs = zip(self._model.buckets, self._division.slices, strict=True)
        parts = [bucket.flat[mine] for bucket, mine in pairs]
        return clip_by_norm(parts, max_norm, self._comm.rank, total)

    # -- state ------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """Give this rank's part of the state, by parameter: only a :class:`Checkpoint` joins it."""
        state: dict[str, dict[str, Any]] = Divided()
        for piece in self.pieces:
            kept = self._model.framework.optimizer_state(self.optimizer, piece.made)
            state[piece.name] = {
                key: Part(value, piece.start, piece.shape) if piece.is_like(value) else value
                for key, value in kept.items()
            }
        groups = getattr(self.optimizer, "param_groups", [])
        options = [{k: v for k, v in group.items() if k != "params"} for group in groups]
        sending = {
            "ranks": self._comm.size,
            "buckets": self._reducer.grouping.names(),
            "scatters": self._scatter.algorithms,
            "gathers": self._gathers,
        }
        return {"options": options, "state": state, "sending": sending}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take this rank's part of the state that a checkpoint holds, for any number of ranks."""
        where = f"rank {self._comm.rank}: state is not one that a checkpoint has of a ZeroOptimizer"
        if not is_divided(state):
            raise InvalidArgument(f"{where}; what an undivided optimizer saved goes to one")
        groups = getattr(self.optimizer, "param_groups", [])
        if len(groups) != len(state["options"]):
            raise InvalidArgument(
                f"{where} with {len(groups)} groups of parameters: it has {len(state['options'])}"
            )
        self._restore(state.get("sending"))
        for piece in self.pieces:
            kept = self._model.framework.optimizer_state(self.optimizer, piece.made)
            kept.clear()
            for key, value in state["state"].get(piece.name, {}).items():
                part = part_of(value, piece.start, piece.stop)
                like = piece.is_like(part)
                kept[key] = self._model.framework.placed(part, piece.made) if like else part
        for group, options in zip(groups, state["options"], strict=True):
            group.update(options)

    def _restore(self, sending: Mapping[str, Any] | None) -> None:
        """Send as the run did that saved, so that this one has the same bits."""
        if sending is None:
            return
        grouping = self._reducer.grouping
        layout = grouping.layout_of(sending["buckets"])
        if layout is not None:
            if layout != grouping.layout:
                self._reducer.regroup(layout)
            if sending["ranks"] == self._comm.size:
                self._scatter.algorithms[:] = sending["scatters"]
                self._gathers[:] = sending["gathers"]
