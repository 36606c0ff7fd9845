"""A stage as the executor sees it: forward of one microbatch, and its way back, in halves too."""

from __future__ import annotations

import importlib
from contextlib import AbstractContextManager
from functools import partial
from typing import Any, Protocol

from ...gpu.messages import takes_addresses
from ..ddp import DDP
from ..framework import library
from .parcel import Tensors

ADAPTERS = {"torch": "mpidist.torch.stage"}
"""Where the stage of a library is: a module with a function ``stage(module, caller, where)``."""


class Stage(Protocol):
    """One chunk of the model on this rank.

    Attributes
    ----------
    module : object
        The chunk itself, without a wrapper.
    """

    module: Any

    @property
    def splits(self) -> bool:
        """Whether backward can be done in halves; else all of it is done in the first."""

    @property
    def tensors(self) -> Tensors:
        """How its values become parcels."""

    @property
    def training(self) -> bool:
        """Whether the module is in training."""

    @property
    def differentiates(self) -> bool | None:
        """Whether a graph is made of what is computed now; None without autograd."""

    def forward(
        self, value: Any, tree: Any, leaves: list[Any], keep: bool, ends: bool = False
    ) -> tuple[Any, Any]:
        """Compute the output, and give what the way back needs, or None without `keep`.

        `leaves` are the tensors of the input whose gradients are asked for, laid out like `tree`;
        none and None for the first stage.  With `ends`, :meth:`attach_loss` comes next.
        """

    def draft(self, value: Any) -> tuple[Any, Any]:
        """Compute the output only, and give what :meth:`again` needs; `value` stays as it is."""

    def again(self, moment: Any) -> AbstractContextManager[Any]:
        """Give a context in which a forward computes once more what a draft has.

        Random numbers are the same, and running statistics stay as they are now.
        """

    def finish(self, saved: Any, tree: Any, outputs: list[Any]) -> None:
        """Take the tensors of the output: gradients will come for them."""

    def attach_loss(self, saved: Any, output: Any, loss: Any) -> float:
        """Compute the loss of the last stage's output: backward begins there; give its value."""

    def backward(self, saved: Any, grads: list[Any] | None) -> list[Any]:
        """Go back: B.  `grads` are those of the outputs (or None); None begins at the loss.

        Nobody else may keep the memory of the gradients that are given back.
        """

    def backward_input(self, saved: Any, grads: list[Any] | None) -> list[Any]:
        """Do the first half: I."""

    def backward_weight(self, saved: Any) -> None:
        """Do the second half: W."""

    def nbytes(self, saved: Any) -> int:
        """Count the bytes that a microbatch keeps now, see :class:`~mpidist.PipelineStats`."""


def stage_of(module: Any, where: str, comm: Any = None) -> Stage:
    """Give the stage of a module, which may be in a :class:`~mpidist.parallel.DDP`.

    `where` begins the error message if it cannot be one; `comm` is who will send for it, if
    anybody.
    """
    made = _stage_of(module, where)
    if comm is not None:
        made.tensors.direct = partial(takes_addresses, comm.backend)  # type: ignore[attr-defined]
    return made


def _stage_of(module: Any, where: str) -> Stage:
    bare = module.module if isinstance(module, DDP) else module
    name = library(bare)
    if name in ADAPTERS:
        return importlib.import_module(ADAPTERS[name]).stage(bare, module, where)
    from .plain_stage import PlainStage

    return PlainStage(bare, module, where)
