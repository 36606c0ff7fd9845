"""ZeRO, stage 1 (Rajbhandari et al., SC 2020): each rank keeps a part of the optimizer's state."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np

from ..errors import InvalidArgument, Unsupported
from .clip import clip_by_norm
from .division import Division
from .elementwise import check_elementwise
from .framework import library
from .pieces import Divided, Part, Piece, part_of
from .progress import Average
from .scatter import Scatter
from .weakly import Weakly
from .wrapper import Uncopied


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


def is_divided(state: Any) -> bool:
    """Return whether this is the state of a :class:`ZeroOptimizer`, from a checkpoint."""
    needed, known = {"state", "options"}, {"state", "options", "sending"}
    return isinstance(state, Mapping) and needed <= set(state) <= known
