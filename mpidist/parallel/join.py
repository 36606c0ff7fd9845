"""Uneven inputs: a rank that has run out of batches contributes zero gradients."""

from __future__ import annotations

import logging
from typing import Any, Protocol

import numpy as np

from ..arguments import one_of
from ..communicator.communicator import Communicator
from ..errors import InvalidArgument
from ..measure import counted
from .reducer import Reducer
from .replicas import describe_unlike

log = logging.getLogger("mpidist")


class Joined(Protocol):
    """The members of a wrapped module, a DDP, that a rank without batches uses."""

    comm: Communicator
    reducer: Reducer

    def take_part(self) -> None:
        """Take part in a step of the other ranks, with zero gradients."""

    def broadcast_parameters(self, root: int) -> None:
        """Copy the parameters and buffers of rank `root` to all ranks."""

    def unlike_parameters(self) -> dict[str, list[int]]:
        """Return the ranks whose values differ from rank 0's, by parameter."""


class Join:
    """Uneven inputs: the steps within a block ``with model.join(optimizer):``.

    A rank that leaves the block takes part in the steps of the others, with zero gradients, until
    all ranks have left it.  Means are always over all ranks, finished ones included, so gradients
    become smaller when some have finished: scale the loss if it is to be a mean over samples.

    Parameters
    ----------
    model : DDP
        The wrapped module.
    optimizer : object, optional
        A finished rank also calls the optimizer's ``step()`` and ``zero_grad()``, so that replicas
        and states of optimizers stay equal at every step.  If a step includes more, such as
        clipping or a learning-rate scheduler, pass an object whose ``step()`` does all of it, and
        call that ``step()`` in the training loop, too.  Without an optimizer the parameters of a
        rank that finished last are broadcast at the end.
    early : {"shadow", "error"}
        Whether a finished rank takes part in the others' steps, or all ranks raise InvalidArgument
        when one finishes before others.

    Attributes
    ----------
    first : tuple of int or None
        The first rank that finished before others, and its number of steps.
    root : int
        The lowest rank that has not finished.
    """

    HOW = ("shadow", "error")

    def __init__(self, model: Joined, optimizer: Any = None, early: str = "shadow"):
        rank = model.comm.rank
        one_of("early", early, self.HOW, f"rank {rank}: ")
        lacking = [name for name in ("step", "zero_grad") if not hasattr(optimizer, name)]
        if optimizer is not None and lacking:
            raise InvalidArgument(
                f"rank {rank}: join(): optimizer has type {type(optimizer).__name__}, "
                f"which has no {' and no '.join(lacking)}"
            )
        if optimizer is None and model.reducer.sharded:
            raise InvalidArgument(
                f"rank {rank}: join() needs the optimizer argument: step() of a ZeroOptimizer is "
                "collective, so pass the ZeroOptimizer to join()"
            )
        self._model, self._optimizer, self._early = model, optimizer, early
        self._comm = model.comm
        self._steps = 0
        self.first: tuple[int, int] | None = None
        self.root = 0

    @property
    def equal(self) -> bool:
        """Whether finished ranks update their parameters too, so that replicas stay equal."""
        return self._optimizer is not None

    def announce_step(self) -> None:
        """Announce, as a step begins, that this rank has not finished; collective."""
        self._exchange(True)

    def _exchange(self, active: bool) -> bool:
        """Tell all ranks whether this one is `active` (has batches); return whether any is.

        Also set `root` and `first`.  With ``early="error"`` raise InvalidArgument if some ranks
        have finished and others have not.
        """
        flags = self._comm.allgather(np.array([active], np.uint8))
        if not flags.any():
            return False
        self.root = int(flags.argmax())
        if self.first is None and not flags.all():
            self.first = (int(flags.argmin()), self._steps)
            rank, steps = self.first
            text = f"rank {rank} is the first to finish, after {counted(steps, 'step')}"
            if self._early == "error":
                raise InvalidArgument(
                    f"rank {self._comm.rank}: {text}; early='error' requires equal numbers of steps"
                )
            if self._comm.rank == self.root:
                log.info("join: %s", text)
        self._steps += 1
        return True

    def finish(self) -> None:
        """Take part in the steps of the other ranks until all have finished; collective.

        If a rank finished before others, then compare the parameters of all ranks, or without an
        optimizer copy those of a rank that finished last to all.
        """
        reducer, shadowed = self._model.reducer, False
        reducer.before_first_send = None  # this loop exchanges instead
        while self._exchange(False):
            shadowed = True
            self._model.take_part()
            if self._optimizer is not None:
                self._optimizer.step()
                self._optimizer.zero_grad()
        if self.first is None:
            return
        if self._optimizer is not None:
            self._compare()
        else:
            # Its parameters had every update; a rank that finished earlier has missed some.
            last = self._comm.allgather(np.array([not shadowed], np.uint8))
            self._model.broadcast_parameters(int(last.argmax()))

    def _compare(self) -> None:
        """Raise InvalidArgument on every rank if parameters differ between ranks; collective."""
        unlike = self._model.unlike_parameters()
        if unlike:
            raise InvalidArgument(
                f"rank {self._comm.rank}: join(): parameters differ from those of rank 0: "
                f"{describe_unlike(unlike)}. A rank that has run out of data calls only the "
                "optimizer's step() and zero_grad(); pass join() an object whose step() does the "
                "whole update, including e.g. clip_gradients()"
            )
