"""A stage that keeps only its inputs, and computes forward once more on the way back."""

from __future__ import annotations

from typing import Any

from .live import Held
from .parcel import Tensors
from .stage import Stage
from .structure import flatten


class _Wanting:
    """Tensors that no graph tells of: gradients are asked for all that can have them."""

    def __init__(self, tensors: Tensors):
        self._form = tensors.form
        self.array, self.empty, self.tensor = tensors.array, tensors.empty, tensors.tensor

    def form(self, x: Any) -> tuple[str, tuple[int, ...], bool]:
        """Give the form."""
        dtype, shape, _ = self._form(x)
        return dtype, shape, "float" in dtype or "complex" in dtype


class Remembered(Held):
    """What is enough to compute a forward again."""

    __slots__ = ("value", "tree", "leaves", "random", "loss", "inner")

    def __init__(self, value: Any, tree: Any, leaves: list[Any], random: Any):
        self.value, self.tree, self.leaves, self.random = value, tree, leaves, random
        self.loss: Any = None
        self.inner: Any = None


class Recomputing:
    """Activation recomputation around a stage (see :class:`~.stage.Stage`).

    A layer must give the same output for the same input; random numbers of PyTorch's generator are
    drawn again as they were.
    """

    def __init__(self, stage: Stage):
        self._stage = stage
        self.tensors, self.splits = _Wanting(stage.tensors), stage.splits

    @property
    def learns(self) -> bool:
        """Whether the module is in training."""
        return self._stage.learns

    def random_state(self) -> Any:
        """Give the state of the stage's generator."""
        return self._stage.random_state()

    def forward(
        self, value: Any, tree: Any, leaves: list[Any], keep: bool, random: Any = None
    ) -> tuple[Any, Remembered | None]:
        """Compute the output and keep the input."""
        state = self._stage.random_state() if keep else None
        output, _ = self._stage.forward(value, tree, leaves, False, random)
        return output, Remembered(value, tree, leaves, state) if keep else None

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
        saved.inner = self._again(saved)
        return self._stage.backward_input(saved.inner, grads)

    def backward_weight(self, saved: Remembered) -> None:
        """Do the second half."""
        self._stage.backward_weight(saved.inner)

    def nbytes(self, saved: Remembered) -> int:
        """Count the bytes of the input."""
        tensors = flatten(saved.value)[1]
        return sum(self._stage.tensors.array(t).nbytes for t in tensors)

    def _again(self, saved: Remembered) -> Any:
        arguments = saved.value, saved.tree, saved.leaves, True, saved.random
        output, inner = self._stage.forward(*arguments)
        if saved.loss is not None:
            self._stage.attach_loss(inner, output, saved.loss)
        else:
            self._stage.finish(inner, *flatten(output))
        return inner
