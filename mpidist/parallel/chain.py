"""Communication in several steps as one Work: a generator that yields what it waits for."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import wraps
from typing import Any


class Chain:
    """A Work made of others, with computations between them.

    Parameters
    ----------
    steps : generator
        Yields each :class:`~mpidist.Work` that it began, and goes on when that has ended.
    """

    def __init__(self, steps: Iterator[Any]):
        self._steps = steps
        self._under_way: Any = None
        self._done = False
        self._advance()

    def _advance(self) -> None:
        self._under_way = next(self._steps, None)
        self._done = self._under_way is None

    def test(self) -> bool:
        """Make progress; tell whether all has ended."""
        while not self._done and self._under_way.test():
            self._advance()
        return self._done

    def poll(self) -> bool:
        """Make progress with what has begun, and begin nothing; tell whether all has ended."""
        if not self._done:
            self._under_way.test()
        return self._done

    def wait(self, **options: Any) -> None:
        """Wait for the end; options are those of :meth:`mpidist.Work.wait`, for each step."""
        while not self._done:
            self._under_way.wait(**options)
            self._advance()


def chained(steps: Callable[..., Iterator[Any]]) -> Callable[..., Chain]:
    """Make a function of a generator function: its call gives a :class:`Chain`."""

    @wraps(steps)
    def begin(*arguments: Any, **options: Any) -> Chain:
        return Chain(steps(*arguments, **options))

    return begin


class Done:
    """A Work that has ended."""

    def test(self) -> bool:
        """Tell that it has."""
        return True

    def wait(self, **options: Any) -> None:
        """Return at once."""


DONE = Done()
