"""Stages in PyTorch: autograd gives the way back, in halves where that saves time."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager
from functools import partial
from math import prod
from typing import Any

import numpy as np
import torch

from ..errors import InvalidArgument, UnsupportedDtype
from ..pipeline.stage import MARK, Held, OnDevice, Size, Sizes
from ..pipeline.values import caller_of, flatten, unflatten
from . import framework
from .backward import Halves, can_halve, root_of
from .framework import as_array, as_tensor
from .memory import Look, Noted, nbytes_of
from .replay import Replay

_NAMES = {
    getattr(torch, name): name
    for name in (
        "float16", "bfloat16", "float32", "float64", "complex64", "complex128",
        "uint8", "uint16", "uint32", "uint64", "int8", "int16", "int32", "int64", "bool",
    )
    if hasattr(torch, name)  # not all of the unsigned ones before 2.3
}  # fmt: skip
_DTYPES = {name: dtype for dtype, name in _NAMES.items()}
_ALLOWED = f"allowed are {', '.join(_DTYPES)}"


def separate(given: Sequence[Any]) -> list[Any]:
    """Give a microbatch's tensors versions of their own, on the same memory.

    All parts of a batch count changes together: one that is changed in place would make what
    autograd saved of another void.  Those that have a graph, or share memory, stay as they are.
    """
    simple = [x.layout == torch.strided and not x.is_inference() for x in given]
    if not all(simple) or len({x.untyped_storage().data_ptr() for x in given}) < len(given):
        return list(given)
    return [x if x.requires_grad else x.data for x in given]


def pass_on_changes(own: Sequence[Any], given: Sequence[Any]) -> None:
    """Count the changes of what :func:`separate` gave where autograd would have counted them."""
    for x, y in zip(given, own):
        if x is not y and y._version:
            torch.autograd.graph.increment_version(x)


class TorchTensors(OnDevice):
    """Tensors of PyTorch (see :class:`~mpidist.pipeline.values.Tensors`)."""

    def form(self, x: Any) -> tuple[str, tuple[int, ...], bool]:
        """Give the form."""
        name = _NAMES.get(x.dtype)
        if name is None:
            raise UnsupportedDtype(f"a tensor of {x.dtype} between stages: {_ALLOWED}")
        name += MARK * framework.is_there(x)
        return name, tuple(x.shape), x.requires_grad

    def array(self, x: Any) -> np.ndarray:
        """Give the elements; copied if they are not contiguous."""
        x = x.detach().resolve_conj().resolve_neg().contiguous().view(-1)
        if framework.is_there(x):
            return self.parcels.leave(x)
        return x.view(torch.int16).numpy() if x.dtype == torch.bfloat16 else as_array(x)

    def own(self, x: Any) -> np.ndarray:
        """Give the elements in memory of their own."""
        flat = x.detach().resolve_conj().resolve_neg().contiguous().view(-1)
        staged = framework.is_there(x) and not self.parcels.direct  # which is a copy
        return self.array(flat.clone() if flat.data_ptr() == x.data_ptr() and not staged else flat)

    def result(self, x: Any) -> Any:
        """Give the tensor itself, as PyTorch does."""
        return x

    def empty(self, dtype: str, count: int) -> np.ndarray:
        """Make an array; bfloat16 is kept in whole numbers of two bytes."""
        name, there = self.place(dtype)
        if name not in _DTYPES:
            raise UnsupportedDtype(f"an array of {name} for a stage of PyTorch: {_ALLOWED}")
        known = np.dtype("int16" if name == "bfloat16" else name)
        if there:
            return self.parcels.room(count * known.itemsize, lambda: self._make(name, count))
        return np.empty(count, known)

    def tensor(self, array: np.ndarray, form: tuple[str, tuple[int, ...], bool]) -> Any:
        """Give a tensor on this memory, whose gradient is asked for if the form says so."""
        dtype, shape, wants = form
        name, there = self.place(dtype)
        if there:
            made = self.parcels.arrive(array, lambda: self._make(name, prod(shape))).view(shape)
        else:
            made = as_tensor(array, _DTYPES[name]).view(shape)
        return made.requires_grad_() if wants else made

    def _make(self, name: str, count: int) -> Any:
        """Make a flat tensor on the GPU."""
        return torch.empty(count, dtype=_DTYPES[name], device=framework.DEVICE)


class TorchSaved(Held):
    """What one microbatch needs for its way back."""

    __slots__ = ("inputs", "roots", "begin", "halves", "bytes", "noted", "apart", "done")

    def __init__(self, inputs: list[Any], size: Size):
        self.inputs, self.bytes = inputs, size
        self.noted = Noted() if size.whole is None else None
        self.done = 0  # how many halves of backward
        self.roots: list[Any] = []
        self.begin: Any = None  # shape, dtype and device of the loss
        self.halves: Halves | None = None
        self.apart: list[Any] = []  # what is not counted: the user's batch


class TorchStage:
    """A chunk of the model in PyTorch (see :class:`~mpidist.pipeline.stage.Stage`)."""

    def __init__(self, module: Any, caller: Any):
        self.module, self._call = module, caller_of(caller, module)
        self.tensors = TorchTensors(module.parameters())
        self.splits = can_halve()
        self._sizes, self._replay, self._look = Sizes(), Replay(module), Look(module)

    @property
    def training(self) -> bool:
        """Whether the module is in training."""
        return self.module.training

    @property
    def differentiates(self) -> bool:
        """Whether a graph is made of what is computed now."""
        return torch.is_grad_enabled()

    def forward(
        self, value: Any, tree: Any, leaves: list[Any], keep: bool, ends: bool = False
    ) -> tuple[Any, TorchSaved | None]:
        """Call the module."""
        if not keep:
            with torch.no_grad():
                return self._call(value), None
        given = flatten(value)[1] if tree is None else leaves
        key = tree, tuple([(x.shape, x.dtype) for x in given]), self.module.training, ends
        saved = TorchSaved(leaves, self._sizes.of(key))
        first = tree is None
        if first:
            saved.apart, tree = given, flatten(value)[0]
        run = partial(self._run, given, tree, first)
        return self._look.at(run, saved.noted, given), saved

    def _run(self, given: list[Any], tree: Any, first: bool) -> Any:
        """Call the module with what it may change in place."""
        own = separate(given) if first else [_opened(x) for x in given]
        output = self._call(unflatten(tree, own))
        if first:
            pass_on_changes(own, given)
        return output

    def draft(self, value: Any) -> tuple[Any, Any]:
        """Compute the output only."""
        tree, given = flatten(value)
        moment = self._replay.before()
        copy = unflatten(tree, [x.detach().clone() for x in given])
        output, _ = self.forward(copy, None, [], False)
        return output, self._replay.after(moment)

    def again(self, moment: Any) -> AbstractContextManager[Any]:
        """Give the context of a second forward."""
        return self._replay.again(moment)

    def finish(self, saved: TorchSaved, tree: Any, outputs: list[Any]) -> None:
        """Keep where gradients come in."""
        saved.roots = [root_of(x) if x.requires_grad else None for x in outputs]

    def attach_loss(self, saved: TorchSaved, output: Any, loss: Any) -> float:
        """Compute the loss; backward begins at it."""
        root = self._look.at(partial(loss.tensor, output), saved.noted)
        if saved.noted is not None:
            saved.apart = saved.apart + loss.given()
        saved.roots = [root_of(root)]
        saved.begin = root.shape, root.dtype, root.device
        return float(root.detach())

    def backward(self, saved: TorchSaved, grads: list[Any] | None) -> list[Any]:
        """Have autograd go back."""
        roots, given = self._pairs(saved, grads)
        if roots:
            torch.autograd.backward(roots, given)
        return self._of_inputs(saved)

    def backward_input(self, saved: TorchSaved, grads: list[Any] | None) -> list[Any]:
        """Do the half that gives the inputs' gradients."""
        if not self.splits:
            found = self.backward(saved, grads)
            saved.inputs, saved.done = [], 2
            return found
        roots, given = self._pairs(saved, grads)
        saved.halves = Halves(roots, given, [x for x in saved.inputs if x.requires_grad])
        self.splits = saved.halves.divisible
        saved.halves.inputs()
        saved.done, found = 1, self._of_inputs(saved)
        if not self.splits:
            saved.inputs, saved.halves, saved.done = [], None, 2
        return found

    def backward_weight(self, saved: TorchSaved) -> None:
        """Do the other half."""
        if saved.halves is not None:
            saved.halves.weights()
            saved.halves = None

    def nbytes(self, saved: TorchSaved) -> int:
        """Give the bytes."""
        size = saved.bytes
        if size.whole is None:
            size.whole = self._count(saved)
        if saved.done == 0:
            return size.whole
        if size.halfway is None and saved.halves is not None:
            size.halfway = size.whole + nbytes_of(saved.halves.arrived())
        return (size.halfway or 0) if saved.done == 1 else 0

    def _count(self, saved: TorchSaved) -> int:
        assert saved.noted is not None
        roots = [x for x in saved.roots if isinstance(x, torch.Tensor)]
        apart = [*self.module.parameters(), *self.module.buffers(), *saved.apart]
        return saved.noted.nbytes([*saved.inputs, *roots], apart)

    def _pairs(self, saved: TorchSaved, grads: list[Any] | None) -> tuple[list[Any], list[Any]]:
        roots, saved.roots = saved.roots, []
        if grads is None:
            shape, dtype, device = saved.begin
            grads = [torch.ones(shape, dtype=dtype, device=device)]
        pairs = [(r, g) for r, g in zip(roots, grads) if g is not None and r is not None]
        return [root for root, _ in pairs], [grad for _, grad in pairs]

    def _of_inputs(self, saved: TorchSaved) -> list[Any]:
        found = [x.grad for x in saved.inputs]
        for x in saved.inputs:
            x.grad = None
        return found


def _opened(x: Any) -> Any:
    """Give a leaf in the form of what an operation gave: a layer may change it in place."""
    return torch.ops.aten._unsafe_view(x, x.shape) if x.requires_grad else x


def stage(module: Any, caller: Any, where: str) -> TorchStage:
    """Give the stage of a module."""
    if not isinstance(module, torch.nn.Module):
        raise InvalidArgument(
            f"{where} is of {type(module).__name__}: allowed are modules of PyTorch and "
            "mpidist.nn, and objects with forward(x), backward(grad) and parameters()"
        )
    return TorchStage(module, caller)
