"""State of a stage: its sources of random numbers, and its part of a checkpoint."""

from __future__ import annotations

import logging
import random
import sys
from bisect import bisect
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import accumulate
from typing import Any

import numpy as np

from ..checkpoint.state import read_all
from ..errors import InvalidArgument
from ..frameworks.base import library
from ..frameworks.generators import Source
from ..measure import counted
from ..nn import Sequential
from ..parallel.ddp import DDP, is_state

log = logging.getLogger("mpidist")
States = list[tuple[Source, Any]]
"""Sources of random numbers, and their states."""


def random_states(module: Any = None) -> States:
    """Return the random generators of Python, numpy, PyTorch and a module, with their states.

    A module's own are generators of numpy that its layers have as attributes.
    """
    sources = [Source(random), Source(np.random)]
    if "torch" in sys.modules:
        sources.append(Source(sys.modules["torch"]))
    parts = module.modules() if callable(getattr(module, "modules", None)) else [module]
    for part in parts if module is not None else ():
        for value in getattr(part, "__dict__", {}).values():
            if isinstance(value, (np.random.Generator, np.random.RandomState)):
                sources.append(Source(value))
    return [(source, source.get_state()) for source in sources]


@contextmanager
def restored(states: States) -> Iterator[None]:
    """Set random number generators to `states` within the context.

    After it they have the states that they had before it, even after an exception.
    """
    now = [(source, source.get_state()) for source, _ in states]
    for source, state in states:
        source.set_state(state)
    try:
        yield
    finally:
        for source, state in now:
            source.set_state(state)


def parameters(layer: Any) -> list[Any]:
    """List the parameters of a layer; a plain object may have none."""
    return list(layer.parameters()) if callable(getattr(layer, "parameters", None)) else []


def layers_of(module: Any) -> int | None:
    """Return the number of layers of a Sequential whose layers are named 0, 1, …; else None."""
    bare = module.module if isinstance(module, DDP) else module
    if type(bare) is Sequential:
        return len(bare.layers)
    if library(bare) != "torch" or type(bare).__name__ != "Sequential":
        return None
    names = list(bare._modules)
    return len(names) if names == [str(k) for k in range(len(names))] else None


def restage(
    saved: Mapping[int, Mapping[str, Any]],
    count: int,
    layers: Sequence[int | None],
    mine: Collection[int],
    rank: int,
) -> Mapping[int, Any]:
    """Return states of present stages by number, from saved stages that may be cut differently.

    `saved` has `layers` (see :func:`layers_of`) and `state` of each saved stage, by its number, of
    `count` stages in all; if it lacks some, the present pipeline must have as many.  `layers` are
    those of each present stage; the states of `mine`, this rank's, are in the result at least.
    InvalidArgument if the stages differ and their layers are not known or not as many in total.
    """
    wanted = mine if count == len(layers) and len(saved) < count else range(count)
    if missing := sorted(set(wanted) - set(saved)):
        raise InvalidArgument(
            f"rank {rank}: the state has stages {sorted(saved)} of {count}, without {missing}: "
            f"expected all of them, or those of this rank of {len(layers)}: {sorted(mine)}"
        )
    if len(saved) < count:
        return {number: saved[number]["state"] for number in mine}
    before = [saved[number]["layers"] for number in range(count)]
    now, then = _counted(layers), _counted(before)
    if len(before) == len(layers) and (now is None or then is None or now == then):
        return {number: saved[number]["state"] for number in range(count)}
    if now is None or then is None or sum(now) != sum(then):
        raise InvalidArgument(
            f"rank {rank}: the state is of a pipeline of {len(before)} stages with "
            f"{_shown(before)} layers, this one has {len(layers)} with {_shown(layers)}: expected "
            "the same number of stages, or only Sequential stages with as many layers in total"
        )
    # Layers keep their order; a name begins with the number within its stage.  4 layers::
    #
    #     saved     0.weight 1.weight 2.weight | 0.weight      stages of 3 and 1 layers
    #     present   0.weight 1.weight | 0.weight 1.weight      stages of 2 and 2
    found: list[Any] = [{} for _ in now]
    stops = list(accumulate(now))
    for number, start in enumerate(accumulate(then[:-1], initial=0)):
        for name, value in module_state(saved[number]["state"]).items():
            layer, _, rest = name.partition(".")
            k = start + int(layer)
            stage = bisect(stops, k)
            found[stage][f"{k - stops[stage] + now[stage]}.{rest}"] = value
    return dict(enumerate(found))


def _counted(layers: Sequence[int | None]) -> list[int] | None:
    """Return the numbers of layers of the stages; None if one of them is unknown."""
    known = [count for count in layers if count is not None]
    return known if len(known) == len(layers) else None


def _shown(layers: Sequence[int | None]) -> str:
    return ", ".join("?" if count is None else str(count) for count in layers)


def resume_state(module: Any) -> Any:
    """Return ``state_dict()`` of a module; of a DDP ``resume_state()``: also buckets and hook."""
    return module.resume_state() if isinstance(module, DDP) else module.state_dict()


def module_state(state: Any) -> Any:
    """Return a module's own state, given its state or that of a DDP around it."""
    return state["module"] if is_state(state) else state


def load_stage(module: Any, state: Any) -> None:
    """Load a state into a module in place; `module` may be a DDP, `state` that of a DDP."""
    if isinstance(module, DDP) and is_state(state):
        ranks = state["sending"]["ranks"]
        if state.get("hook") and ranks != module.comm.size:
            if module.comm.rank == 0:
                log.warning(
                    "what the communication hook of a stage has left out on %s is dropped: this "
                    "job has %s of it",
                    counted(ranks, "replica"),
                    counted(module.comm.size, "replica"),
                )
            state = {**state, "hook": {}}
        module.load_state_dict(state)
        return
    bare = module.module if isinstance(module, DDP) else module
    bare.load_state_dict(read_all(module_state(state)))
