"""The random numbers of Python and numpy that a module draws, drawn once more."""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np

from ..generators import Source

States = list[tuple[Any, Any]]
"""Sources of random numbers, and their states."""


def random_states(module: Any) -> States:
    """Give the states of Python's and numpy's own, and of those that modules have as attributes."""
    parts = module.modules() if callable(getattr(module, "modules", None)) else [module]
    sources = [Source(random), Source(np.random)]
    for part in parts:
        for value in vars(part).values():
            if isinstance(value, (np.random.Generator, np.random.RandomState)):
                sources.append(Source(value))
    return [(source, source.get_state()) for source in sources]


@contextmanager
def drawn_again(states: States) -> Iterator[None]:
    """Within it sources give what came after these states; then they go on as if nothing was."""
    now = [(source, source.get_state()) for source, _ in states]
    for source, state in states:
        source.set_state(state)
    try:
        yield
    finally:
        for source, state in now:
            source.set_state(state)
