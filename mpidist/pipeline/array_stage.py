"""Stages of numpy and cupy layers: their tensors, and the activations that layers save."""

from __future__ import annotations

from functools import cache
from math import prod
from typing import Any

import numpy as np

from ..device.find import find_device
from ..device.recognise import is_on_device, plain
from ..errors import InvalidArgument, Unsupported, UnsupportedDtype
from ..frameworks.base import find_dtype
from ..nn import Module
from .loss import MicrobatchLoss
from .stage import GPU_SUFFIX, DevicePlace, SavedActivations
from .state import States, random_states, restored
from .values import TensorForm, Tree, caller_of, select, unflatten

KINDS = "biufcmM"
"""The kinds of numpy's dtypes whose elements are plain bytes."""


_dtype = cache(find_dtype)


@cache
def _kind(dtype: np.dtype) -> tuple[str, bool]:
    """Return a dtype's name, and whether its arrays have gradients (cached: numpy is slow)."""
    name = dtype.name
    if dtype.type.__module__ == "ml_dtypes":
        return name, "float" in name
    if dtype.kind not in KINDS:
        raise UnsupportedDtype(
            f"an array of dtype {dtype} between stages: expected whole, floating, complex or "
            "boolean numbers, dates, or a dtype of ml_dtypes"
        )
    return name, dtype.kind in "fc"


def has_gradient(dtype: np.dtype) -> bool:
    """Return whether arrays of a dtype have gradients: floating and complex ones do."""
    return _kind(dtype)[1]


def _on_gpu(x: Any) -> bool:
    return type(x) is not np.ndarray and is_on_device(x)


class ArrayTensors(DevicePlace):
    """Conversion of numpy and cupy arrays to and from messages; see :class:`~.values.Tensors`.

    Arrays are received in the machine's byte order.
    """

    def form(self, x: Any) -> TensorForm:
        """Return dtype name (marked if on a GPU), shape, and whether the dtype has gradients."""
        name, wants = _kind(x.dtype)
        on_gpu = type(x) is not np.ndarray and is_on_device(x)
        return name + GPU_SUFFIX if on_gpu else name, x.shape, wants

    def array(self, x: Any) -> np.ndarray:
        """Return the elements as a flat array; a copy if they are not contiguous."""
        if _on_gpu(x):
            return self.tensor_messages.outgoing(_contiguous(x))
        x = _in_host_memory(x)
        return np.ascontiguousarray(x, _native(x.dtype)).reshape(-1)

    def own(self, x: Any) -> np.ndarray:
        """Return a flat copy to send: a layer may write every output into the same memory."""
        if type(x) is not np.ndarray:
            if is_on_device(x):
                return self.tensor_messages.outgoing(
                    x.copy() if self.tensor_messages.direct else _contiguous(x)
                )
            x = _in_host_memory(x)
        return np.array(x, _native(x.dtype), order="C").reshape(-1)

    def result(self, x: Any) -> Any:
        """Return a copy for the user: a layer may write every output into the same memory."""
        return x.copy() if hasattr(x, "copy") else x

    def empty(self, dtype: str, count: int) -> np.ndarray:
        """Return an uninitialised flat array of `count` elements, to receive into."""
        name, on_gpu = self.place(dtype)
        known = _dtype(name)
        if on_gpu:
            return self.tensor_messages.receive_memory(
                count * known.itemsize, lambda: find_device().empty((count,), known)
            )
        return np.empty(count, known)

    def tensor(self, array: np.ndarray, form: TensorForm) -> Any:
        """Return a received flat array in the shape of `form`, on the GPU if the stage is there."""
        name, on_gpu = self.place(form[0])
        if not on_gpu:
            return array.reshape(form[1])
        count, known = prod(form[1]), _dtype(name)
        found = self.tensor_messages.incoming(array, lambda: find_device().empty((count,), known))
        return found.reshape(form[1])


def _contiguous(x: Any) -> Any:
    """Return an array on a GPU as it is if it is contiguous, else a contiguous copy."""
    return x if x.flags.c_contiguous else x.copy(order="C")


def _native(dtype: np.dtype) -> np.dtype:
    return dtype if dtype.isnative else dtype.newbyteorder("=")


def _in_host_memory(x: Any) -> Any:
    """Return a stage's output as a plain array of numpy, or raise if it is none."""
    if not isinstance(x, (np.ndarray, np.generic)):
        raise Unsupported(
            f"a numpy stage returned a {type(x).__module__}.{type(x).__name__}: expected arrays "
            "of numpy, or arrays on a GPU"
        )
    try:
        return plain(x)
    except InvalidArgument as error:
        raise InvalidArgument(f"an array between stages is {error}") from None


Saved = list[tuple[dict[str, Any], tuple[str, ...]]]
"""For each layer that saves activations: its attributes, and the names that it declares."""


def _declared(module: Any, where: str) -> Saved:
    """List (attributes, names) of each layer that saves activations; errors begin with `where`.

    The attributes are the layer's ``__dict__``, the names those of them that its `saved` declares.
    """
    parts = module.modules() if callable(getattr(module, "modules", None)) else [module]
    found: Saved = []
    for part in parts:
        names = getattr(part, "saved", None)
        if names is None and getattr(type(part), "forward", None) is Module.forward:
            continue  # a container, which is never called
        if not isinstance(names, (tuple, list)):
            kind = type(part).__name__
            raise InvalidArgument(
                f"{where}: {kind}.saved is {names!r}: expected the names of the attributes in "
                "which forward and backward_input save activations for backward, such as "
                f'saved = ("_input",) in the class {kind}, or saved = () for none'
            )
        if names and not hasattr(part, "__dict__"):
            raise InvalidArgument(
                f"{where}: {type(part).__name__} declares saved={names!r} and has no __dict__: "
                "expected attributes that can be kept for each microbatch"
            )
        if names:
            found.append((vars(part), tuple(names)))
    return found


class ArraySaved(SavedActivations):
    """Saved activations of layers with an explicit backward."""

    __slots__ = ("tree", "layers", "again", "output_tree", "outputs", "grad")

    def __init__(self, inputs: list[Any], tree: Tree, layers: list[list[Any]] | None):
        super().__init__(inputs)
        self.tree = tree  # of the input; None on the first stage, which computes no gradient of it
        # For each layer, the values of the attributes that its `saved` names; None if forward is
        # to be computed again, from `again`: the input and the states of random generators.
        self.layers = layers
        self.again: tuple[Tree, list[Any], States] | None = None
        self.output_tree: Tree = None
        # Shape, dtype, and whether on a GPU, of each output: its gradient has the same.
        self.outputs: list[tuple[tuple[int, ...], np.dtype, bool]] = []
        self.grad: Any = None  # of the output, where a loss was computed


class ArrayStage:
    """Stage with an explicit backward, not autograd; for the parameters see :func:`stage_of`.

    `caller` is what forward calls, such as a DDP around the chunk; the chunk's forward if it is not
    callable.
    """

    differentiates = None

    def __init__(self, module: Any, caller: Any, where: str, checkpoint: bool = False):
        for method in ("forward", "backward", "parameters"):
            if not callable(getattr(module, method, None)):
                raise InvalidArgument(
                    f"{where} has type {type(module).__name__}, which has no {method}(): expected "
                    "a module of PyTorch or mpidist.nn, or an object with forward(x), "
                    "backward(grad) and parameters()"
                )
        self.module, self._checkpoint = module, checkpoint
        self._call = caller_of(caller if callable(caller) else module.forward, module)
        self.tensors = ArrayTensors(module.parameters())
        self._declared = _declared(module, where)
        self._halves = callable(getattr(module, "backward_input", None))
        self.splits = self._halves and bool(getattr(module, "splits", True))

    @property
    def training(self) -> bool:
        """Whether the module is in training mode; True if it has no attribute `training`."""
        return bool(getattr(self.module, "training", True))

    # A layer has room for the activations of one microbatch, but F of the next comes before B of
    # the first.  Layers keep references, so nothing is copied: the values of one microbatch are
    # taken out of the layers after forward, and put back before its backward.

    def _take(self) -> list[list[Any]]:
        found = []
        for attributes, names in self._declared:
            found.append([attributes.get(name) for name in names])
            for name in names:
                attributes[name] = None
        return found

    def _put(self, saved: ArraySaved) -> None:
        if saved.layers is not None:
            for (attributes, names), values in zip(self._declared, saved.layers):
                attributes.update(zip(names, values))
        elif saved.again is not None:
            tree, tensors, states = saved.again
            with restored(states):
                self._call(unflatten(tree, tensors))

    def forward(
        self,
        tree: Tree,
        tensors: list[Any],
        first: bool,
        keep: bool,
        loss: MicrobatchLoss | None = None,
    ) -> tuple[Any, ArraySaved | None]:
        """Return the module's output, or the loss, and with `keep` the saved activations.

        The activations are moved out of the layers' attributes.  For the parameters see
        :meth:`~.stage.Stage.forward`.
        """
        again = keep and self._checkpoint
        states = random_states(self.module) if again else []
        # Layers may work in place, and the second forward needs the input as it was.
        given = [_copy(x) for x in tensors] if again else tensors
        output = self._call(unflatten(tree, given))
        layers = self._take()
        if not keep:
            return output, None
        saved = ArraySaved([] if first else tensors, None if first else tree, layers)
        if again:
            saved.layers, saved.again = None, (tree, tensors, states)
        if loss is None:
            return output, saved
        value, saved.grad = loss.loss_and_gradient(output)
        return value, saved

    def finish(self, saved: ArraySaved, tree: Tree, outputs: list[Any]) -> None:
        """Record structure, shapes and dtypes of the output: its gradient has the same.

        InvalidArgument if the module has parameters, but no output has a dtype with gradients.
        """
        saved.output_tree = tree
        saved.outputs = [(x.shape, x.dtype, _on_gpu(x)) for x in outputs]
        if not any(has_gradient(x.dtype) for x in outputs) and list(self.module.parameters()):
            found = ", ".join(str(x.dtype) for x in outputs) or "no array"
            raise InvalidArgument(
                f"{type(self.module).__name__} has parameters, but returned {found}: expected at "
                "least one array of floating or complex numbers, for their gradients"
            )

    def backward(self, saved: ArraySaved, grads: list[Any] | None) -> list[Any]:
        """Compute the gradients of inputs and parameters (action B); return those of the inputs."""
        self._put(saved)
        found = self.module.backward(self._gradient(saved, grads))
        self._take()
        return self._of_inputs(saved, found)

    def backward_input(self, saved: ArraySaved, grads: list[Any] | None) -> list[Any]:
        """Compute and return the gradients of the inputs (action I).

        A module without ``backward_input`` computes those of the parameters at the same time.
        """
        if not self._halves:
            found = self.backward(saved, grads)
            saved.inputs, saved.layers, saved.again = [], [], None
            return found
        self._put(saved)
        found = self.module.backward_input(self._gradient(saved, grads))
        saved.layers, saved.again = self._take(), None
        return self._of_inputs(saved, found)

    def backward_weight(self, saved: ArraySaved) -> None:
        """Compute the gradients of the parameters (action W), from what `backward_input` kept.

        Nothing is left to do for a module without ``backward_input``.
        """
        if self._halves:
            self._put(saved)
            self.module.backward_weight()
            self._take()

    def _gradient(self, saved: ArraySaved, grads: list[Any] | None) -> Any:
        """Return the gradient of the output: that of the loss if `grads` is None, else `grads`.

        Zeros take the place of gradients that are None.
        """
        if grads is None:
            grad, saved.grad = saved.grad, None
            return grad
        whole = [_zeros(*form) if g is None else g for g, form in zip(grads, saved.outputs)]
        return unflatten(saved.output_tree, whole, plain=False)

    def _of_inputs(self, saved: ArraySaved, found: Any) -> list[Any]:
        """Return a copy of the gradient, or None, for each input tensor.

        `found` is what the module's backward returned; InvalidArgument if it does not fit.
        """
        if saved.tree is None:
            return []
        name = type(self.module).__name__
        try:
            grads = select(saved.tree, found)
        except (InvalidArgument, KeyError) as error:
            raise InvalidArgument(
                f"backward of {name} returned another structure than its input has: {error}"
            ) from None
        for grad, x in zip(grads, saved.inputs):
            if grad is not None and tuple(grad.shape) != tuple(x.shape):
                raise InvalidArgument(
                    f"backward of {name} returned a gradient of shape {tuple(grad.shape)} for an "
                    f"input of {tuple(x.shape)}"
                )
        # A copy: a layer may write its next gradient into the same memory before this one is sent.
        return [
            _copy(g) if g is not None and has_gradient(x.dtype) else None
            for g, x in zip(grads, saved.inputs)
        ]


def _copy(x: Any) -> Any:
    """Return a copy on the same device."""
    return x.copy() if _on_gpu(x) else np.array(x)


def _zeros(shape: tuple[int, ...], dtype: np.dtype, on_gpu: bool) -> Any:
    """Return an array of zeros, on the host or the GPU; None for a dtype without gradients."""
    if not has_gradient(dtype):
        return None
    if not on_gpu:
        return np.zeros(shape, dtype)
    made = find_device().empty(shape, dtype)
    made[...] = 0
    return made


stage = ArrayStage
