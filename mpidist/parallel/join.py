"""Ranks with unequal numbers of steps: who has finished takes part with zeros."""

from __future__ import annotations

import logging
from typing import Any

import numpy as np

from ..errors import InvalidArgument
from .buffers import told

log = logging.getLogger("mpidist")


class Join:
    """The steps of ranks whose inputs may be unequal, as ``with model.join(optimizer):`` gives it.

    A rank that leaves the block goes on to take part in the others' steps, with gradients of zero,
    until all have finished.  Means are still over all ranks: scale a loss as for a batch that is
    cut into unequal parts.

    Parameters
    ----------
    model : DDP
        Whose steps.
    optimizer : object, optional
        With it a finished rank also calls ``step()`` and ``zero_grad()``, so that the replicas and
        the optimizers' states stay equal at every step.  If there is more to a step, such as
        clipping or a scheduler of learning rates, give an object whose ``step()`` does all of it,
        and call that one everywhere.  Without, the parameters of a rank that
        finished last are broadcast in the end.
    early : {"shadow", "error"}
        Whether an unequal number of steps is an error, on all ranks.

    Attributes
    ----------
    first : tuple of int or None
        The first rank to finish while others went on, and the number of its steps.
    root : int
        The lowest rank that is not finished.
    """

    HOW = ("shadow", "error")

    def __init__(self, model: Any, optimizer: Any = None, early: str = "shadow"):
        if early not in self.HOW:
            raise InvalidArgument(
                f"rank {model.comm.rank}: early={early!r}: allowed are "
                f"{', '.join(map(repr, self.HOW))}"
            )
        lacking = [name for name in ("step", "zero_grad") if not hasattr(optimizer, name)]
        if optimizer is not None and lacking:
            raise InvalidArgument(
                f"rank {model.comm.rank}: join(): optimizer is of {type(optimizer).__name__}, "
                f"which has no {' and no '.join(lacking)}"
            )
        self._model, self._optimizer, self._early = model, optimizer, early
        self._comm = model.comm
        if optimizer is None and model.reducer.divided:
            raise InvalidArgument(
                f"rank {self._comm.rank}: join() needs the ZeroOptimizer: its steps are collective"
            )
        self._steps = 0
        self.first: tuple[int, int] | None = None
        self.root = 0

    @property
    def equal(self) -> bool:
        """Whether the replicas stay equal at every step, also those that have finished."""
        return self._optimizer is not None

    def meet(self) -> None:
        """At the beginning of a step: tell the others that this rank has one."""
        self._exchange(True)

    def _exchange(self, active: bool) -> bool:
        """Tell the others whether this rank is active; tell whether any is."""
        flags = self._comm.allgather(np.array([active], np.uint8))
        if not flags.any():
            return False
        self.root = int(flags.argmax())
        if self.first is None and not flags.all():
            self.first = (int(flags.argmin()), self._steps)
            rank, steps = self.first
            text = f"rank {rank} is the first to finish, after {steps} steps"
            if self._early == "error":
                raise InvalidArgument(
                    f"rank {self._comm.rank}: {text}; early='error' allows no unequal numbers"
                )
            if self._comm.rank == self.root:
                log.info("join: %s", text)
        self._steps += 1
        return True

    def finish(self) -> None:
        """Take part in the others' steps until all have finished."""
        reducer, shadowed = self._model.reducer, False
        reducer.opens = int  # what it would tell was told here
        while self._exchange(False):
            shadowed = True
            self._model.zero_grad()
            reducer.touched[:] = 1  # nothing is unused by who has nothing to do
            self._model.sync_gradients()
            if self._optimizer is not None:
                self._optimizer.step()
                self._optimizer.zero_grad()
        if self.first is None:
            return
        if self._optimizer is not None:
            self._compare()
        else:
            last = self._comm.allgather(np.array([not shadowed], np.uint8))
            self._model.broadcast_parameters(int(last.argmax()))

    def _compare(self) -> None:
        """Raise on every rank if the replicas are not equal now."""
        unlike = self._model.unlike_parameters()
        if unlike:
            raise InvalidArgument(
                f"rank {self._comm.rank}: join(): parameters differ from those of rank 0: "
                f"{told(unlike)}: "
                "what a step does apart from step() and zero_grad() of the optimizer, such as "
                "clip_gradients(), a finished rank has not done; give an object whose step() "
                "does it all"
            )
