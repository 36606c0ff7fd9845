"""Stages with an explicit backward: mpidist.nn, and objects with forward, backward, parameters."""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import AbstractContextManager
from typing import Any

import numpy as np

from ...device.find import find_device
from ...device.recognise import is_on_device
from ...errors import InvalidArgument
from .keeper import Keeper
from .live import Held, Size, Sizes
from .numpy_tensors import NumpyTensors, has_gradient
from .random_states import drawn_again, random_states
from .structure import caller_of, flatten, is_tensor, select, unflatten


class PlainSaved(Held):
    """What one microbatch left in a module for its way back."""

    __slots__ = ("inputs", "tree", "kept", "outputs", "grad", "bytes", "done", "apart")

    def __init__(self, inputs: Any, tree: Any, kept: Any, size: Size):
        self.inputs, self.tree, self.kept, self.bytes = inputs, tree, kept, size
        self.done = 0  # how many halves of backward
        self.outputs: Any = None  # tree, shapes and dtypes: gradients will be made alike
        self.grad: Any = None  # of the output, where a loss was computed
        self.apart: list[Any] = []  # what is not counted: the user's batch


class PlainStage:
    """A chunk of the model with an explicit backward (see :class:`~.stage.Stage`)."""

    differentiates = None

    def __init__(self, module: Any, caller: Any, where: str):
        for method in ("forward", "backward", "parameters"):
            if not callable(getattr(module, method, None)):
                raise InvalidArgument(
                    f"{where} is of {type(module).__name__} and has no {method}(): allowed are "
                    "modules of PyTorch and mpidist.nn, and objects with forward(x), "
                    "backward(grad) and parameters()"
                )
        self.module = module
        self._call = caller_of(caller if callable(caller) else module.forward, module)
        self.tensors = NumpyTensors(module.parameters())
        self._keeper, self._sizes = Keeper(module), Sizes()
        self._halves = callable(getattr(module, "backward_input", None))
        self.splits = self._halves and bool(getattr(module, "splits", True))

    @property
    def training(self) -> bool:
        """Whether a forward is to keep what backward needs."""
        return bool(getattr(self.module, "training", True))

    def forward(
        self, value: Any, tree: Any, leaves: list[Any], keep: bool, ends: bool = False
    ) -> tuple[Any, PlainSaved | None]:
        """Call the module and take out of it what it keeps."""
        self._keeper.watch()
        output = self._call(value)
        kept = self._keeper.take()
        if not keep:
            return output, None
        given = leaves or flatten(value)[1]
        size = self._sizes.of((tree, tuple([(x.shape, x.itemsize) for x in given]), ends))
        saved = PlainSaved(leaves, tree, kept, size)
        if tree is None:
            saved.apart = given
        return output, saved

    def draft(self, value: Any) -> tuple[Any, Any]:
        """Compute the output only."""
        tree, given = flatten(value)
        moment = random_states(self.module)
        output, _ = self.forward(unflatten(tree, [_copy(x) for x in given]), None, [], False)
        return output, moment

    def again(self, moment: Any) -> AbstractContextManager[Any]:
        """Give a context with the random numbers of a draft."""
        return drawn_again(moment)

    def finish(self, saved: PlainSaved, tree: Any, outputs: list[Any]) -> None:
        """Note what the outputs are made of: gradients will be made alike."""
        saved.outputs = tree, [(x.shape, x.dtype, is_on_device(x)) for x in outputs]
        if not any(has_gradient(x.dtype) for x in outputs) and list(self.module.parameters()):
            found = ", ".join(str(x.dtype) for x in outputs) or "no array"
            raise InvalidArgument(
                f"{type(self.module).__name__} gave {found}, of which there is no gradient, and "
                "has parameters: allowed is at least one array of floating or complex numbers"
            )

    def attach_loss(self, saved: PlainSaved, output: Any, loss: Any) -> float:
        """Compute the loss and the gradient of the output."""
        value, saved.grad = loss.explicit(output)
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
            found = self.backward(saved, grads)
            saved.inputs, saved.kept, saved.done = [], [], 2
            return found
        self._keeper.put(saved.kept)
        found = self.module.backward_input(self._gradient(saved, grads))
        saved.kept, saved.done = self._keeper.take(), 1
        return self._of_inputs(saved, found)

    def backward_weight(self, saved: PlainSaved) -> None:
        """Do the other half."""
        if self._halves:
            self._keeper.put(saved.kept)
            self.module.backward_weight()
            self._keeper.take()

    def nbytes(self, saved: PlainSaved) -> int:
        """Give the bytes."""
        size = saved.bytes
        if saved.done == 0:
            if size.whole is None:
                size.whole = self._count(saved)
            return size.whole
        if saved.done == 1 and size.halfway is None:
            size.halfway = self._count(saved)
        return (size.halfway or 0) if saved.done == 1 else 0

    def _count(self, saved: PlainSaved) -> int:
        left = list(self._keeper.values(saved.kept))
        found = {id(a): a.nbytes for a in map(_owner, _arrays([saved.inputs, left, saved.grad]))}
        apart = [p.data for p in self.module.parameters()] + saved.apart
        for array in apart:
            found.pop(id(_owner(array)), None)
        return sum(found.values())

    def _gradient(self, saved: PlainSaved, grads: list[Any] | None) -> Any:
        """Give the gradient of the output: zeros where none came."""
        if grads is None:
            grad, saved.grad = saved.grad, None
            return grad
        tree, forms = saved.outputs
        made = [_zeros(*form) if g is None else g for g, form in zip(grads, forms)]
        return unflatten(tree, made, plain=False)

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
        return [
            _copy(g) if g is not None and has_gradient(x.dtype) else None
            for g, x in zip(grads, saved.inputs)
        ]


def _copy(x: Any) -> Any:
    """Give a copy where `x` is."""
    return x.copy() if is_on_device(x) else np.array(x)


def _zeros(shape: tuple[int, ...], dtype: np.dtype, there: bool) -> Any:
    """Give zeros, or None for what has no gradient."""
    if not has_gradient(dtype):
        return None
    if not there:
        return np.zeros(shape, dtype)
    made = find_device().empty(shape, dtype)
    made[...] = 0
    return made


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
