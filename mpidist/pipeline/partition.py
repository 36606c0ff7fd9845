"""Layers cut into stages of even cost: number of parameters, or measured time."""

from __future__ import annotations

import logging
import math
import sys
from collections.abc import Callable, Iterator, Sequence
from numbers import Integral
from time import perf_counter
from typing import Any

import numpy as np

from ..communicator.launch import started
from ..errors import InvalidArgument
from ..frameworks.base import library
from ..nn import Sequential
from .stage import stage_of
from .state import parameters, untouched
from .values import flatten, unflatten


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
        lines = []
        for k, ((start, stop), cost) in enumerate(zip(self.layers, self.costs)):
            layers = f"layers {start} … {stop - 1}" if stop - start > 1 else f"layer {start}"
            words = f"{cost:,.0f} parameters" if self.by == "parameters" else f"{1e3 * cost:.4g} ms"
            lines.append(f"stage {k}: {layers}, {words}")
        return "\n".join([*lines, f"balance {self.balance:.2f} (mean / largest)"])


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


log = logging.getLogger("mpidist")

WAYS = ("parameters", "time")


def partition(
    model: Any,
    stages: int,
    by: str = "parameters",
    example: Any = None,
    comm: Any = None,
    verbose: bool = True,
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
        For ``by="time"``: an input, such as one microbatch.  The model is as before afterwards:
        buffers and other attributes, gradients, and the states of random numbers.
    comm : Communicator, optional
        With it the times that rank 0 measured are taken on every rank; collective.  Without it,
        ranks may come to different stages.
    verbose : bool
        Print the stages and their balance on rank 0, of `comm` or else of the default communicator;
        without either who calls does.  The logger ``"mpidist"`` is told of them in any case, at
        level INFO.

    Returns
    -------
    Partition
        A sequence of stages, with `balance`; printing it shows them.
    """
    where = f"rank {comm.rank}: " if comm is not None else ""
    layers = _layers(model, where)
    if by not in WAYS:
        raise InvalidArgument(f"{where}by={by!r}: allowed are {', '.join(map(repr, WAYS))}")
    if not isinstance(verbose, bool):
        raise InvalidArgument(f"{where}verbose={verbose!r}: allowed are True and False")
    starts = _starts(layers, stages, where)
    kind = _sequential(layers)
    if by == "time":
        if example is None:
            raise InvalidArgument(f"{where}by='time' needs example=, an input of the model")
        costs = measure(layers, example, kind)
        if comm is not None:
            costs = comm.broadcast_object(costs if comm.rank == 0 else None)
    else:
        costs = [float(sum(math.prod(p.data.shape) for p in parameters(m))) for m in layers]
    stops = [*starts[1:], len(layers)]
    ends = divide([sum(costs[start:stop]) for start, stop in zip(starts, stops)], stages)
    ends = [stops[end - 1] for end in ends]
    ranges = list(zip([0, *ends[:-1]], ends))
    totals = [sum(costs[start:stop]) for start, stop in ranges]
    made = Partition([kind(*layers[start:stop]) for start, stop in ranges], by, totals, ranges)
    _keep_mode(model, made)
    _tell(made, comm if comm is not None else started(), verbose)
    return made


def _starts(layers: Sequence[Any], stages: Any, where: str) -> list[int]:
    """List the layers that can begin a stage; InvalidArgument if there are too few for `stages`."""
    starts = [k for k, layer in enumerate(layers) if not (k and getattr(layer, "inplace", False))]
    whole = isinstance(stages, Integral) and not isinstance(stages, bool)
    if not whole or not 1 <= stages <= len(starts):
        raise InvalidArgument(
            f"{where}stages={stages!r}: allowed are 1 … {len(starts)}, the number of layers that "
            "can begin a stage"
        )
    return starts


def _keep_mode(model: Any, made: Partition) -> None:
    """Have the stages in training or evaluation, as the model is; their layers are not asked."""
    mode = getattr(model, "training", None)
    for stage in made if isinstance(mode, bool) else ():
        stage.training = mode


def _tell(made: Partition, comm: Any, verbose: bool) -> None:
    """Tell the logger, and who looks on, of the stages; rank 0 does."""
    if comm is None or comm.rank == 0:
        log.info("partition by %s:\n%s", made.by, made)
        if verbose:
            sys.stdout.write(f"{made}\n")


def _layers(model: Any, where: str) -> list[Any]:
    try:
        layers = list(model.layers if isinstance(model, Sequential) else model)
    except TypeError:
        layers = []
    if not layers or not all(callable(layer) for layer in layers) or _has_own_way(model):
        raise InvalidArgument(
            f"{where}model is a {type(model).__name__}: allowed are a Sequential of PyTorch or of "
            "mpidist.nn (without a forward() of its own), and other sequences of layers"
        )
    return layers


def _has_own_way(model: Any) -> bool:
    """Whether it is a Sequential that does more than call its layers one after the other."""
    own = getattr(type(model), "forward", None)
    bases = [kind for kind in type(model).__mro__ if kind.__name__ == "Sequential"]
    return bool(bases) and own is not vars(bases[-1]).get("forward")


def _sequential(layers: Sequence[Any]) -> Callable[..., Any]:
    if library(layers[0]) == "torch":
        import torch

        return torch.nn.Sequential
    return Sequential
