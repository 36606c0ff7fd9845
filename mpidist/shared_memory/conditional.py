"""Actions that are only needed if words in shared memory are not what they were before.

Python does them each time; compiled code looks at the words and leaves them out.
"""

from __future__ import annotations

import ctypes
import weakref
from collections.abc import Callable, Sequence
from typing import Any

from ..backends.program import Action

_NEVER = -(1 << 62)  # what no word is


class Unless:
    """An action that may be left out while words are as expected.

    Parameters
    ----------
    words : writable memoryview of int64
        The memory.
    places : sequence of int
        Indices of the words, of blocking calls.
    expected : sequence of int
        What they are when the action is not needed.
    act : callable
        The action.

    Attributes
    ----------
    expected : array of int64
        May be changed; see `doubt`.
    """

    __slots__ = ("words", "places", "expected", "act", "__weakref__")

    def __init__(
        self, words: memoryview, places: Sequence[int], expected: Sequence[int], act: Action
    ):
        self.words, self.places, self.act = words, tuple(places), act
        self.expected = (ctypes.c_int64 * len(self.places))(*expected)

    def __call__(self) -> Any:
        """Do it."""
        return self.act()

    def expect(self, values: Sequence[int]) -> None:
        """Say what the words are when the action is not needed."""
        for n, value in enumerate(values):
            self.expected[n] = value

    def doubt(self, _: object = None) -> None:
        """Have the action done the next time, whatever the words are."""
        self.expected[0] = _NEVER


class Aimed(Unless):
    """An action with a target that words tell: it is bound to it, and bound anew if they change.

    Parameters
    ----------
    words, places
        See :class:`Unless`; they tell the target.
    find : callable
        Finds the target and gives the actions bound to it; it says what the words are by `expect`
        of what it is given.

    Attributes
    ----------
    bound : list of callable
        What to do, as it was bound last.
    watchers : set
        Who is told by ``renew(aimed)`` when a target was found: they share the expected words.
    """

    __slots__ = ("bound", "watchers", "_find")

    def __init__(
        self, words: memoryview, places: Sequence[int], find: Callable[[Aimed], list[Action]]
    ):
        super().__init__(words, places, [_NEVER] * len(places), self.look)
        self._find = find
        self.bound: list[Action] = []
        self.watchers: weakref.WeakSet[Any] = weakref.WeakSet()

    def look(self) -> None:
        """Find the target."""
        self.bound = self._find(self)
        for watcher in self.watchers:
            watcher.renew(self)

    def __call__(self) -> None:
        """Find the target and do what is bound to it."""
        self.look()
        for action in self.bound:
            action()
