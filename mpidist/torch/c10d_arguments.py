"""Arguments of a process group's calls, in the forms of c10d and of torch.distributed."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import torch
from torch import Tensor
from torch.distributed import distributed_c10d as c10d

from ..device import tensors as host
from ..errors import InvalidArgument
from .work import uncompiled

NAMES_OF_C10D = {
    "tensors": ("tensor",),
    "outputs": ("output_tensors", "output_tensor", "output_lists", "output"),
    "inputs": ("input_tensors", "input_tensor", "input_list", "input"),
    "output": ("outputTensor",),
    "input": ("inputTensor",),
    "output_splits": ("output_split_sizes",),
    "input_splits": ("input_split_sizes",),
    "opts": ("root", "op"),
    "peer": ("dstRank", "srcRank"),
}
"""For parameters of the methods of a process group: their names in c10d's forms."""

# Of methods with one list of tensors.
_OPTIONS = frozenset({c10d.AllreduceOptions, c10d.ReduceOptions, c10d.BroadcastOptions})


def gated(method: Callable[..., Any]) -> Callable[..., Any]:
    """Return a method of a group that gets its tensors, also those in lists, from :func:`_plain`.

    Its arguments may have the names of :data:`NAMES_OF_C10D`.  torch.compile skips it, and all that
    it calls.
    """
    own = inspect.signature(method).parameters
    names = {
        theirs: ours
        for ours, some in NAMES_OF_C10D.items()
        for theirs in some
        if ours in own and theirs not in own
    }

    @functools.wraps(method)
    def call(self: Any, *arguments: Any, **named: Any) -> Any:
        if len(arguments) == 2 and not named and type(arguments[1]) in _OPTIONS:
            (x, _) = arguments  # as torch.distributed calls most
            if type(x) is list and len(x) == 1 and type(x[0]) is Tensor:
                return method(self, *arguments)
        single = False
        for x in arguments:
            kind = type(x)
            if kind is Tensor or not (kind is list or kind is tuple or isinstance(x, Tensor)):
                continue
            # As torch.distributed calls most; two lists are those of an alltoall of one rank.
            if kind is list and len(x) == 1 and type(x[0]) is Tensor and not single:
                single = True
                continue
            arguments = tuple([_plain(x, self, method) for x in arguments])
            break
        if named:
            given = {names.get(name, name): _plain(x, self, method) for name, x in named.items()}
            if len(given) < len(named):
                raise TypeError(
                    f"{method.__name__}({', '.join(named)}): two names of one argument: expected "
                    "the names of one of c10d's forms"
                )
            named = given
        return method(self, *arguments, **named)

    return uncompiled(call)


def _plain(x: Any, group: Any, method: Callable[..., Any]) -> Any:
    """Return the plain tensor for a tensor, or a list of them; anything else as it is.

    A plain tensor's elements are the memory it shows.
    """
    if not isinstance(x, Tensor):
        return [_plain(y, group, method) for y in x] if isinstance(x, (list, tuple)) else x
    try:
        # What is dense is copied into one buffer, by PyTorch, which would read freed memory.
        return host.unwrapped(x) if x.layout is torch.sparse_coo else host.plain(x)
    except InvalidArgument as error:
        raise InvalidArgument(
            f"{group.member.what(method.__name__)}: a tensor is {error}"
        ) from None


def one(x: Any) -> Tensor:
    """Return the one tensor of a call: c10d passes it in a list, or by itself."""
    tensors = [x] if isinstance(x, Tensor) else x
    if len(tensors) != 1:
        raise InvalidArgument(f"{len(tensors)} tensors: a process group takes one per call")
    return tensors[0]


def one_list(x: Any) -> Sequence[Tensor]:
    """Return the one list of tensors of a call: c10d passes it in a list, or by itself."""
    if x and isinstance(x[0], Tensor):
        return x
    (tensors,) = x
    return tensors


def options(kind: type, timeout: timedelta | None, given: Any, **fields: Any) -> Any:
    """Return c10d's options of a call: `given` if of type `kind`, else new ones with `fields`."""
    if isinstance(given, kind):
        return given
    made = kind()
    for name, value in fields.items():
        if value is not None:
            setattr(made, name, value)
    if timeout is not None:
        made.timeout = timeout
    return made
