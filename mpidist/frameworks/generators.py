"""Random number generators: each rank has its own, and their states go into checkpoints."""

from __future__ import annotations

from typing import Any

import numpy as np

PAIRS = (("getstate", "setstate"), ("get_state", "set_state"), ("get_rng_state", "set_rng_state"))
"""Methods, or functions of a module, that return and take the state: Python, numpy, PyTorch."""


class Source:
    """A random number generator of any library, with :meth:`get_state` and :meth:`set_state`.

    It is made of a Generator or RandomState of numpy, a Generator of PyTorch, a Random of Python,
    or one of the modules ``random``, ``numpy.random``, ``torch``, ``torch.cuda``.
    """

    def __init__(self, source: Any):
        self._source = source
        self._names = next((pair for pair in PAIRS if all(hasattr(source, x) for x in pair)), None)

    def get_state(self) -> Any:
        """Return the generator's state, an object of its library."""
        if self._names is None:
            return self._source.bit_generator.state
        return getattr(self._source, self._names[0])()

    def set_state(self, state: Any) -> None:
        """Set the generator's state to a result of :meth:`get_state`."""
        if self._names is None:
            self._source.bit_generator.state = state
        else:
            getattr(self._source, self._names[1])(state)


def source_of(x: Any) -> Source | None:
    """Return a :class:`Source` of `x`; None if `x` is not a random number generator."""
    if hasattr(x, "state_dict"):
        return None
    pairs = any(all(hasattr(x, name) for name in pair) for pair in PAIRS)
    return Source(x) if pairs or isinstance(x, np.random.Generator) else None
