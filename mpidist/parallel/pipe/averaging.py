"""Stages with replicas: gradients go into their mean once, after a step's last microbatch."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from typing import Any

import numpy as np

from ...errors import InvalidArgument
from ..ddp import DDP


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
