"""Kernels whose steps run one after another in compiled code, back in Python only where they must.

Read off the kernel itself: a copy and a sum are what they were bound to, a barrier is a word to
write and words to look at.  All else stays a call of Python's.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from itertools import starmap
from operator import setitem
from typing import Any

import numpy as np

from ..backends.board import HISTORY, PRINTS
from ..backends.program import Action
from ..calls.arrays import address
from . import compiled
from .compiled import ARRIVE, CALL, CHECK, COPY, MEET, SUM, Check, Meeting, Program, Step
from .conditional import Aimed, Unless

ByPython = Callable[[int], Any]
"""Does what a step is about, of operation number so and so, where compiled code does not."""


class Steps:
    """The steps of a kernel, to be bound when all are there.

    Examples
    --------
    >>> steps = Steps()
    >>> steps.act([lambda: print("here")])
    >>> steps.bind()(1)
    here
    """

    def __init__(self) -> None:
        self._steps: list[tuple[int, Any]] = []
        self._by_python: list[ByPython] = []
        self._places: Any = None  # of all steps, as compiled code reads them
        self._aims: dict[Aimed, int] = {}

    def act(self, actions: Iterable[Action]) -> None:
        """Add what a rank does."""
        calls: list[Action] = []
        for action in actions:
            kind, what = _recognised(action)
            if kind == CALL and not isinstance(action, Unless):
                calls.append(action)
                continue
            self._act(calls)
            calls = []
            if isinstance(action, Aimed):
                self._aim(action)
            elif isinstance(action, Unless):
                self.unless(action, _of_any_number(action.act))
            else:
                self._add(kind, what, _no_such_step)
        self._act(calls)

    def _act(self, actions: Sequence[Action]) -> None:
        def call(sequence: int) -> None:
            for action in actions:
                action()

        if actions:
            self.call(call)

    def _aim(self, aimed: Aimed) -> None:
        """Add a look for the target, and a step that is another with another target."""

        def act(sequence: int) -> None:
            for action in aimed.bound:
                action()

        self.unless(aimed, _of_any_number(aimed.look))
        self._aims[aimed] = len(self._steps)
        self.call(act)

    def renew(self, aimed: Aimed) -> None:
        """Take the step that has this target anew from what is bound to it."""
        at, bound = self._aims[aimed], aimed.bound
        kind, what = _recognised(bound[0]) if len(bound) == 1 else (CALL, None)
        self._steps[at] = kind, what
        self._places[at] = _step(kind, what)

    def unless(self, expected: Unless, by_python: ByPython) -> None:
        """Add what Python does, unless words are as expected."""
        self._add(CHECK, _check(expected), by_python)

    def call(self, by_python: ByPython) -> None:
        """Add what Python does."""
        self._add(CALL, None, by_python)

    def arrive(self, words: Words, mark: int, otherwise: ByPython) -> Any:
        """Add that the rank is announced, with `mark`, and waits until all have come with the same.

        If they have not come soon, or one with another, `otherwise` goes on.  Returns the structure
        of the meeting, whose ``mark`` may be set between runs.
        """
        told = words.meeting()
        told.prints, told.history, told.mark = PRINTS, HISTORY, mark
        self._steps.append((ARRIVE, told))
        self._by_python.append(otherwise)
        return told

    def meet(self, words: Words, otherwise: ByPython) -> None:
        """Add a barrier; `otherwise` goes on waiting."""
        self._add(MEET, words.meeting(), otherwise)

    def _add(self, kind: int, what: Any, by_python: ByPython) -> None:
        self._steps.append((kind, what))
        self._by_python.append(by_python)

    def bind(self) -> Callable[[int], None]:
        """Give what runs them all, as operation number so and so."""
        count, by_python = len(self._steps), tuple(self._by_python)
        self._places = (Step * count)(*starmap(_step, self._steps))
        program = Program(ctypes.addressof(self._places), count)
        program.kept = self
        for aimed in self._aims:
            self.renew(aimed)
            aimed.watchers.add(self)
        go = partial(compiled.function("run"), program)

        def run(sequence: int) -> None:
            at = go(sequence, 0)
            while at >= 0:
                by_python[at](sequence)
                at = go(sequence, at + 1)

        return run


class Words:
    """The words by which ranks meet: this one's, and those of whom it waits for.

    Parameters
    ----------
    words : writable memoryview of int64
        In shared memory, which must live as long as what is made of this.
    mine : int
        Index of this rank's.
    others : sequence of int
        Indices of the others'.
    patience : tuple of int
        Looks in a row, then looks that give the core away between.
    """

    def __init__(
        self, words: memoryview, mine: int, others: Sequence[int], patience: tuple[int, int]
    ):
        first = _address(words)
        self._mine = first + 8 * mine
        places = map(first.__add__, map((8).__mul__, others))
        self._others = (ctypes.c_size_t * len(others))(*places)
        self._patience = patience

    def meeting(self) -> Any:
        """Give the structure of a meeting."""
        looks, yields = self._patience
        others = ctypes.addressof(self._others)
        told = Meeting(self._mine, others, len(self._others), looks, yields, 0, 0, 0)
        told.kept = self._others
        return told


def _step(kind: int, what: Any) -> Step:
    return Step(kind, None if what is None else ctypes.addressof(what))


def _check(unless: Unless) -> Any:
    """Give the structure of what is looked at."""
    first = _address(unless.words)
    places = (ctypes.c_size_t * len(unless.places))(*(first + 8 * n for n in unless.places))
    told = Check(ctypes.addressof(places), ctypes.addressof(unless.expected), len(unless.places))
    told.kept = places, unless
    return told


def _address(words: memoryview) -> int:
    return ctypes.addressof(ctypes.c_char.from_buffer(words))


def _of_any_number(action: Action) -> ByPython:
    return lambda sequence: action()


def _no_such_step(sequence: int) -> None:
    raise AssertionError("compiled code has no such step")


def _recognised(action: Action) -> tuple[int, Any]:
    """Give the step that does what an action does."""
    if not isinstance(action, partial):
        return CALL, None
    for kind, name in ((SUM, "sum"), (COPY, "copy")):
        if action.func is compiled.function(name):
            return kind, action.args[0]
    if action.func is not setitem:
        return CALL, None
    target, _, source = action.args
    return (COPY, compiled.copy(target, source)) if _alike(target, source) else (CALL, None)


def _alike(target: Any, source: Any) -> bool:
    """Tell whether the bytes of one can be copied into the other."""
    return (
        isinstance(source, np.ndarray)
        and target.dtype == source.dtype
        and target.size == source.size
        and target.flags.c_contiguous
        and source.flags.c_contiguous
        and not (target.nbytes and address(target) == address(source))
    )
