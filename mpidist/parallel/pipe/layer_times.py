"""How long the layers of a model take, each by itself."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from time import perf_counter
from typing import Any

import numpy as np

from ..framework import library
from .stage import stage_of
from .structure import flatten, unflatten
from .untouched import untouched

ROUNDS = 5  # of measuring; the first one warms up


def measure(layers: Sequence[Any], example: Any, sequential: Callable[..., Any]) -> list[float]:
    """Give the seconds of forward and backward of each layer: medians of a few rounds.

    Layers, and sources of random numbers, are left as they were.

    Parameters
    ----------
    layers : sequence of modules
        Which.
    example : tensor or structure of tensors
        What the first one gets.
    sequential : callable
        Makes a Sequential: a layer is called as it is within one.
    """
    workers = [stage_of(sequential(layer), f"layer {k}") for k, layer in enumerate(layers)]
    with untouched(layers, library(layers[0])):
        times = [_round(workers, example) for _ in range(ROUNDS)]
    return np.median(times[1:], axis=0).tolist()


def _round(workers: Sequence[Any], example: Any) -> Any:
    """Give the seconds of each, forward and backward together."""
    taken, value, kept = np.empty(len(workers)), example, []
    for k, worker in enumerate(workers):
        tree, leaves = flatten(value)
        # A layer may work in place, which autograd allows on no leaf, and the example is a user's.
        value = unflatten(tree, [_copied(t, detached=k == 0) for t in leaves])
        began = perf_counter()
        output, saved = worker.forward(value, tree if k else None, leaves if k else [], True)
        taken[k] = perf_counter() - began
        tree, outputs = flatten(output)
        worker.finish(saved, tree, outputs)
        value = _cut_off(output, worker.tensors)
        kept.append((saved, outputs))
    for k in reversed(range(len(workers))):
        saved, outputs = kept.pop()
        grads = [_ones(t) if workers[k].tensors.form(t)[2] else None for t in outputs]
        began = perf_counter()
        workers[k].backward(saved, grads)
        taken[k] += perf_counter() - began
    return taken


def _copied(x: Any, detached: bool) -> Any:
    if not hasattr(x, "clone"):
        return x.copy()
    return x.detach().clone() if detached else x.clone()


def _cut_off(output: Any, tensors: Any) -> Any:
    """Give the output as the next layer gets it: without what it was computed from."""
    tree, found = flatten(output)
    return unflatten(tree, [tensors.tensor(tensors.own(t), tensors.form(t)) for t in found])


def _ones(x: Any) -> Any:
    return x.new_ones(x.shape) if hasattr(x, "new_ones") else np.ones_like(x)
