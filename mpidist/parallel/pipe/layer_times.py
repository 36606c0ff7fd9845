"""How long the layers of a model take, each by itself."""

from __future__ import annotations

from collections.abc import Sequence
from time import perf_counter
from typing import Any

import numpy as np

from ..framework import library
from .structure import flatten, unflatten

ROUNDS = 5  # of measuring; the first one warms up


def parameters(layer: Any) -> list[Any]:
    """List the parameters of a layer; a plain object may have none."""
    return list(layer.parameters()) if callable(getattr(layer, "parameters", None)) else []


def measure(layers: Sequence[Any], example: Any) -> list[float]:
    """Give the seconds of forward and backward of each layer: medians of a few rounds."""
    if library(layers[0]) == "torch":
        from ...torch.stage import stage as make

        workers: list[Any] = [make(layer, layer, f"layer {k}") for k, layer in enumerate(layers)]
    else:
        from .plain_stage import PlainStage

        workers = [PlainStage(layer, layer, f"layer {k}") for k, layer in enumerate(layers)]
    times = np.empty((ROUNDS, len(layers)))
    for taken in times:
        value = example
        kept = []
        for k, worker in enumerate(workers):
            tree, leaves = flatten(value)
            # A layer may work in place, which autograd allows on no leaf.
            value = unflatten(tree, [t.clone() if hasattr(t, "clone") else t for t in leaves])
            began = perf_counter()
            output, saved = worker.forward(value, tree if k else None, leaves if k else [], True)
            taken[k] = perf_counter() - began
            tree, outputs = flatten(output)
            worker.finish(saved, tree, outputs)
            library_of = worker.tensors
            value = _cut_off(output, library_of)
            kept.append((saved, outputs))
        for k in reversed(range(len(workers))):
            saved, outputs = kept.pop()
            grads = [_ones(t) if workers[k].tensors.form(t)[2] else None for t in outputs]
            began = perf_counter()
            workers[k].backward(saved, grads)
            taken[k] += perf_counter() - began
    for layer in layers:
        for p in parameters(layer):
            p.grad = None
    return np.median(times[1:], axis=0).tolist()


def _cut_off(output: Any, tensors: Any) -> Any:
    """Give the output as the next layer gets it: without what it was computed from."""
    tree, found = flatten(output)
    return unflatten(tree, [tensors.tensor(tensors.own(t), tensors.form(t)) for t in found])


def _ones(x: Any) -> Any:
    return x.new_ones(x.shape) if hasattr(x, "new_ones") else np.ones_like(x)
