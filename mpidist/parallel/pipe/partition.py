"""A model of layers one after another, cut into stages that take about equally long."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from time import perf_counter
from typing import Any

import numpy as np

from ...errors import InvalidArgument
from ...nn import Sequential
from ..framework import library

WAYS = ("parameters", "time")
ROUNDS = 5  # of measuring; the first one warms up


class Partition(Sequence):
    """Stages, in order, and how even they are.

    Attributes
    ----------
    by : str
        What `costs` are: numbers of parameters, or seconds of forward and backward.
    costs : tuple of float
        Of the stages.
    layers : tuple of (int, int)
        The first layer of each, and the one after its last.
    """

    def __init__(
        self,
        stages: Sequence[Any],
        by: str,
        costs: Sequence[float],
        layers: Sequence[tuple[int, int]],
    ):
        self._stages, self.by = list(stages), by
        self.costs, self.layers = tuple(costs), tuple(layers)

    def __len__(self) -> int:
        return len(self._stages)

    def __getitem__(self, k: Any) -> Any:
        return self._stages[k]

    def __iter__(self) -> Iterator[Any]:
        return iter(self._stages)

    @property
    def balance(self) -> float:
        """The mean cost of a stage by the largest: 1 if all are equal."""
        most = max(self.costs)
        return sum(self.costs) / len(self.costs) / most if most else 1.0

    def __str__(self) -> str:
        unit = "parameters" if self.by == "parameters" else "ms"
        scale = 1 if self.by == "parameters" else 1e3
        lines = [
            f"stage {k}: layers {start} … {stop - 1}, {scale * cost:.6g} {unit}"
            for k, ((start, stop), cost) in enumerate(zip(self.layers, self.costs))
        ]
        return "\n".join([*lines, f"balance {self.balance:.2f} (mean / largest)"])


def partition(
    model: Any, stages: int, by: str = "parameters", example: Any = None, comm: Any = None
) -> Partition:
    """Cut a model into stages of layers in a row, so that the largest stage is as small as can be.

    Parameters
    ----------
    model : torch.nn.Sequential, mpidist.nn.Sequential or list of layers
        The layers themselves go into the stages, nothing is copied.
    stages : int
        How many; every one gets at least one layer.
    by : {"parameters", "time"}
        What is to be even: numbers of parameters, or measured seconds of forward and backward.
    example : tensor, optional
        For ``by="time"``: an input, such as one microbatch.  Gradients are forgotten afterwards.
    comm : Communicator, optional
        With it the times that rank 0 measured are taken on every rank; collective.  Without it,
        ranks may come to different stages.

    Returns
    -------
    Partition
        A sequence of stages, with `balance`; printing it shows them.
    """
    where = f"rank {comm.rank}: " if comm is not None else ""
    layers = _layers(model, where)
    if by not in WAYS:
        raise InvalidArgument(f"{where}by={by!r}: allowed are {', '.join(map(repr, WAYS))}")
    if isinstance(stages, bool) or not isinstance(stages, int) or not 1 <= stages <= len(layers):
        raise InvalidArgument(
            f"{where}stages={stages!r}: allowed are 1 … {len(layers)}, the number of layers"
        )
    if by == "time":
        if example is None:
            raise InvalidArgument(f"{where}by='time' needs example=, an input of the model")
        costs = measure(layers, example)
        if comm is not None:
            costs = comm.broadcast_object(costs if comm.rank == 0 else None)
    else:
        costs = [float(sum(math.prod(p.data.shape) for p in _own(m))) for m in layers]
    ends = divide(costs, stages)
    ranges = list(zip([0, *ends[:-1]], ends))
    totals = [sum(costs[start:stop]) for start, stop in ranges]
    kind = _sequential(layers)
    return Partition([kind(*layers[start:stop]) for start, stop in ranges], by, totals, ranges)


def _layers(model: Any, where: str) -> list[Any]:
    if isinstance(model, Sequential):
        return list(model.layers)
    try:
        return list(model)
    except TypeError:
        raise InvalidArgument(
            f"{where}model is a {type(model).__name__}: allowed are a Sequential of PyTorch or of "
            "mpidist.nn, and other sequences of layers"
        ) from None


def _own(layer: Any) -> list[Any]:
    return list(layer.parameters()) if callable(getattr(layer, "parameters", None)) else []


def _sequential(layers: Sequence[Any]) -> Callable[..., Any]:
    if library(layers[0]) == "torch":
        import torch

        return torch.nn.Sequential
    return Sequential


def divide(costs: Sequence[float], parts: int) -> list[int]:
    """Give where each part ends so that the largest sum is smallest; every part has an entry.

    By dynamic programming over the last cut: exact, in O(parts · n²).
    """
    sums = np.concatenate([[0.0], np.cumsum(costs)])
    count = len(costs)
    best = [math.inf if k else 0.0 for k in range(count + 1)]  # of no part
    cuts: list[list[int]] = []
    for part in range(1, parts + 1):
        now, cut = [math.inf] * (count + 1), [0] * (count + 1)
        for stop in range(part, count + 1):
            for start in range(part - 1, stop):
                value = max(best[start], float(sums[stop] - sums[start]))
                if value < now[stop]:
                    now[stop], cut[stop] = value, start
        best = now
        cuts.append(cut)
    ends, stop = [count], count
    for cut in reversed(cuts[1:]):
        stop = cut[stop]
        ends.append(stop)
    return ends[::-1]


def measure(layers: Sequence[Any], example: Any) -> list[float]:
    """Give the seconds of forward and backward of each layer: medians of a few rounds."""
    from .structure import flatten

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
            began = perf_counter()
            tree, leaves = flatten(value)
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
        for p in _own(layer):
            p.grad = None
    return np.median(times[1:], axis=0).tolist()


def _cut_off(output: Any, tensors: Any) -> Any:
    """Give the output as the next layer gets it: without what it was computed from."""
    from .structure import flatten, unflatten

    tree, found = flatten(output)
    return unflatten(tree, [tensors.tensor(tensors.array(t), tensors.form(t)) for t in found])


def _ones(x: Any) -> Any:
    return x.new_ones(x.shape) if hasattr(x, "new_ones") else np.ones_like(x)
