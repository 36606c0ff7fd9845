"""A stage as the executor sees it: forward of one microbatch, and its way back, in halves too."""

from __future__ import annotations

import importlib
from typing import Any, Protocol

from ..ddp import DDP
from ..framework import library
from .parcel import Tensors

ADAPTERS = {"torch": "mpidist.torch.stage"}
"""Where the stage of a library is: a module with a function ``stage(module, caller, where)``."""


class Stage(Protocol):
    """One chunk of the model on this rank.

    Attributes
    ----------
    splits : bool
        Whether backward can be done in halves; else all of it is done in the first.
    """

    splits: bool

    @property
    def tensors(self) -> Tensors:
        """How its values become parcels."""

    @property
    def learns(self) -> bool:
        """Whether the module is in training."""

    def random_state(self) -> Any:
        """Give what makes a second forward draw the same random numbers."""

    def forward(
        self, value: Any, tree: Any, leaves: list[Any], keep: bool, random: Any = None
    ) -> tuple[Any, Any]:
        """Compute the output, and give what the way back needs, or None without `keep`.

        `leaves` are the tensors of the input whose gradients are asked for, laid out like `tree`;
        none and None for the first stage.
        """

    def finish(self, saved: Any, tree: Any, outputs: list[Any]) -> None:
        """Take the tensors of the output: gradients will come for them."""

    def attach_loss(self, saved: Any, output: Any, loss: Any) -> float:
        """Compute the loss of the last stage's output: backward begins there; give its value."""

    def backward(self, saved: Any, grads: list[Any] | None) -> list[Any]:
        """Go back: B.  `grads` are those of the outputs (or None); None begins at the loss."""

    def backward_input(self, saved: Any, grads: list[Any] | None) -> list[Any]:
        """Do the first half: I."""

    def backward_weight(self, saved: Any) -> None:
        """Do the second half: W."""

    def nbytes(self, saved: Any) -> int:
        """Count the bytes that a microbatch keeps alive, parameters not among them."""


def stage_of(module: Any, where: str) -> Stage:
    """Give the stage of a module, which may be in a :class:`~mpidist.parallel.DDP`.

    `where` begins the error message if it cannot be one.
    """
    bare = module.module if isinstance(module, DDP) else module
    name = library(bare)
    if name in ADAPTERS:
        return importlib.import_module(ADAPTERS[name]).stage(bare, module, where)
    from .plain_stage import PlainStage

    return PlainStage(bare, module, where)
