"""State of a stage: attributes and random states, restored after a trial; its checkpoint."""

from __future__ import annotations

import random
from bisect import bisect
from collections import OrderedDict, deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from itertools import accumulate
from typing import Any

import numpy as np

from ..checkpoint.format import read_all
from ..errors import InvalidArgument
from ..frameworks.base import adapter, library
from ..frameworks.generators import Source
from ..nn import Sequential
from ..parallel.ddp import DDP, is_state

_CONTAINERS = (list, dict, set, deque, OrderedDict)


class Kept:
    """An attribute, and what was in it if it is a container."""

    __slots__ = ("value", "inside")

    def __init__(self, value: Any):
        self.value = value
        self.inside = value.copy() if type(value) in _CONTAINERS else None

    def back(self) -> Any:
        """Give the object, with what was in it."""
        if self.inside is not None and _parts(self.value) != _parts(self.inside):
            self.value.clear()
            fill = self.value.update if hasattr(self.value, "update") else self.value.extend
            fill(self.inside)
        return self.value


def _parts(container: Any) -> list[int]:
    if isinstance(container, dict):
        return [id(x) for item in container.items() for x in item]
    return [id(x) for x in container]


Attributes = list[tuple[dict[str, Any], dict[str, Kept]]]
"""For each dict of attributes what it had."""


def attributes_of(places: Iterable[dict[str, Any]], beside: frozenset[str]) -> Attributes:
    """Take down dicts of attributes, without the names in `beside`."""
    return [
        (place, {name: Kept(value) for name, value in place.items() if name not in beside})
        for place in places
    ]


def put_back(attributes: Attributes, beside: frozenset[str]) -> None:
    """Make attributes what they were; others, but for those in `beside`, are new and go."""
    for place, values in attributes:
        for name in [n for n in place if n not in values and n not in beside]:
            del place[name]
        for name, kept in values.items():
            place[name] = kept.back()


States = list[tuple[Any, Any]]
"""Sources of random numbers, and their states."""


def random_states(module: Any) -> States:
    """Give the states of Python's and numpy's own, and of those that modules have as attributes."""
    parts = module.modules() if callable(getattr(module, "modules", None)) else [module]
    sources = [Source(random), Source(np.random)]
    for part in parts:
        for value in vars(part).values():
            if isinstance(value, (np.random.Generator, np.random.RandomState)):
                sources.append(Source(value))
    return [(source, source.get_state()) for source in sources]


@contextmanager
def drawn_again(states: States) -> Iterator[None]:
    """Within it sources give what came after these states; then they go on as if nothing was."""
    now = [(source, source.get_state()) for source, _ in states]
    for source, state in states:
        source.set_state(state)
    try:
        yield
    finally:
        for source, state in now:
            source.set_state(state)


def parameters(layer: Any) -> list[Any]:
    """List the parameters of a layer; a plain object may have none."""
    return list(layer.parameters()) if callable(getattr(layer, "parameters", None)) else []


def untouched(layers: Sequence[Any], name: str | None) -> AbstractContextManager[None]:
    """Give a context of which layers of a library keep no trace, nor sources of random numbers."""
    own = adapter(name, "state")
    return _untouched(layers) if own is None else own.untouched(layers)


@contextmanager
def without_gradients(layers: Sequence[Any]) -> Iterator[None]:
    """Within it parameters have no gradient; then they have the one that they had."""
    before = [(p, p.grad) for layer in layers for p in parameters(layer)]
    for p, _ in before:
        p.grad = None
    try:
        yield
    finally:
        for p, grad in before:
            p.grad = grad


@contextmanager
def _untouched(layers: Sequence[Any]) -> Iterator[None]:
    places = []
    for layer in layers:
        modules = getattr(layer, "modules", None)
        places += [vars(part) for part in (modules() if callable(modules) else [layer])]
    attributes = attributes_of(places, frozenset())
    arrays = [x for place in places for x in place.values() if isinstance(x, np.ndarray)]
    copies = [x.copy() for x in arrays]
    with ExitStack() as stack:
        stack.enter_context(without_gradients(layers))
        for layer in layers:
            stack.enter_context(drawn_again(random_states(layer)))
        try:
            yield
        finally:
            put_back(attributes, frozenset())
            for array, copy in zip(arrays, copies):
                array[...] = copy


def layers_of(module: Any) -> int | None:
    """Return how many layers a Sequential has; None for what has other names than their numbers."""
    bare = module.module if isinstance(module, DDP) else module
    if type(bare) is Sequential:
        return len(bare.layers)
    if library(bare) != "torch" or type(bare).__name__ != "Sequential":
        return None
    names = list(bare._modules)
    return len(names) if names == [str(k) for k in range(len(names))] else None


def deal(
    saved: Mapping[int, Mapping[str, Any]], layers: Sequence[int | None], rank: int
) -> list[Any]:
    """Return the state for each of the stages that there are now.

    Parameters
    ----------
    saved : mapping of int to mapping
        By number of the stage: its `layers`, see :func:`layers_of`, and its `state`.
    layers : sequence of int or None
        The layers of the stages that there are.
    rank : int
        For error messages.

    Raises
    ------
    InvalidArgument
        If there are other stages, and these cannot be taken apart into layers.
    """
    before = [saved[number]["layers"] for number in range(len(saved))]
    now, then = _counted(layers), _counted(before)
    if len(before) == len(layers) and (now is None or then is None or now == then):
        return [saved[number]["state"] for number in range(len(saved))]
    if now is None or then is None or sum(now) != sum(then):
        raise InvalidArgument(
            f"rank {rank}: the state is of a pipeline of {len(before)} stages with "
            f"{_told(before)} layers, this one is of {len(layers)} with {_told(layers)}: allowed "
            "are as many stages, or stages that all are a Sequential, with as many layers in all"
        )
    found: list[Any] = [{} for _ in now]
    stops = list(accumulate(now))
    for number, start in enumerate(accumulate(then[:-1], initial=0)):
        for name, value in module_state(saved[number]["state"]).items():
            layer, _, rest = name.partition(".")
            k = start + int(layer)
            stage = bisect(stops, k)
            found[stage][f"{k - stops[stage] + now[stage]}.{rest}"] = value
    return found


def _counted(layers: Sequence[int | None]) -> list[int] | None:
    """Return the numbers of layers if all are known."""
    known = [count for count in layers if count is not None]
    return known if len(known) == len(layers) else None


def _told(layers: Sequence[int | None]) -> str:
    return ", ".join("?" if count is None else str(count) for count in layers)


def module_state(state: Any) -> Any:
    """Return the state of the module, without what a DDP around it has added."""
    return state["module"] if is_state(state) else state


def load_stage(module: Any, state: Any) -> None:
    """Have a stage take a state, which may have been that of a stage in a DDP, or not."""
    if isinstance(module, DDP) and is_state(state):
        module.load_state_dict(state)
        return
    bare = module.module if isinstance(module, DDP) else module
    bare.load_state_dict(read_all(module_state(state)))
