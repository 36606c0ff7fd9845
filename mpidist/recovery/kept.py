"""One object of a State: what is kept of it at a commit, and how that is restored in it."""

from __future__ import annotations

import pickle
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np

from ..checkpoint.segments import convert
from ..checkpoint.state import state_of
from ..device.recognise import is_on_device, is_torch, on_host
from ..errors import InvalidArgument
from ..frameworks.base import framework_of, library
from ..frameworks.generators import source_of
from ..parallel.ddp import DDP
from ..parallel.zero import ZeroOptimizer
from .packing import packed

GENERATOR, MODEL, SMALL, OWN = "generator", "model", "small", "own"
_STATEFUL = "state_dict", "load_state_dict"
_OPTIMIZERS = "torch.optim.", "mpidist.nn."
_FIXED = {bool, int, float, str, bytes, type(None)}
_PLAIN = bool, int, float, str, tuple
Groups = Sequence[Mapping[str, Any]]
"""Of an optimizer: its rates and the like, by group of parameters."""


@dataclass
class Kept:
    """One object of a State."""

    name: str
    value: Any
    kind: str
    per_rank: bool
    made_inside: bool = False  # of `keep`: made anew in each generation
    buffers: list[Any] = field(default_factory=list)  # of a model, as they were at the last commit
    # See `look`: each commit asks, and a module is slow to say that it lacks an attribute.
    divided: bool = field(init=False)  # each rank has a part, and any number can load the parts
    is_model: bool = field(init=False)  # has forwards
    has_rates: bool = field(init=False)  # is an optimizer
    groups: Callable[[], Sequence[dict[str, Any]]] = field(init=False)  # of it, as they are now
    rates_stay: bool = field(init=False)  # nobody can change one, only replace it

    def __post_init__(self) -> None:
        self.look()

    def look(self) -> None:
        """Find out what the object is: again where training begins, as it may have changed."""
        value = self.value
        self.divided = getattr(value, "takes_slices", False) or hasattr(value, "by_stage")
        self.is_model = self.kind is MODEL and callable(getattr(value, "parameters", None))
        self.has_rates = hasattr(value, "param_groups") or hasattr(value, "learning_rate")
        self.groups = partial(getattr, value, "param_groups", ())
        if not self.groups() and hasattr(value, "learning_rate"):
            self.groups = partial(list, [vars(value)])  # of mpidist.nn: no part of the state
        self.rates_stay = all(is_plain(group.values()) for group in options_of(self.groups()))

    @classmethod
    def of(cls, name: str, value: Any, per_rank: bool) -> Kept:
        """Return an object; InvalidArgument if it cannot be restored: now, and not at a loss."""
        if isinstance(value, DDP):
            raise InvalidArgument(
                f"{name} is a DDP, which holds a communicator: give State the module that it "
                "wraps, and make the DDP inside of the function"
            )
        model = callable(getattr(value, "parameters", None))
        optimizer = hasattr(value, "param_groups") or hasattr(value, "zero_grad")
        divided = isinstance(value, ZeroOptimizer) or hasattr(value, "by_stage")
        if source_of(value) is not None:
            kind = GENERATOR
        elif isinstance(value, np.ndarray) or is_on_device(value) or is_torch(value):
            kind = MODEL
        elif not isinstance(value, type) and all(map(partial(hasattr, value), _STATEFUL)):
            kind = MODEL if model or optimizer or divided else SMALL
        else:
            raise InvalidArgument(
                f"{name} has type {type(value).__name__}, which cannot be restored: expected an "
                "object with state_dict() and load_state_dict(), an array, or a random number "
                "generator; plain values are arguments of commit()"
            )
        kept = cls(name, value, kind, per_rank)
        if kind is MODEL:
            packed(kept.state(), name)
            if not hasattr(value, "state_dict"):
                _try_to_set(value, name)
        elif kind is SMALL:
            try:
                pickle.dumps(kept.state(), 5)
            except Exception as error:
                raise InvalidArgument(f"{name}: its state cannot be kept: {error}") from error
        return kept

    @property
    def needs_copy(self) -> bool:
        """Whether no other rank has this one's state, and it is too large to go into each call."""
        return self.divided or (self.per_rank and self.kind is not GENERATOR)

    def state(self) -> Any:
        """Return the state, with views of the object's arrays."""
        if self.kind is GENERATOR:
            source = source_of(self.value)
            assert source is not None
            state = source.get_state()
            return ("torch", state.cpu().numpy()) if library(state) == "torch" else ("", state)
        if not hasattr(self.value, "state_dict"):
            return self.value
        return {"state": state_of(self.value), "options": options_of(self.groups())}

    def load(self, state: Any) -> None:
        """Restore a result of :meth:`state`."""
        if self.kind is GENERATOR:
            source = source_of(self.value)
            assert source is not None
            name, given = state
            source.set_state(convert(np.array(given), name, given.shape) if name else given)
        elif hasattr(self.value, "load_state_dict"):
            self.value.load_state_dict(state["state"])
            self.set_options(state["options"])
        elif np.shape(state) != np.shape(self.value):
            raise InvalidArgument(
                f"{self.name} has shape {np.shape(self.value)}, and that of the last commit had "
                f"{np.shape(state)}: expected the same, or State.parts({self.name!r})"
            )
        else:
            _set(self.value, state)

    # -- optimizers -------------------------------------------------------------------------------

    def set_options(self, options: Groups) -> None:
        """Restore a result of :func:`options_of`."""
        for group, saved in zip(self.groups(), options):
            group.update(saved)

    def forget_gradients(self) -> None:
        """Set the gradients to None: they may be sums of some ranks only."""
        if self.kind != MODEL:
            return
        found = getattr(self.value, "parameters", None)
        for p in found() if callable(found) else found or ():
            p.grad = None
        for group in getattr(self.value, "param_groups", ()):
            for p in group["params"]:
                p.grad = None

    # -- buffers of models, in which a forward may count -------------------------------------------

    def read_buffers(self) -> list[Any]:
        """Return the buffers; [] of other objects."""
        if not self.is_model:
            return []
        return [array for _, array in framework_of(self.value).buffers(self.value)]

    def save_buffers(self) -> None:
        """Save the buffers; those on a GPU are copied there, and the host does not wait."""
        self.buffers = [_copy(b) for b in self.read_buffers()]

    def set_buffers(self, saved: Sequence[Any]) -> None:
        """Restore the buffers from arrays in the same or in host memory."""
        for array, value in zip(self.read_buffers(), saved):
            _set(array, value)


def options_of(groups: Groups) -> list[dict[str, Any]]:
    """Return the rates of an optimizer and the like, without parameters and states."""
    return [{k: v for k, v in group.items() if isinstance(v, _PLAIN)} for group in groups]


def is_plain(values: Collection[Any]) -> bool:
    """Return whether these values can be pickled, and nobody can change them until then."""
    for value in values:
        if type(value) not in _FIXED and not (type(value) is tuple and is_plain(value)):
            return False
    return True


def buffers_of(objects: Iterable[Kept], saved: bool = False) -> dict[str, list[np.ndarray]]:
    """Return copies of the buffers in host memory, by model: of those that have some.

    They are those of now, or as they were `saved`.
    """
    found = {}
    for kept in objects:
        buffers = kept.buffers if saved else kept.read_buffers()
        if buffers:
            found[kept.name] = [np.array(framework_of(b).as_array(on_host(b))) for b in buffers]
    return found


def without_owner(objects: Sequence[Kept]) -> str:
    """Return the name of an optimizer of parameters that none of the objects has; "" if none.

    A rank that takes a place would have other weights.  Nothing is known of stages of a pipeline,
    of an object that is no model and has arrays in its state, and of optimizers of other libraries,
    whose state may have weights.
    """
    owned: set[int] = set()  # by memory: a parameter may be a part of an array, or a buffer
    for kept in objects:
        value = kept.value
        stages = kept.divided and not kept.has_rates
        if stages or (kept.kind is SMALL and _may_have_arrays(kept)):
            return ""
        alone = [] if kept.has_rates else [value]
        arrays = [*value.parameters(), *kept.read_buffers()] if kept.is_model else alone
        owned.update(map(_memory, arrays))
    for kept in objects:
        known = type(kept.value).__module__.startswith(_OPTIMIZERS)
        if kept.kind is not MODEL or kept.divided or kept.is_model or not known:
            continue
        groups = getattr(kept.value, "param_groups", None)
        found = getattr(kept.value, "parameters", ()) if groups is None else groups
        for p in (p for one in found for p in (one["params"] if groups else [one])):
            if getattr(p, "requires_grad", True) and _memory(p) not in owned:
                return kept.name
    return ""


def _memory(array: Any) -> int:
    """Return the address of an array, of which it may be a view; of other objects their number."""
    if hasattr(array, "untyped_storage"):
        return array.untyped_storage().data_ptr() or id(array)
    array = array if isinstance(array, np.ndarray) else getattr(array, "data", array)
    if not isinstance(array, np.ndarray):
        return id(array)
    while isinstance(array.base, np.ndarray):
        array = array.base
    return array.__array_interface__["data"][0]


def _may_have_arrays(kept: Kept) -> bool:
    try:
        return bool(packed(kept.state(), kept.name)[1])
    except InvalidArgument:  # something that is neither an array nor plain
        return True


def _copy(array: Any) -> Any:
    return array.clone() if library(array) == "torch" else array.copy()


def _try_to_set(array: Any, name: str) -> None:
    """Raise InvalidArgument for an array that cannot be set: read-only, or of shared elements."""
    few = array[:2] if len(array.shape) else array
    try:
        _set(few, _copy(few))
    except (RuntimeError, ValueError) as error:
        raise InvalidArgument(f"{name} cannot be restored: {error}") from None


def _set(array: Any, value: Any) -> None:
    """Set the elements of an array of any library to those of one in the same or in host memory."""
    if library(array) == "torch":
        value = value if library(value) == "torch" else convert(value, "torch", value.shape)
        array.detach().copy_(value)  # a leaf of autograd, too
    elif is_on_device(array) and not is_on_device(value):
        array.set(value)
    else:
        array[...] = value
