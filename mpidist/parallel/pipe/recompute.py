"""A stage that keeps only its inputs, and computes forward once more on the way back."""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Any

from .live import Held
from .parcel import Tensors
from .stage import Stage
from .structure import flatten


class _Wanting:
    """Tensors that no graph tells of: gradients are asked for all that can have them."""

    def __init__(self, tensors: Tensors):
        self._form, self.array, self.own = tensors.form, tensors.array, tensors.own
        self.empty, self.tensor, self.result = tensors.empty, tensors.tensor, tensors.result

    def form(self, x: Any) -> tuple[str, tuple[int, ...], bool]:
        """Give the form."""
        dtype, shape, _ = self._form(x)
        return dtype, shape, "float" in dtype or "complex" in dtype


class Remembered(Held):
    """What is enough to compute a forward again."""

    __slots__ = ("value", "tree", "leaves", "moment", "loss", "inner")

    def __init__(self, value: Any, tree: Any, leaves: list[Any], moment: Any):
        self.value, self.tree, self.leaves, self.moment = value, tree, leaves, moment
        self.loss: Any = None
        self.inner: Any = None


class Recomputing:
    """Activation recomputation around a stage (see :class:`~.stage.Stage`)."""

    def __init__(self, stage: Stage):
        self._stage, self.module = stage, stage.module
        self.tensors = _Wanting(stage.tensors)

    @property
    def splits(self) -> bool:
        """Whether backward can be done in halves."""
        return self._stage.splits

    @property
    def training(self) -> bool:
        """Whether the module is in training."""
        return self._stage.training

    @property
    def differentiates(self) -> bool | None:
        """Whether a graph could be made now."""
        return self._stage.differentiates

    def forward(
        self, value: Any, tree: Any, leaves: list[Any], keep: bool, ends: bool = False
    ) -> tuple[Any, Remembered | None]:
        """Compute the output and keep the input."""
        if not keep:
            return self._stage.forward(value, tree, leaves, False)
        output, moment = self._stage.draft(value)
        return output, Remembered(value, tree, leaves, moment)

    def draft(self, value: Any) -> tuple[Any, Any]:
        """Compute the output only."""
        return self._stage.draft(value)

    def again(self, moment: Any) -> AbstractContextManager[Any]:
        """Give the context of a second forward."""
        return self._stage.again(moment)

    def finish(self, saved: Remembered, tree: Any, outputs: list[Any]) -> None:
        """Do nothing: outputs are made again."""

    def attach_loss(self, saved: Remembered, output: Any, loss: Any) -> float:
        """Compute the loss, now for its value and later for its gradient."""
        saved.loss = loss
        return loss.value(output)

    def backward(self, saved: Remembered, grads: list[Any] | None) -> list[Any]:
        """Go forward, then back."""
        return self._stage.backward(self._again(saved), grads)

    def backward_input(self, saved: Remembered, grads: list[Any] | None) -> list[Any]:
        """Go forward, then do the first half of the way back."""
        return self._stage.backward_input(self._again(saved), grads)

    def backward_weight(self, saved: Remembered) -> None:
        """Do the second half."""
        self._stage.backward_weight(saved.inner)

    def nbytes(self, saved: Remembered) -> int:
        """Count the bytes of the input; once there is a second forward, what that keeps."""
        if saved.inner is None:
            return sum([x.nbytes for x in saved.leaves])
        return self._stage.nbytes(saved.inner)

    def _again(self, saved: Remembered) -> Any:
        stage, ends = self._stage, saved.loss is not None
        with stage.again(saved.moment):
            output, inner = stage.forward(saved.value, saved.tree, saved.leaves, True, ends)
            if ends:
                stage.attach_loss(inner, output, saved.loss)
            else:
                stage.finish(inner, *flatten(output))
        saved.inner = inner
        saved.value, saved.tree, saved.leaves, saved.moment = None, None, [], None
        saved.resize(self.nbytes(saved))
        return inner
