"""States of stages in a checkpoint: given to the stages that there are now."""

from __future__ import annotations

from bisect import bisect
from collections.abc import Mapping, Sequence
from itertools import accumulate
from typing import Any

from ...errors import InvalidArgument
from ...nn import Sequential
from ..ddp import DDP, is_state
from ..framework import library
from ..tree import read_all


def layers_of(module: Any) -> int | None:
    """Return how many layers a Sequential has; None for what has other names than their numbers."""
    bare = module.module if isinstance(module, DDP) else module
    if type(bare) is Sequential:
        return len(bare.layers)
    if library(bare) != "torch" or type(bare).__name__ != "Sequential":
        return None
    names = list(bare._modules)
    return len(names) if names == [str(k) for k in range(len(names))] else None


def deal(
    saved: Mapping[int, Mapping[str, Any]], layers: Sequence[int | None], rank: int
) -> list[Any]:
    """Return the state for each of the stages that there are now.

    Parameters
    ----------
    saved : mapping of int to mapping
        By number of the stage: its `layers`, see :func:`layers_of`, and its `state`.
    layers : sequence of int or None
        The layers of the stages that there are.
    rank : int
        For error messages.

    Raises
    ------
    InvalidArgument
        If there are other stages, and these cannot be taken apart into layers.
    """
    before = [saved[number]["layers"] for number in range(len(saved))]
    now, then = _counted(layers), _counted(before)
    if len(before) == len(layers) and (now is None or then is None or now == then):
        return [saved[number]["state"] for number in range(len(saved))]
    if now is None or then is None or sum(now) != sum(then):
        raise InvalidArgument(
            f"rank {rank}: the state is of a pipeline of {len(before)} stages with "
            f"{_told(before)} layers, this one is of {len(layers)} with {_told(layers)}: allowed "
            "are as many stages, or stages that all are a Sequential, with as many layers in all"
        )
    found: list[Any] = [{} for _ in now]
    stops = list(accumulate(now))
    for number, start in enumerate(accumulate(then[:-1], initial=0)):
        for name, value in module_state(saved[number]["state"]).items():
            layer, _, rest = name.partition(".")
            k = start + int(layer)
            stage = bisect(stops, k)
            found[stage][f"{k - stops[stage] + now[stage]}.{rest}"] = value
    return found


def _counted(layers: Sequence[int | None]) -> list[int] | None:
    """Return the numbers of layers if all are known."""
    known = [count for count in layers if count is not None]
    return known if len(known) == len(layers) else None


def _told(layers: Sequence[int | None]) -> str:
    return ", ".join("?" if count is None else str(count) for count in layers)


def module_state(state: Any) -> Any:
    """Return the state of the module, without what a DDP around it has added."""
    return state["module"] if is_state(state) else state


def load_stage(module: Any, state: Any) -> None:
    """Have a stage take a state, which may have been that of a stage in a DDP, or not."""
    if isinstance(module, DDP) and is_state(state):
        module.load_state_dict(state)
        return
    bare = module.module if isinstance(module, DDP) else module
    bare.load_state_dict(read_all(module_state(state)))
