"""Hooks that do not keep alive what a user has dropped."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any
from weakref import WeakMethod


def nothing(*_: Any) -> None:
    """Do nothing."""


class Weakly:
    """A form of a method for hooks: these must not keep alive what a user has dropped.

    A copy of it does nothing, in this process or another: who copies a module with its hooks gets
    one that nobody has wrapped.
    """

    def __init__(self, method: Callable[..., object]):
        self._reference = WeakMethod(method)

    def __call__(self, *arguments: Any) -> None:
        """Call the method, if there is still somebody to do that for."""
        act = self._reference()
        if act is not None:
            act(*arguments)

    def __reduce__(self) -> Any:
        return partial, (nothing,)
