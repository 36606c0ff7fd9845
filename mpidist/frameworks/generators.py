"""Sources of random numbers: each rank has its own, and their states go into checkpoints."""

from __future__ import annotations

from typing import Any

import numpy as np

PAIRS = (("getstate", "setstate"), ("get_state", "set_state"), ("get_rng_state", "set_rng_state"))
"""Methods, or functions of a module, that return and take the state: Python, numpy, PyTorch."""


class Source:
    """A source of random numbers, with the methods that all sources here have.

    Parameters
    ----------
    source : object
        Generator or RandomState of numpy, Generator of PyTorch, Random of Python, or one of the
        modules ``random``, ``numpy.random``, ``torch``, ``torch.cuda``.
    """

    def __init__(self, source: Any):
        self._source = source
        self._names = next((pair for pair in PAIRS if all(hasattr(source, x) for x in pair)), None)

    def get_state(self) -> Any:
        """Return the state."""
        if self._names is None:
            return self._source.bit_generator.state
        return getattr(self._source, self._names[0])()

    def set_state(self, state: Any) -> None:
        """Go back to a state."""
        if self._names is None:
            self._source.bit_generator.state = state
        else:
            getattr(self._source, self._names[1])(state)


def source_of(x: Any) -> Source | None:
    """Return the source of random numbers that an object is; None if it is none."""
    if hasattr(x, "state_dict"):
        return None
    pairs = any(all(hasattr(x, name) for name in pair) for pair in PAIRS)
    return Source(x) if pairs or isinstance(x, np.random.Generator) else None
