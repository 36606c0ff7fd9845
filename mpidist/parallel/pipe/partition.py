"""A model of layers one after another, cut into stages that take about equally long."""

from __future__ import annotations

import logging
import math
import sys
from collections.abc import Callable, Iterator, Sequence
from numbers import Integral
from typing import Any

import numpy as np

from ...errors import InvalidArgument
from ...nn import Sequential
from ..framework import library
from .layer_times import measure, parameters

log = logging.getLogger("mpidist")

WAYS = ("parameters", "time")


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
    model: Any,
    stages: int,
    by: str = "parameters",
    example: Any = None,
    comm: Any = None,
    verbose: bool = False,
) -> Partition:
    """Cut a model into stages of layers in a row, so that the largest stage is as small as can be.

    A layer that works in place stays with the one before it.

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
    verbose : bool
        Print the stages and their balance: rank 0 of `comm` does, without `comm` who calls.  The
        logger ``"mpidist"`` is told of them in any case, at level INFO.

    Returns
    -------
    Partition
        A sequence of stages, with `balance`; printing it shows them.
    """
    where = f"rank {comm.rank}: " if comm is not None else ""
    layers = _layers(model, where)
    if by not in WAYS:
        raise InvalidArgument(f"{where}by={by!r}: allowed are {', '.join(map(repr, WAYS))}")
    starts = [k for k, layer in enumerate(layers) if not (k and getattr(layer, "inplace", False))]
    whole = isinstance(stages, Integral) and not isinstance(stages, bool)
    if not whole or not 1 <= stages <= len(starts):
        raise InvalidArgument(
            f"{where}stages={stages!r}: allowed are 1 … {len(starts)}, the number of layers that "
            "can begin a stage"
        )
    if by == "time":
        if example is None:
            raise InvalidArgument(f"{where}by='time' needs example=, an input of the model")
        costs = measure(layers, example)
        if comm is not None:
            costs = comm.broadcast_object(costs if comm.rank == 0 else None)
    else:
        costs = [float(sum(math.prod(p.data.shape) for p in parameters(m))) for m in layers]
    stops = [*starts[1:], len(layers)]
    ends = divide([sum(costs[start:stop]) for start, stop in zip(starts, stops)], stages)
    ends = [stops[end - 1] for end in ends]
    ranges = list(zip([0, *ends[:-1]], ends))
    totals = [sum(costs[start:stop]) for start, stop in ranges]
    kind = _sequential(layers)
    made = Partition([kind(*layers[start:stop]) for start, stop in ranges], by, totals, ranges)
    if comm is None or comm.rank == 0:
        log.info("partition by %s:\n%s", by, made)
        if verbose:
            sys.stdout.write(f"{made}\n")
    return made


def _layers(model: Any, where: str) -> list[Any]:
    try:
        layers = list(model.layers if isinstance(model, Sequential) else model)
    except TypeError:
        layers = []
    if not layers or not all(callable(layer) for layer in layers):
        raise InvalidArgument(
            f"{where}model is a {type(model).__name__}: allowed are a Sequential of PyTorch or of "
            "mpidist.nn, and other sequences of layers"
        )
    return layers


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
