"""What PyTorch's loss functions take the mean over: targets that are ignored do not count."""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch.nn import functional
from torch.overrides import TorchFunctionMode

from ..errors import InvalidArgument

_MODULES = (torch.nn.CrossEntropyLoss, torch.nn.NLLLoss)
_SIGNATURES = {f: inspect.signature(f) for f in (functional.cross_entropy, functional.nll_loss)}


@dataclass(frozen=True)
class Known:
    """A loss function whose mean is over the targets that count.

    Attributes
    ----------
    function : callable
        The same, not divided if `sums`.
    count : callable
        ``count(target)`` gives what to divide by; None if it is the number of rows.
    sums : bool
        Whether `function` gives sums.
    """

    function: Callable[[Any, Any], Any]
    count: Callable[[Any], float | None]
    sums: bool = True


def known(function: Any) -> Known | None:
    """Tell what a function takes the mean over, if it is one of those that do not count all."""
    original = _uncompiled(function)
    if original is not function:
        found = known(original)  # a mean is as good as a sum: it weighs what counts
        return found and Known(function, found.count, sums=False)
    for kind in _MODULES:
        if isinstance(function, kind) and type(function).forward is kind.forward:
            summed = copy.copy(function)
            summed.reduction = "sum"
            return Known(summed, partial(_count, function.weight, function.ignore_index))
    keywords: dict[str, Any] = {}
    base = function
    if isinstance(function, partial) and not function.args:
        base, keywords = function.func, function.keywords
    if not any(base is f for f in _SIGNATURES):
        return None
    weight, ignored = keywords.get("weight"), keywords.get("ignore_index", -100)
    return Known(
        partial(base, **{**keywords, "reduction": "sum"}), partial(_count, weight, ignored)
    )


def _count(weight: Any, ignored: int, target: Any) -> float | None:
    if target.is_floating_point():  # probabilities of all classes
        return None
    counts = target != ignored
    return float(counts.sum() if weight is None else weight[target[counts]].double().sum())


def _uncompiled(function: Any) -> Any:
    """Give what ``torch.compile`` was given."""
    if isinstance(function, partial):
        inside = _uncompiled(function.func)
        same = inside is function.func
        return function if same else partial(inside, *function.args, **function.keywords)
    if isinstance(function, torch.nn.Module):
        return getattr(function, "_orig_mod", function)
    found = getattr(function, "_torchdynamo_orig_callable", function)
    where = getattr(found, "__globals__", {}).get("__name__", "")
    return found.__wrapped__ if where.startswith("torch._dynamo") else found  # PyTorch's own


def watched(function: Any, sums: bool, rank: int) -> Callable[..., Any] | None:
    """Give ``call(function, output, target)``, which looks at what a function of one's own calls.

    It raises InvalidArgument for means that microbatches cannot be put together from by their
    rows, and for sums that were not announced as such.  What was compiled cannot be looked into:
    it is called once more as it was before, without a graph.
    """
    inside = function.func if isinstance(function, partial) else function
    if not sums and isinstance(inside, (torch.jit.ScriptFunction, torch.jit.ScriptModule)):
        raise InvalidArgument(
            f"rank {rank}: loss_fn is compiled by torch.jit: what it takes the mean over cannot be "
            "seen; allowed with step(…, count=), such as count=len for a mean over the rows"
        )
    original = _uncompiled(function)
    call = _call if original is function else partial(_call_twice, original)
    return partial(call, sums, rank)


def _call_twice(
    original: Any, sums: bool, rank: int, function: Any, output: Any, target: Any
) -> Any:
    with torch.no_grad(), torch.random.fork_rng(devices=[]):
        _call(sums, rank, original, output, target)
    return function(output, target)


def _call(sums: bool, rank: int, function: Any, output: Any, target: Any) -> Any:
    with _Watch(rank) as watch:
        found = function(output, target)
    if not sums and found is watch.sum:
        raise InvalidArgument(
            f"rank {rank}: loss_fn gave what {watch.name} summed up: a mean over the rows is "
            'allowed, or a function with the attribute reduction = "sum"'
        )
    return found


class _Watch(TorchFunctionMode):
    """Sees the loss functions that are called within it."""

    def __init__(self, rank: int):
        super().__init__()
        self._rank = rank
        self.sum: Any = _Watch  # what no function gives
        self.name = ""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = kwargs or {}
        found = func(*args, **given)
        if any(func is f for f in _SIGNATURES):
            self._check(func, _SIGNATURES[func].bind(*args, **given))
        if given.get("reduction") == "sum":
            self.sum, self.name = found, func.__name__
        return found

    def _check(self, func: Any, bound: inspect.BoundArguments) -> None:
        bound.apply_defaults()
        given = bound.arguments
        count = _count(given["weight"], given["ignore_index"], given["target"])
        plain = count is None or (given["weight"] is None and count == given["target"].numel())
        if given["reduction"] == "mean" and not plain:
            raise InvalidArgument(
                f"rank {self._rank}: loss_fn calls {func.__name__} with targets that do not count "
                "or have a weight: what it takes the mean over cannot be seen from outside.  "
                "Allowed are PyTorch's function or module itself (or functools.partial of it), and "
                "step(…, count=) with a function of the target that gives it, such as "
                "lambda target: (target != -100).sum()"
            )
