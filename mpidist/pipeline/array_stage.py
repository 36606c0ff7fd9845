"""Stages of numpy and cupy layers: their tensors, and what a layer keeps for its backward."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager
from functools import cache
from math import prod
from typing import Any

import numpy as np

from ..device.find import find_device
from ..device.recognise import is_on_device
from ..errors import InvalidArgument, Unsupported, UnsupportedDtype
from ..frameworks.base import find_dtype
from .stage import MARK, Held, OnDevice, Size, Sizes
from .state import drawn_again, random_states
from .values import caller_of, flatten, is_tensor, select, unflatten

KINDS = "biufcmM"
"""Those of numpy's dtypes whose elements are nothing but their bytes."""


@cache
def _kind(dtype: np.dtype) -> tuple[str, bool]:
    """Give the name, which numpy takes long to make, and whether gradients are asked for."""
    name = dtype.name
    if dtype.type.__module__ == "ml_dtypes":
        return name, "float" in name
    if dtype.kind not in KINDS:
        raise UnsupportedDtype(
            f"an array of dtype {dtype} between stages: allowed are whole, floating, complex and "
            "boolean numbers, dates, and the dtypes of ml_dtypes"
        )
    return name, dtype.kind in "fc"


def has_gradient(dtype: np.dtype) -> bool:
    """Tell whether gradients are asked for arrays of a dtype."""
    return _kind(dtype)[1]


class NumpyTensors(OnDevice):
    """Arrays of numpy or cupy (see :class:`~.parcel.Tensors`).

    They arrive in the machine's byte order.
    """

    def form(self, x: Any) -> tuple[str, tuple[int, ...], bool]:
        """Give the form; gradients are asked for floating and complex arrays."""
        name, wants = _kind(x.dtype)
        return name if type(x) is np.ndarray else name + MARK * is_on_device(x), x.shape, wants

    def array(self, x: Any) -> np.ndarray:
        """Give the elements; copied if they are not contiguous."""
        if is_on_device(x):
            return self.parcels.leave(_contiguous(x))
        x = _in_host_memory(x)
        return np.ascontiguousarray(x, _native(x.dtype)).reshape(-1)

    def own(self, x: Any) -> np.ndarray:
        """Give a copy: a layer may write each output into the same memory."""
        if not isinstance(x, np.ndarray):
            if is_on_device(x):
                return self.parcels.leave(x.copy() if self.parcels.direct else _contiguous(x))
            x = _in_host_memory(x)
        return np.array(x, _native(x.dtype), order="C").reshape(-1)

    def result(self, x: Any) -> Any:
        """Give a copy for the same reason."""
        return x.copy() if hasattr(x, "copy") else x

    def empty(self, dtype: str, count: int) -> np.ndarray:
        """Make an array."""
        name, there = self.place(dtype)
        known = find_dtype(name)
        if there:
            return self.parcels.room(
                count * known.itemsize, lambda: find_device().empty((count,), known)
            )
        return np.empty(count, known)

    def tensor(self, array: np.ndarray, form: tuple[str, tuple[int, ...], bool]) -> Any:
        """Give the array in its shape."""
        name, there = self.place(form[0])
        if not there:
            return array.reshape(form[1])
        count, known = prod(form[1]), find_dtype(name)
        found = self.parcels.arrive(array, lambda: find_device().empty((count,), known))
        return found.reshape(form[1])


def _contiguous(x: Any) -> Any:
    """Give an array on a GPU in one piece."""
    return x if x.flags.c_contiguous else x.copy(order="C")


def _native(dtype: np.dtype) -> np.dtype:
    return dtype if dtype.isnative else dtype.newbyteorder("=")


def _in_host_memory(x: Any) -> Any:
    if not isinstance(x, (np.ndarray, np.generic)):
        raise Unsupported(
            f"a stage of numpy gave a {type(x).__module__}.{type(x).__name__}: between stages "
            "arrays of numpy are sent, and arrays on a GPU"
        )
    return x


_MISSING: Any = object()

Kept = list[tuple[dict[str, Any], dict[str, Any]]]
"""For each module: its attributes, and the values that belong to one microbatch."""


class Keeper:
    """Takes out of a module what a forward has left in it, and puts it back for backward.

    Modules keep references there, so nothing is copied.  Those that declare ``saved`` are left with
    None; of others every attribute that any forward was seen to assign is put back, and values
    stay until the next forward replaces them.

    Parameters
    ----------
    module : object
        With the modules inside, if it has ``modules()``.
    """

    def __init__(self, module: Any):
        parts = module.modules() if callable(getattr(module, "modules", None)) else [module]
        self._declared: list[tuple[dict[str, Any], tuple[str, ...]]] = []
        self._watched: list[tuple[dict[str, Any], set[str]]] = []
        for part in parts:
            try:
                attributes = vars(part)
            except TypeError:
                raise Unsupported(
                    f"{type(part).__name__} has no __dict__: what it keeps for backward cannot be "
                    "kept for each microbatch"
                ) from None
            names = getattr(part, "saved", None)
            if names is None:
                self._watched.append((attributes, set()))
            elif names:
                self._declared.append((attributes, tuple(names)))
        self._before: list[dict[str, Any]] = []
        self._inside: Kept = []

    def watch(self) -> None:
        """Before a forward: note what is there."""
        self._before = [dict(attributes) for attributes, _ in self._watched]

    def take(self) -> Kept:
        """After a forward, or a half of backward: give what belongs to the microbatch."""
        kept: Kept = []
        for attributes, names in self._declared:
            kept.append((attributes, {name: attributes.get(name) for name in names}))
            for name in names:
                attributes[name] = None
        if self._watched:
            self._take_watched(kept)
        return kept

    def _take_watched(self, kept: Kept) -> None:
        for (attributes, assigned), before in zip(self._watched, self._before):
            for name, value in attributes.items():
                if before.get(name, _MISSING) is not value:
                    assigned.add(name)
        self._before = []
        if self._inside:  # after a backward: what it assigned stays, the rest is as it was
            kept += self._take_back()
            return
        kept += [(attributes, dict(attributes)) for attributes, _ in self._watched]

    def _take_back(self) -> Kept:
        kept: Kept = []
        for (attributes, now), (_, put) in zip(self._inside, self._put):
            kept.append((attributes, dict(attributes)))
            for name, value in put.items():
                if attributes.get(name, _MISSING) is not value:
                    continue
                if name in now:
                    attributes[name] = now[name]
                else:
                    attributes.pop(name, None)
        self._inside, self._put = [], []
        return kept

    def values(self, kept: Kept) -> Iterator[Any]:
        """Give what a forward has left, without the attributes that only lie beside it."""
        count = len(self._declared)
        for _, values in kept[:count]:
            yield from values.values()
        for (_, assigned), (_, values) in zip(self._watched, kept[count:]):
            yield from (values[name] for name in assigned if name in values)

    def put(self, kept: Kept) -> None:
        """Before backward: bring back what a microbatch has left."""
        count = len(self._declared)
        for attributes, values in kept[:count]:
            attributes.update(values)
        self._inside, self._put = [], []
        for (attributes, assigned), (_, values) in zip(self._watched, kept[count:]):
            put = {name: values[name] for name in assigned if name in values}
            self._inside.append((attributes, {n: attributes[n] for n in put if n in attributes}))
            self._put.append((attributes, put))
            attributes.update(put)

    _put: Kept = []


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


stage = PlainStage
