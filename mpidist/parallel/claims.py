"""Who averages a parameter: one wrapper at a time."""

from __future__ import annotations

import gc
import threading
from collections.abc import Sequence
from typing import Any
from weakref import WeakSet

_lock = threading.Lock()
_claims: WeakSet[Claim] = WeakSet()


class Claim:
    """The parameters of a wrapper, which has them from `begin` until it is closed or dropped.

    Two wrappers of one parameter would both send its gradient, each from a buffer of its own.

    Parameters
    ----------
    named : sequence of (str, parameter)
        The parameters.
    """

    def __init__(self, named: Sequence[tuple[str, Any]]):
        self._names = {id(p): name for name, p in named}
        self._kept = [p for _, p in named]  # while it is alive nobody else has its id

    def refusal(self, rank: int) -> str:
        """Say that another wrapper has some of them, if one has.

        A dropped one may be alive on some ranks only, as the garbage collector comes when it
        likes: so whoever asks tells the other ranks.
        """
        taken = self._taken()
        if taken:
            gc.collect()  # what a traceback or a cycle holds was dropped by the user
            taken = self._taken()
        names = ", ".join(taken)
        said = f"rank {rank}: the module has {names}, which another DDP averages: close() that one"
        return f"{said} first" if taken else ""

    def _taken(self) -> list[str]:
        with _lock:
            others = [claim._names for claim in _claims]
        return [name for i, name in self._names.items() if any(i in names for names in others)]

    def begin(self) -> None:
        """Keep them: the wrapper is made; one that could not be made, a traceback may hold."""
        with _lock:
            _claims.add(self)

    def end(self) -> None:
        """Let others have them."""
        with _lock:
            _claims.discard(self)
