"""Layers cut into stages of even cost: number of parameters, or measured time."""

from __future__ import annotations

import copy
import logging
import math
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from numbers import Integral
from time import perf_counter
from typing import Any
from weakref import WeakKeyDictionary

import numpy as np

from ..arguments import one_of, true_or_false, whole
from ..communicator.communicator import Communicator
from ..communicator.launch import started
from ..errors import InvalidArgument, Unsupported
from ..frameworks.base import adapter, library
from ..nn import Sequential
from .stage import Stage, stage_of
from .state import parameters, random_states, restored
from .values import Tree, flatten


class Partition(Sequence):
    """The stages of a model, in order, with their costs.

    Attributes
    ----------
    by : str
        The unit of `costs`: "parameters", or "time" for seconds of forward and backward.
    costs : tuple of float
        The cost of each stage.
    layers : tuple of (int, int)
        For each stage, the index of its first layer, and of the layer after its last; of a traced
        module, (k, k + 1) for stage k.
    tied : dict of str to tuple of int
        The stages that share a parameter, by the parameter's name in the model, such as
        "0.weight".  A :class:`Pipeline` ties these parameters by itself.
    split : list of str
        The submodules at which stages 1, 2, … of a traced module begin; else empty.
    """

    def __init__(
        self,
        stages: Sequence[Any],
        by: str,
        costs: Sequence[float],
        layers: Sequence[tuple[int, int]],
        tied: Mapping[str, tuple[int, ...]] | None = None,
        split: Sequence[str] = (),
    ):
        self._stages, self.by = list(stages), by
        self.costs, self.layers, self.tied = tuple(costs), tuple(layers), dict(tied or {})
        self.split = list(split)

    def __len__(self) -> int:
        return len(self._stages)

    def __getitem__(self, k: Any) -> Any:
        return self._stages[k]

    def __iter__(self) -> Iterator[Any]:
        return iter(self._stages)

    @property
    def balance(self) -> float:
        """The mean cost of a stage divided by the largest: 1 if all are equal."""
        most = max(self.costs)
        return sum(self.costs) / len(self.costs) / most if most else 1.0

    def __str__(self) -> str:
        lines = []
        for k, ((start, stop), cost) in enumerate(zip(self.layers, self.costs)):
            layers = f"layers {start} … {stop - 1}" if stop - start > 1 else f"layer {start}"
            words = f"{cost:,.0f} parameters" if self.by == "parameters" else f"{1e3 * cost:.4g} ms"
            if self.split:
                layers = f"from {self.split[k - 1]}" if k else f"before {self.split[0]}"
            lines.append(f"stage {k}: {layers}, {words}")
        for name, stages in self.tied.items():
            lines.append(f"tied: {name} in stages {', '.join(map(str, stages))}")
        return "\n".join([*lines, f"balance {self.balance:.2f} (mean / largest)"])


# By stage, not in the Partition: a Pipeline gets one stage of it, and finds its parameters here.
# Weak, so that a stage that the user drops frees its parameters.
_tied: WeakKeyDictionary[Any, dict[str, Any]] = WeakKeyDictionary()


def tied_in(stage: Any) -> dict[str, Any]:
    """Return the parameters that `stage` shares with other stages of a Partition, by name."""
    return _tied.get(stage, {})


def _tie(
    stages: Sequence[Any],
    layers: Sequence[Any],
    ranges: Sequence[tuple[int, int]],
    numbered: bool = True,
) -> Any:
    """Find the parameters that several stages share; return the numbers of the stages by name.

    The parameters are remembered for :func:`tied_in`.  Names begin with the number of the layer,
    if `numbered`.
    """
    found: dict[int, tuple[str, Any, list[int]]] = {}
    for number, (start, stop) in enumerate(ranges):
        for k in range(start, stop):
            names = getattr(layers[k], "named_parameters", None)
            for name, p in enumerate(parameters(layers[k])) if names is None else names():
                numbers = found.setdefault(id(p), (f"{k}." * numbered + str(name), p, []))[2]
                if number not in numbers:
                    numbers.append(number)
    shared = [each for each in found.values() if len(each[2]) > 1]
    for name, p, numbers in shared:
        for number in numbers:
            _tied.setdefault(stages[number], {})[name] = p
    return {name: tuple(numbers) for name, _, numbers in shared}


def divide(costs: Sequence[float], parts: int) -> list[int]:
    """Cut costs into `parts` runs, none empty, so that the largest sum of a run is smallest.

    Returns the end of each run (the index after its last cost).  By dynamic programming over the
    last cut: exact, in O(parts · n²) for n costs.
    """
    sums = np.concatenate([[0.0], np.cumsum(costs)])
    count = len(costs)
    # 5 costs in 3 parts.  best[stop]: how small the largest sum can be if the costs before `stop`
    # are in as many parts as were added so far; cuts remembers where the last part of it begins::
    #
    #     costs              4   1   2   3   2
    #     stop           0   1   2   3   4   5
    #     best, 1 part   ∞   4   5   7  10  12
    #     best, 2 parts  ∞   ∞   4   4   5   7      5 = max(best of 1 part before 2, 2 + 3)
    #     best, 3 parts  ∞   ∞   ∞   4   4   5      read back from the right: 4 | 1 2 | 3 2
    best = [math.inf if k else 0.0 for k in range(count + 1)]
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


def measure(
    layers: Sequence[Any], example: Any, sequential: Callable[..., Any], where: str
) -> list[float]:
    """Return the seconds of forward and backward of each layer: medians of a few rounds.

    Copies are measured, one at a time, so layers and generators of random numbers stay as they are;
    Unsupported if a layer cannot be copied.  `sequential` is the class Sequential of the layers'
    library: layers are called as within one.
    """
    seconds: list[float] = []
    tree, tensors = flatten(example, f"{where}example")
    # Dropout draws numbers: training afterwards gets those that it would have got anyway.
    with restored(random_states()), _recording(layers[0]):
        for k, layer in enumerate(layers):
            try:
                own = copy.deepcopy(layer)
            except Exception as error:  # whatever a layer's attributes raise
                raise Unsupported(
                    f"{where}layer {k} ({type(layer).__name__}) cannot be copied, and by='time' "
                    f"measures copies: {type(error).__name__}: {error}; by='parameters' copies "
                    "nothing"
                ) from error
            stage = stage_of(sequential(own), f"{where}layer {k}")
            times = []
            for _ in range(ROUNDS):
                taken, output = _round(stage, tree, tensors, first=k == 0)
                times.append(taken)
            seconds.append(float(np.median(times[1:])))
            tree, tensors = output
    return seconds


def _recording(layer: Any) -> AbstractContextManager[Any]:
    """Return a context in which a layer's library records graphs, if the library has autograd."""
    return sys.modules["torch"].enable_grad() if library(layer) == "torch" else nullcontext()


def _round(
    stage: Stage, tree: Tree, tensors: list[Any], first: bool
) -> tuple[float, tuple[Tree, list[Any]]]:
    """Run forward and backward of one layer once; return the seconds that it took, and its output.

    The output has the form of the input: `tree` and `tensors`, see :func:`~.values.flatten`.
    `first` is whether this is the first layer, whose input needs no gradient.
    """
    # A layer may change its input in place: every round gets a copy, as from another rank.
    convert = stage.tensors
    forms = [convert.form(t) for t in tensors]
    given = [
        convert.tensor(convert.own(t), (dtype, shape, wants and not first))
        for t, (dtype, shape, wants) in zip(tensors, forms)
    ]
    began = perf_counter()
    output, saved = stage.forward(tree, given, first, True)
    taken = perf_counter() - began
    tree, outputs = flatten(output)
    stage.finish(saved, tree, outputs)
    kept = [convert.tensor(convert.own(t), convert.form(t)) for t in outputs]
    grads = [_ones(t) if convert.form(t)[2] else None for t in outputs]
    began = perf_counter()
    stage.backward(saved, grads)
    return taken + perf_counter() - began, (tree, kept)


def _ones(x: Any) -> Any:
    return x.new_ones(x.shape) if hasattr(x, "new_ones") else np.ones_like(x)


log = logging.getLogger("mpidist")

BY = ("parameters", "time")


def partition(
    model: Any,
    stages: int,
    by: str = "parameters",
    example: Any = None,
    comm: Communicator | None = None,
    verbose: bool = True,
    split: Sequence[str] | None = None,
) -> Partition:
    """Cut a model into stages of consecutive layers, with the largest cost as small as possible.

    A module of PyTorch with a forward of its own is traced with `example` by
    :func:`torch.distributed.pipelining.pipeline`, and cut at its submodules.

    A layer that works in place stays in the stage of the layer before it.  A parameter that stages
    share, such as the embedding of a language model, is tied by the :class:`Pipeline`.

    Parameters
    ----------
    model : torch.nn.Sequential, mpidist.nn.Sequential, list of layers, or torch.nn.Module
        The layers themselves, or the parameters of a traced module, go into the stages; nothing is
        copied.
    stages : int
        Number of stages; each gets at least one layer.
    by : {"parameters", "time"}
        The cost to balance: numbers of parameters, or measured seconds of forward and backward.
    example : tensor, or tuple or dict of tensors, optional
        An input, such as one microbatch.  For ``by="time"``: copies of the layers are measured,
        one at a time; the model, its gradients and random states do not change.  For a traced
        module: a microbatch of the shapes that all microbatches have, as argument, arguments
        (tuple) or keyword arguments (dict) of the module.
    comm : Communicator, optional
        For ``by="time"``: every rank uses the times that rank 0 measured; collective.  Without
        it, ranks measure different times, and may get different stages.
    verbose : bool
        Whether rank 0 of `comm` (by default, of the default communicator) prints the stages and
        their balance; before :func:`mpidist.init`, every process does.  The logger ``"mpidist"``
        gets the same in any case, at level INFO.
    split : list of str, optional
        For a traced module: names of the submodules at which the stages begin, but the first.  By
        default items of its ModuleLists and Sequentials, chosen by numbers of parameters.

    Raises
    ------
    InvalidArgument
        If an argument is invalid.
    Unsupported
        If a module cannot be traced, or for ``by="time"`` a layer not copied; with the reason.

    Returns
    -------
    Partition
        A sequence of stages, with `balance`; its text lists them.
    """
    where = f"rank {comm.rank}: " if comm is not None else ""
    one_of("by", by, BY, where)
    true_or_false("verbose", verbose, where)
    if _is_traced(model, split):
        if by != "parameters":
            raise InvalidArgument(
                f"{where}by={by!r} is for a Sequential: {type(model).__name__} is traced, and cut "
                "by its parameters or at split="
            )
        made = _traced(model, stages, example, split, where)
        _report(made, comm if comm is not None else started(), verbose)
        return made
    if split is not None:
        raise InvalidArgument(
            f"{where}split={split!r} is for a module of PyTorch, model is a {type(model).__name__}"
        )
    layers = _layers(model, where)
    starts = _starts(layers, stages, where)
    kind = _sequential(layers)
    if by == "time":
        if example is None:
            raise InvalidArgument(f"{where}by='time' needs example=, an input of the model")
        costs = measure(layers, example, kind, where)
        if comm is not None:
            costs = comm.broadcast_object(costs if comm.rank == 0 else None)
    else:
        costs = [float(sum(math.prod(p.data.shape) for p in parameters(m))) for m in layers]
    # One cost for each layer with the in-place layers after it, which must not be cut off from it::
    #
    #     layers    Linear  ReLU(inplace)  Linear  Linear
    #     starts    0                      2       3
    stops = [*starts[1:], len(layers)]
    ends = divide([sum(costs[start:stop]) for start, stop in zip(starts, stops)], stages)
    ends = [stops[end - 1] for end in ends]
    ranges = list(zip([0, *ends[:-1]], ends))
    totals = [sum(costs[start:stop]) for start, stop in ranges]
    cut = [kind(*layers[start:stop]) for start, stop in ranges]
    made = Partition(cut, by, totals, ranges, _tie(cut, layers, ranges))
    _keep_mode(model, made)
    _report(made, comm if comm is not None else started(), verbose)
    return made


def _is_traced(model: Any, split: Any) -> bool:
    """Return whether a model is traced: one of PyTorch with a forward of its own, or with split."""
    torch = sys.modules.get("torch")
    if torch is None or not isinstance(model, torch.nn.Module):
        return False
    lists = (torch.nn.Sequential, torch.nn.ModuleList)
    return split is not None or _has_own_forward(model) or not isinstance(model, lists)


def _traced(model: Any, stages: Any, example: Any, split: Any, where: str) -> Partition:
    """Cut a module of PyTorch at `split`, or else by its numbers of parameters."""
    if example is None:
        raise InvalidArgument(
            f"{where}model is a {type(model).__name__}: expected a Sequential, or example=, a "
            "microbatch with which the model is traced"
        )
    stages = whole("stages", stages, 2, where)
    tracing = adapter("torch", "traced")
    if split is not None:
        split = tracing.check_split(model, split, stages, where)

    def choose(parts: list[tuple[str, float]]) -> list[str]:
        if split is not None:
            return list(split)
        if stages > len(parts):
            raise InvalidArgument(
                f"{where}stages={stages!r}: expected 2 … {len(parts)}, the number of submodules at "
                f"which {type(model).__name__} can be cut, or their names in split="
            )
        return [parts[end][0] for end in divide([cost for _, cost in parts], stages)[:-1]]

    made, begins = tracing.cut(model, choose, example, where)
    costs = [float(sum(math.prod(p.shape) for p in stage.parameters())) for stage in made]
    ranges = [(k, k + 1) for k in range(len(made))]
    return Partition(made, "parameters", costs, ranges, _tie(made, made, ranges, False), begins)


def _starts(layers: Sequence[Any], stages: Any, where: str) -> list[int]:
    """Return the indices of the layers that can begin a stage: those that do not work in place.

    Raises InvalidArgument if there are fewer than `stages`.
    """
    starts = [k for k, layer in enumerate(layers) if not (k and getattr(layer, "inplace", False))]
    whole = isinstance(stages, Integral) and not isinstance(stages, bool)
    if not whole or not 1 <= stages <= len(starts):
        raise InvalidArgument(
            f"{where}stages={stages!r}: expected 1 … {len(starts)}, the number of layers that "
            "can begin a stage"
        )
    return starts


def _keep_mode(model: Any, made: Partition) -> None:
    """Set the stages, but not the layers in them, to the model's mode (training or evaluation)."""
    mode = getattr(model, "training", None)
    for stage in made if isinstance(mode, bool) else ():
        stage.training = mode


def _report(made: Partition, comm: Communicator | None, verbose: bool) -> None:
    """Log the stages on rank 0, and print them if `verbose`."""
    if comm is None or comm.rank == 0:
        log.info("partition by %s:\n%s", made.by, made)
        if verbose:
            sys.stdout.write(f"{made}\n")


def _layers(model: Any, where: str) -> list[Any]:
    """List the layers of a Sequential or sequence; raise for any other module."""
    try:
        layers = list(model.layers if isinstance(model, Sequential) else model)
    except TypeError:
        layers = []
    if not layers or not all(callable(layer) for layer in layers) or _has_own_forward(model):
        raise InvalidArgument(
            f"{where}model is a {type(model).__name__}: expected a Sequential of PyTorch or of "
            "mpidist.nn (without a forward() of its own), or another sequence of layers"
        )
    return layers


def _has_own_forward(model: Any) -> bool:
    """Return whether a Sequential has a forward that does more than call its layers in turn."""
    own = getattr(type(model), "forward", None)
    bases = [kind for kind in type(model).__mro__ if kind.__name__ == "Sequential"]
    return bool(bases) and own is not vars(bases[-1]).get("forward")


def _sequential(layers: Sequence[Any]) -> Callable[..., Any]:
    """Return the class Sequential of the layers' library."""
    return sys.modules["torch"].nn.Sequential if library(layers[0]) == "torch" else Sequential
