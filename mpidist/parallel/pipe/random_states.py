"""The random numbers of Python and numpy that a module draws, drawn once more."""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np

States = list[tuple[Any, Any]]
"""Sources of random numbers, and their states."""


class _Python:
    """Python's own source, with the methods that those of numpy have."""

    get_state, set_state = staticmethod(random.getstate), staticmethod(random.setstate)


class _BitGenerator:
    """The source of a :class:`numpy.random.Generator`, with the methods that older ones have."""

    def __init__(self, generator: np.random.Generator):
        self._bits = generator.bit_generator

    def get_state(self) -> Any:
        """Give the state."""
        return self._bits.state

    def set_state(self, state: Any) -> None:
        """Go back to a state."""
        self._bits.state = state


def random_states(module: Any) -> States:
    """Give the states of Python's and numpy's own, and of those that modules have as attributes."""
    parts = module.modules() if callable(getattr(module, "modules", None)) else [module]
    sources: list[Any] = [_Python, np.random]
    for part in parts:
        for value in vars(part).values():
            if isinstance(value, np.random.Generator):
                sources.append(_BitGenerator(value))
            elif isinstance(value, np.random.RandomState):
                sources.append(value)
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
