"""A model of layers one after another, cut into stages that take about equally long."""

from __future__ import annotations

import logging
import math
import sys
from collections.abc import Callable, Sequence
from numbers import Integral
from typing import Any

from ...communicator.launch import started
from ...errors import InvalidArgument
from ...nn import Sequential
from ..framework import library
from .divided import Partition, divide
from .layer_times import measure
from .untouched import parameters

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
