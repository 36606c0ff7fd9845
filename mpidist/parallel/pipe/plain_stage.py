"""Stages with an explicit backward: mpidist.nn, and objects with forward, backward, parameters."""

from __future__ import annotations

from collections.abc import Iterable
from functools import cache
from typing import Any

import numpy as np

from ...errors import InvalidArgument, Unsupported
from .keeper import Keeper
from .live import Held
from .structure import call, flatten, is_tensor, select, unflatten


@cache
def _kind(dtype: np.dtype) -> tuple[str, bool]:
    """Give the name, which numpy takes long to make, and whether gradients are asked for."""
    return dtype.name, dtype.kind in "fc" or dtype.name == "bfloat16"


class NumpyTensors:
    """Arrays of numpy (see :class:`~.parcel.Tensors`)."""

    def form(self, x: Any) -> tuple[str, tuple[int, ...], bool]:
        """Give the form; gradients are asked for floating and complex arrays."""
        name, wants = _kind(x.dtype)
        return name, x.shape, wants

    def array(self, x: Any) -> np.ndarray:
        """Give the elements; copied if they are not contiguous."""
        if not isinstance(x, (np.ndarray, np.generic)):
            raise Unsupported(
                f"a stage of numpy gave a {type(x).__module__}.{type(x).__name__}: between stages "
                "only arrays in host memory are sent"
            )
        return np.ascontiguousarray(x).reshape(-1)

    def empty(self, dtype: str, count: int) -> np.ndarray:
        """Make an array."""
        if dtype == "bfloat16":
            import ml_dtypes  # gives numpy this name

            return np.empty(count, ml_dtypes.bfloat16)
        return np.empty(count, dtype)

    def tensor(self, array: np.ndarray, form: tuple[str, tuple[int, ...], bool]) -> np.ndarray:
        """Give the array in its shape."""
        return array.reshape(form[1])


class PlainSaved(Held):
    """What one microbatch left in a module for its way back."""

    __slots__ = ("inputs", "tree", "kept", "grads", "nbytes")

    def __init__(self, inputs: Any, tree: Any, kept: Any):
        self.inputs, self.tree, self.kept = inputs, tree, kept
        self.nbytes = 0
        self.grads: Any = None


class PlainStage:
    """A chunk of the model with an explicit backward (see :class:`~.stage.Stage`)."""

    tensors = NumpyTensors()

    def __init__(self, module: Any, caller: Any, where: str):
        for method in ("forward", "backward", "parameters"):
            if not callable(getattr(module, method, None)):
                raise InvalidArgument(
                    f"{where} is of {type(module).__name__} and has no {method}(): allowed are "
                    "modules of PyTorch and mpidist.nn, and objects with forward(x), "
                    "backward(grad) and parameters()"
                )
        self.module, self._call = module, caller
        self._keeper = Keeper(module)
        self._sizes: dict[Any, int] = {}  # bytes kept, by what the inputs are made of
        self._halves = callable(getattr(module, "backward_input", None))
        self.splits = self._halves and bool(getattr(module, "splits", True))

    @property
    def learns(self) -> bool:
        """Whether a forward is to keep what backward needs."""
        return bool(getattr(self.module, "training", True))

    def random_state(self) -> None:
        """Give nothing: there is no generator that all layers share."""

    def forward(
        self, value: Any, tree: Any, leaves: list[Any], keep: bool, random: Any = None
    ) -> tuple[Any, PlainSaved | None]:
        """Call the module and take out of it what it keeps."""
        self._keeper.watch()
        output = call(self._call, value)
        kept = self._keeper.take()
        if not keep:
            return output, None
        saved = PlainSaved(leaves, tree, kept)
        shapes = tuple([tuple(t.shape) for t in leaves or flatten(value)[1]])
        if (tree, shapes) not in self._sizes:
            self._sizes[tree, shapes] = self._measure(saved)
        saved.nbytes = self._sizes[tree, shapes]
        return output, saved

    def finish(self, saved: PlainSaved, tree: Any, outputs: list[Any]) -> None:
        """Note what the outputs are made of: gradients will be made alike."""
        saved.grads = tree

    def attach_loss(self, saved: PlainSaved, output: Any, loss: Any) -> float:
        """Compute the loss and the gradient of the output."""
        value, grad = loss.explicit(output)
        saved.grads = (grad,)
        return value

    def backward(self, saved: PlainSaved, grads: list[Any] | None) -> list[Any]:
        """Go back through the forward: both halves."""
        self._keeper.put(saved.kept)
        found = self.module.backward(self._gradient(saved, grads))
        self._keeper.take()
        return self._of_inputs(saved, found)

    def backward_input(self, saved: PlainSaved, grads: list[Any] | None) -> list[Any]:
        """Do the half that gives the gradients of the inputs, or all that cannot be split."""
        if not self._halves:
            return self.backward(saved, grads)
        self._keeper.put(saved.kept)
        found = self.module.backward_input(self._gradient(saved, grads))
        saved.kept = self._keeper.take()
        return self._of_inputs(saved, found)

    def backward_weight(self, saved: PlainSaved) -> None:
        """Do the other half."""
        if self._halves:
            self._keeper.put(saved.kept)
            self.module.backward_weight()
            self._keeper.take()

    def nbytes(self, saved: PlainSaved) -> int:
        """Give the bytes."""
        return saved.nbytes

    def _measure(self, saved: PlainSaved) -> int:
        """Count the bytes that a microbatch keeps alive, parameters not among them."""
        own = {id(_owner(p.data)) for p in self.module.parameters()}
        found = {id(a): a.nbytes for a in map(_owner, _arrays([saved.inputs, saved.kept]))}
        return sum(count for key, count in found.items() if key not in own)

    def _gradient(self, saved: PlainSaved, grads: list[Any] | None) -> Any:
        made, saved.grads = saved.grads, None
        return made[0] if grads is None else unflatten(made, grads, plain=False)

    def _of_inputs(self, saved: PlainSaved, found: Any) -> list[Any]:
        """Give one gradient, or None, for each input."""
        if saved.tree is None:
            return []
        name = type(self.module).__name__
        try:
            grads = select(saved.tree, found)
        except (InvalidArgument, KeyError) as error:
            raise InvalidArgument(
                f"backward of {name} gave something not made like its input: {error}"
            ) from None
        for grad, x in zip(grads, saved.inputs):
            if grad is not None and tuple(grad.shape) != tuple(x.shape):
                raise InvalidArgument(
                    f"backward of {name} gave a gradient of shape {tuple(grad.shape)} for an "
                    f"input of {tuple(x.shape)}"
                )
        return [g if self.tensors.form(x)[2] else None for g, x in zip(grads, saved.inputs)]


def _arrays(value: Any) -> Iterable[Any]:
    """List the arrays in nested containers."""
    if is_tensor(value):
        yield value
    elif isinstance(value, dict):
        yield from _arrays(list(value.values()))
    elif isinstance(value, (list, tuple, set, frozenset)):
        for v in value:
            yield from _arrays(v)


def _owner(array: Any) -> Any:
    """Give the array that owns the memory."""
    while isinstance(getattr(array, "base", None), np.ndarray):
        array = array.base
    return array
