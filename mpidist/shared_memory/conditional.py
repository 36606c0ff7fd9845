"""Actions that may be skipped as long as certain words of shared memory are unchanged.

For example, a rank need not write the location of its array again if the note still has it.
Python always runs these actions; compiled code (:mod:`.steps`) compares the words with their
expected values, and calls the action only if they differ.
"""

from __future__ import annotations

import ctypes
import weakref
from collections.abc import Callable, Sequence
from typing import Any

from ..backends.program import Action

_NEVER = -(1 << 62)  # a value that no word has


class ConditionalAction:
    """An action that may be skipped while given words of shared memory have their expected values.

    The words are notes, which a rank writes for the others in
    :class:`~mpidist.shared_memory.barrier.BarrierLines`, in bank 0, which is for blocking calls.
    """

    __slots__ = ("words", "indices", "expected", "action", "__weakref__")

    def __init__(
        self, words: memoryview, indices: Sequence[int], expected: Sequence[int], action: Action
    ):
        self.words, self.indices, self.action = words, tuple(indices), action
        self.expected = (ctypes.c_int64 * len(self.indices))(*expected)

    def __call__(self) -> Any:
        return self.action()

    def set_expected(self, values: Sequence[int]) -> None:
        """Set the values of the words with which the action is not needed."""
        for n, value in enumerate(values):
            self.expected[n] = value

    def invalidate(self, _: object = None) -> None:
        """Make the next run call the action, whatever the words' values."""
        self.expected[0] = _NEVER


class TargetedAction(ConditionalAction):
    """Actions on an array (the target) that words of shared memory identify.

    The actions are bound to the new target if these words change: ``find(self)`` then finds it,
    returns the actions, and calls `set_expected` with the words of that target.  `watchers` are the
    :class:`~mpidist.shared_memory.steps.Steps` that have this action as a step; their
    ``update(self)`` is called after each search.
    """

    __slots__ = ("bound", "watchers", "_find")

    def __init__(
        self,
        words: memoryview,
        indices: Sequence[int],
        find: Callable[[TargetedAction], list[Action]],
    ):
        super().__init__(words, indices, [_NEVER] * len(indices), self.rebind)
        self._find = find
        self.bound: list[Action] = []
        self.watchers: weakref.WeakSet[Any] = weakref.WeakSet()

    def rebind(self) -> None:
        """Find the target, bind the actions to it and update the watchers."""
        self.bound = self._find(self)
        for watcher in self.watchers:
            watcher.update(self)

    def __call__(self) -> None:
        self.rebind()
        for action in self.bound:
            action()
