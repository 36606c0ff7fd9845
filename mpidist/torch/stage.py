"""Stages in PyTorch: autograd computes backward, in halves where that saves time."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import prod
from typing import Any

import numpy as np
import torch
from torch.func import functional_call
from torch.utils.checkpoint import checkpoint as checkpointed

from ..device import tensors
from ..errors import InvalidArgument, UnsupportedDtype
from ..pipeline.loss import MicrobatchLoss
from ..pipeline.stage import GPU_SUFFIX, DevicePlace, SavedActivations
from ..pipeline.state import random_states, restored
from ..pipeline.values import TensorForm, Tree, caller_of, unflatten
from . import framework
from .backward import Halves, can_halve, root_finder

_NAMES = {
    getattr(torch, name): name
    for name in (
        "float16", "bfloat16", "float32", "float64", "complex64", "complex128",
        "uint8", "uint16", "uint32", "uint64", "int8", "int16", "int32", "int64", "bool",
    )
    if hasattr(torch, name)  # not all of the unsigned ones before 2.3
}  # fmt: skip
_DTYPES = {name: dtype for dtype, name in _NAMES.items()}
Call = Callable[[Any], Any]
_EXPECTED = f"expected one of {', '.join(_DTYPES)}"


def separate(given: Sequence[Any]) -> list[Any]:
    """Return tensors on the memory of the given ones, but with version counters of their own.

    All views of a batch share one version counter: a microbatch that is changed in place would
    invalidate what autograd saved of the others.  Tensors that require a gradient are returned as
    they are, and so are all if some share memory.
    """
    simple = [x.layout == torch.strided and not x.is_inference() for x in given]
    if not all(simple) or len({x.untyped_storage().data_ptr() for x in given}) < len(given):
        return list(given)
    return [x if x.requires_grad else x.data for x in given]


def pass_on_changes(own: Sequence[Any], given: Sequence[Any]) -> None:
    """Increment the version counter of each `given` tensor that was changed in place through `own`.

    `own` has the tensors that :func:`separate` returned for `given`, on the same memory.
    """
    for x, y in zip(given, own):
        if x is not y and y._version:
            torch.autograd.graph.increment_version(x)


class TorchTensors(DevicePlace):
    """Conversion of PyTorch's tensors to and from messages; see :class:`~.values.Tensors`."""

    def form(self, x: Any) -> TensorForm:
        """Return what the receiver of a tensor needs: name of the dtype, shape, ``requires_grad``.

        The name ends with "@gpu" if the tensor is on a GPU.
        """
        name = _NAMES.get(x.dtype)
        if name is None:
            raise UnsupportedDtype(f"a tensor of {x.dtype} between stages: {_EXPECTED}")
        if framework.is_on_gpu(x):
            name += GPU_SUFFIX
        return name, tuple(x.shape), x.requires_grad

    def array(self, x: Any) -> np.ndarray:
        """Return the elements as a flat array; a copy if they are not contiguous."""
        x = _plain(x).detach().resolve_conj().resolve_neg().contiguous().view(-1)
        if framework.is_on_gpu(x):
            return self.tensor_messages.outgoing(x)
        return tensors.words(x)

    def own(self, x: Any) -> np.ndarray:
        """Return the elements as a flat array on memory of its own, never a view of `x`."""
        x = _plain(x)
        flat = x.detach().resolve_conj().resolve_neg().contiguous().view(-1)
        # array() then copies it to the host, which is copy enough.
        copied = framework.is_on_gpu(x) and not self.tensor_messages.direct  # to the host
        return self.array(flat.clone() if flat.data_ptr() == x.data_ptr() and not copied else flat)

    def result(self, x: Any) -> Any:
        """Return `x` itself: a pipeline in PyTorch gives its outputs as tensors."""
        return x

    def empty(self, dtype: str, count: int) -> np.ndarray:
        """Return an uninitialised flat array to receive into; two-byte integers for bfloat16."""
        name, on_gpu = self.place(dtype)
        if name not in _DTYPES:
            raise UnsupportedDtype(f"an array of {name} for a stage of PyTorch: {_EXPECTED}")
        known = np.dtype("int16" if name == "bfloat16" else name)
        if on_gpu:
            return self.tensor_messages.receive_memory(
                count * known.itemsize, lambda: self._make(name, count)
            )
        return np.empty(count, known)

    def tensor(self, array: np.ndarray, form: TensorForm) -> Any:
        """Return a tensor on a received array, with dtype, shape and requires_grad of `form`."""
        dtype, shape, wants = form
        name, on_gpu = self.place(dtype)
        if on_gpu:
            made = self.tensor_messages.incoming(array, lambda: self._make(name, prod(shape))).view(
                shape
            )
        else:
            made = tensors.as_tensor(array, _DTYPES[name]).view(shape)
        return made.requires_grad_() if wants else made

    def _make(self, name: str, count: int) -> Any:
        """Return an uninitialised flat GPU tensor of `count` elements of the named dtype."""
        return torch.empty(count, dtype=_DTYPES[name], device=framework.DEVICE)


def _plain(x: Any) -> Any:
    try:
        return tensors.plain(x)
    except InvalidArgument as error:
        raise InvalidArgument(f"a tensor between stages is {error}") from None


class TorchSaved(SavedActivations):
    """Saved activations in PyTorch: autograd's graph, held by the nodes where backward begins."""

    __slots__ = ("roots", "loss", "halves")

    def __init__(self, inputs: list[Any]):
        super().__init__(inputs)
        # For each output, or for the loss, as root_finder() maps it; None: it requires no gradient.
        self.roots: list[Any] = []
        self.loss: Any = None  # shape, dtype and device
        self.halves: Halves | None = None  # of which the first is done, and the second is not


class TorchStage:
    """A chunk of the model in PyTorch (see :class:`~mpidist.pipeline.stage.Stage`).

    `caller` is what is called in forward: the module, or the DDP that wraps it.  With `checkpoint`
    only a forward's input is kept, from which backward computes it again.
    """

    def __init__(self, module: Any, caller: Any, checkpoint: bool = False):
        self.module, self._call = module, caller_of(caller, module)
        self.tensors = TorchTensors(module.parameters())
        # Two halves would compute the forward of a checkpointed stage twice.
        self._checkpoint, self.splits = checkpoint, can_halve() and not checkpoint
        self._buffers: dict[str, Any] = {}
        self._root_of = root_finder()

    @property
    def training(self) -> bool:
        """Whether the module is in training mode."""
        return self.module.training

    @property
    def differentiates(self) -> bool:
        """Whether PyTorch currently records a graph."""
        return torch.is_grad_enabled()

    def forward(
        self,
        tree: Tree,
        tensors: list[Any],
        first: bool,
        keep: bool,
        loss: MicrobatchLoss | None = None,
    ) -> tuple[Any, TorchSaved | None]:
        """Return the module's output, or the loss; and the saved activations if `keep`, or None.

        `tree` and `tensors` are the input's structure and tensors; `first` is whether this is the
        first stage, whose input needs no gradient.
        """
        if not keep:
            with torch.no_grad():
                return self._call(unflatten(tree, tensors)), None
        if self._checkpoint:
            output = self._checkpointed(tree, tensors, first, loss)
        else:
            output = self._run(self._call, tree, tensors, first, loss)
        saved = TorchSaved([] if first else tensors)
        if loss is None:
            return output, saved
        saved.roots = [self._root_of(output)]
        saved.loss = output.shape, output.dtype, output.device
        return float(output.detach()), saved

    def _run(
        self, call: Call, tree: Tree, tensors: list[Any], first: bool, loss: MicrobatchLoss | None
    ) -> Any:
        """Return the output of `call`, or with `loss` the loss, a tensor.

        The arguments are those of :meth:`forward`, but `call` gets other tensors on the memory of
        `tensors`, which layers may change in place.
        """
        own = separate(tensors) if first else [_opened(x) for x in tensors]
        try:
            output = call(unflatten(tree, own))
        finally:
            if first:
                pass_on_changes(own, tensors)
        return output if loss is None else loss.tensor(output)

    # torch.utils.checkpoint runs a function in forward, and again in backward:
    #
    #            input       buffers            random numbers   loss
    #   forward  a copy      the module's own   drawn            computed, its graph not kept
    #   again    the input   as before forward  the same ones    computed again
    #
    # So a layer may change its input in place, and running statistics count a microbatch once.

    def _checkpointed(
        self, tree: Tree, tensors: list[Any], first: bool, loss: MicrobatchLoss | None
    ) -> Any:
        """Return the output, or the loss, of a forward of which autograd keeps only the input.

        The arguments are those of :meth:`forward`.  Backward computes that forward again.
        """
        buffers, states, runs = self._buffers_now(), random_states(self.module), 0

        def run(*_: Any) -> Any:
            nonlocal runs
            runs += 1
            if runs == 1:
                output = self._call(unflatten(tree, [x.clone() for x in tensors]))
                return output if loss is None else loss.tensor(output)
            with restored(states):
                return self._run(self._call_with(buffers), tree, tensors, first, loss)

        # Its arguments tell it on which devices random numbers are drawn.
        return checkpointed(run, *(separate(tensors) if first else tensors), use_reentrant=False)

    def _buffers_now(self) -> dict[str, Any]:
        """Return copies of the module's buffers as they are now, to repeat a forward with.

        An unchanged buffer's earlier copy is shared.
        """
        before, now = self._buffers, {}
        for name, buffer in self.module.named_buffers():
            known = before.get(name)
            same = known is not None and known.shape == buffer.shape and torch.equal(known, buffer)
            now[name] = known if same else buffer.detach().clone()
        self._buffers = now
        return now

    def _call_with(self, buffers: dict[str, Any]) -> Call:
        """Return a function that calls the module on copies of the given buffers."""
        if not buffers:
            return self._call
        copies = {name: values.clone() for name, values in buffers.items()}

        def forward(*inputs: Any, **options: Any) -> Any:
            return functional_call(self.module, copies, inputs, options)

        return caller_of(forward, self.module)

    def finish(self, saved: TorchSaved, tree: Tree, outputs: list[Any]) -> None:
        """Record in `saved` where backward begins for each output that requires a gradient."""
        saved.roots = [self._root_of(x) if x.requires_grad else None for x in outputs]

    def backward(self, saved: TorchSaved, grads: list[Any] | None) -> list[Any]:
        """Compute the gradients of inputs and parameters (action B); return those of the inputs.

        `grads` are the gradients of the outputs; None to begin at the loss.  The returned list has
        None for an input without a gradient, and is empty on the first stage.
        """
        roots, given = self._pairs(saved, grads)
        if roots:
            torch.autograd.backward(roots, given)
        return self._of_inputs(saved)

    def backward_input(self, saved: TorchSaved, grads: list[Any] | None) -> list[Any]:
        """Compute the gradients of the inputs (action I); arguments and result as in `backward`.

        A backward that cannot be split in halves computes those of the parameters at the same time.
        """
        if not self.splits:
            found = self.backward(saved, grads)
            saved.inputs = []
            return found
        roots, given = self._pairs(saved, grads)
        saved.halves = Halves(roots, given, [x for x in saved.inputs if x.requires_grad])
        self.splits = saved.halves.divisible
        saved.halves.inputs()
        found = self._of_inputs(saved)
        if not self.splits:
            saved.inputs, saved.halves = [], None
        return found

    def backward_weight(self, saved: TorchSaved) -> None:
        """Compute the gradients of the parameters (action W), the second half of backward.

        Do nothing if :meth:`backward_input` has computed them already.
        """
        if saved.halves is not None:
            saved.halves.weights()
            saved.halves = None

    def _pairs(self, saved: TorchSaved, grads: list[Any] | None) -> tuple[list[Any], list[Any]]:
        """Return the saved roots and their gradients, without the pairs where one is None.

        If `grads` is None, backward begins at the loss, with a gradient of ones.
        """
        roots, saved.roots = saved.roots, []
        if grads is None:
            shape, dtype, device = saved.loss
            grads = [torch.ones(shape, dtype=dtype, device=device)]
        pairs = [(r, g) for r, g in zip(roots, grads) if g is not None and r is not None]
        return [root for root, _ in pairs], [grad for _, grad in pairs]

    def _of_inputs(self, saved: TorchSaved) -> list[Any]:
        found = [x.grad for x in saved.inputs]
        for x in saved.inputs:
            x.grad = None
        return found


def _opened(x: Any) -> Any:
    """Return a view of `x` that is no leaf of the graph, so that layers may change it in place."""
    return torch.ops.aten._unsafe_view(x, x.shape) if x.requires_grad else x


def stage(module: Any, caller: Any, where: str, checkpoint: bool = False) -> TorchStage:
    """Return the :class:`TorchStage` of a module; raise InvalidArgument if it is not of PyTorch.

    `where`, rank and chunk, begins the error message.  For the rest see :class:`TorchStage`.
    """
    if not isinstance(module, torch.nn.Module):
        raise InvalidArgument(
            f"{where} has type {type(module).__name__}: expected a module of PyTorch or "
            "mpidist.nn, or an object with forward(x), backward(grad) and parameters()"
        )
    return TorchStage(module, caller, checkpoint)
