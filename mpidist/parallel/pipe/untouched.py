"""Layers that are tried out, and then are as if they had not been."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from typing import Any

import numpy as np

from .attributes import attributes_of, put_back
from .random_states import drawn_again, random_states

ADAPTERS = {"torch": "mpidist.torch.untouched"}
"""Where a library's own ``untouched`` is."""


def parameters(layer: Any) -> list[Any]:
    """List the parameters of a layer; a plain object may have none."""
    return list(layer.parameters()) if callable(getattr(layer, "parameters", None)) else []


def untouched(layers: Sequence[Any], name: str | None) -> AbstractContextManager[None]:
    """Give a context of which layers of a library keep no trace, nor sources of random numbers."""
    if name in ADAPTERS:
        make: Callable = importlib.import_module(ADAPTERS[name]).untouched
        return make(layers)
    return _untouched(layers)


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
