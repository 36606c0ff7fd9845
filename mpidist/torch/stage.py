"""Stages in PyTorch: autograd gives the way back, in halves where that saves time."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from ..errors import InvalidArgument
from ..parallel.pipe.live import Held
from ..parallel.pipe.structure import call, flatten
from .framework import as_array, as_tensor
from .halves import Halves, can_halve

_NAMES = {
    getattr(torch, name): name
    for name in (
        "float16", "bfloat16", "float32", "float64", "complex64", "complex128",
        "uint8", "int8", "int16", "int32", "int64", "bool",
    )
}  # fmt: skip
_DTYPES = {name: dtype for dtype, name in _NAMES.items()}


class TorchTensors:
    """Tensors of PyTorch (see :class:`~mpidist.parallel.pipe.parcel.Tensors`)."""

    def form(self, x: Any) -> tuple[str, tuple[int, ...], bool]:
        """Give the form."""
        dtype = x.dtype
        return _NAMES.get(dtype) or str(dtype), tuple(x.shape), x.requires_grad

    def array(self, x: Any) -> np.ndarray:
        """Give the elements; copied if they are not contiguous."""
        x = x.detach().resolve_conj().resolve_neg().contiguous().view(-1)
        return x.view(torch.int16).numpy() if x.dtype == torch.bfloat16 else as_array(x)

    def empty(self, dtype: str, count: int) -> np.ndarray:
        """Make an array; bfloat16 is kept in whole numbers of two bytes."""
        return np.empty(count, "int16" if dtype == "bfloat16" else dtype)

    def tensor(self, array: np.ndarray, form: tuple[str, tuple[int, ...], bool]) -> Any:
        """Give a tensor on this memory, whose gradient is asked for if the form says so."""
        dtype, shape, wants = form
        made = as_tensor(array, _DTYPES[dtype]).view(shape)
        return made.requires_grad_() if wants else made


class TorchSaved(Held):
    """What one microbatch needs for its way back."""

    __slots__ = ("inputs", "roots", "halves", "nbytes")

    def __init__(self, inputs: list[Any], nbytes: int):
        self.inputs, self.nbytes = inputs, nbytes
        self.roots: list[Any] = []
        self.halves: Any = None


class TorchStage:
    """A chunk of the model in PyTorch (see :class:`~mpidist.parallel.pipe.stage.Stage`)."""

    tensors = TorchTensors()

    def __init__(self, module: Any, caller: Any):
        self.module, self._call = module, caller
        self.splits = can_halve()
        self._sizes: dict[Any, int] = {}  # bytes kept, by what the inputs are made of

    @property
    def learns(self) -> bool:
        """Whether the module is in training, and gradients are computed here at all."""
        return self.module.training and torch.is_grad_enabled()

    def random_state(self) -> Any:
        """Give the state of the generator."""
        return torch.get_rng_state()

    def forward(
        self, value: Any, tree: Any, leaves: list[Any], keep: bool, random: Any = None
    ) -> tuple[Any, TorchSaved | None]:
        """Call the module."""
        if random is not None:
            with torch.random.fork_rng(devices=[]):
                torch.set_rng_state(random)
                return self.forward(value, tree, leaves, keep)
        if not keep:
            with torch.no_grad():
                return call(self._call, value), None
        shapes = tuple([tuple(t.shape) for t in leaves or flatten(value)[1]])
        key = tree, shapes, self.module.training
        if key not in self._sizes:
            output, self._sizes[key] = self._measured(value, leaves)
        else:
            output = call(self._call, value)
        return output, TorchSaved(leaves, self._sizes[key])

    def _measured(self, value: Any, leaves: list[Any]) -> tuple[Any, int]:
        """Call the module and count the bytes of what autograd saves, parameters left out."""
        memories = [leaf.untyped_storage() for leaf in leaves]
        found = {memory.data_ptr(): memory.nbytes() for memory in memories}
        own = {p.untyped_storage().data_ptr() for p in self.module.parameters()}

        def note(x: Any) -> Any:
            memory = x.untyped_storage()
            if memory.data_ptr() not in own:
                found[memory.data_ptr()] = memory.nbytes()
            return x

        with torch.autograd.graph.saved_tensors_hooks(note, lambda x: x):
            output = call(self._call, value)
        return output, sum(found.values())

    def finish(self, saved: TorchSaved, tree: Any, outputs: list[Any]) -> None:
        """Keep where gradients come in."""
        saved.roots = outputs

    def attach_loss(self, saved: TorchSaved, output: Any, loss: Any) -> float:
        """Compute the loss; backward begins at it."""
        root = loss.tensor(output)
        saved.roots = [root]
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
            return self.backward(saved, grads)
        roots, given = self._pairs(saved, grads)
        saved.halves = Halves(roots, given, [x for x in saved.inputs if x.requires_grad])
        saved.halves.inputs()
        return self._of_inputs(saved)

    def backward_weight(self, saved: TorchSaved) -> None:
        """Do the other half."""
        if saved.halves is not None:
            saved.halves.weights()
            saved.halves = None

    def nbytes(self, saved: TorchSaved) -> int:
        """Give the bytes."""
        return saved.nbytes

    def _pairs(self, saved: TorchSaved, grads: list[Any] | None) -> tuple[list[Any], list[Any]]:
        roots, saved.roots = saved.roots, []
        if grads is None:
            grads = [torch.ones_like(roots[0])]
        pairs = [(r, g) for r, g in zip(roots, grads) if g is not None and r.requires_grad]
        return [root for root, _ in pairs], [grad for _, grad in pairs]

    def _of_inputs(self, saved: TorchSaved) -> list[Any]:
        found = [x.grad for x in saved.inputs]
        for x in saved.inputs:
            x.grad = None
        return found


def stage(module: Any, caller: Any, where: str) -> TorchStage:
    """Give the stage of a module."""
    if not isinstance(module, torch.nn.Module):
        raise InvalidArgument(
            f"{where} is of {type(module).__name__}: allowed are modules of PyTorch and "
            "mpidist.nn, and objects with forward(x), backward(grad) and parameters()"
        )
    return TorchStage(module, caller)
