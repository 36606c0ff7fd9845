"""Steps of a kernel, run in compiled code; only steps without a compiled form return to Python.

The steps are made from the kernel's actions: a copy or a sum becomes the structure that it was
bound to, a barrier a word to write and words to wait for.  All other actions stay Python calls::

    run(sequence) ──► steps.c: COPY, ARRIVE, SUM, MEET, …  until a step needs Python
                  ◄── number of that step, or -1 at the end
    Python runs the step's function, and run() goes on behind it

Used by ``engine/repeated.py``, and for arrivals by ``engine/sequencer.py``.
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
from ..backends.recorder import Track
from ..calls.arrays import address
from . import compiled
from .compiled import ARRIVE, CALL, CHECK, COPY, MEET, SUM, Check, Flight, Meeting, Program, Step
from .conditional import ConditionalAction, TargetedAction

PythonStep = Callable[[int], Any]
"""Runs a step in Python where compiled code cannot; argument: the operation's sequence number."""


class Steps:
    """The steps of a kernel, added in order and then bound into one function.

    A step is a structure for compiled code, such as a copy, or a Python function.

    >>> steps = Steps()
    >>> steps.act([lambda: print("here")])
    >>> steps.bind()(1)
    here
    """

    def __init__(self) -> None:
        self._steps: list[tuple[int, Any]] = []
        self._python_steps: list[PythonStep] = []
        self._step_array: Any = None  # the C structures of all steps, once bound
        self._targeted: dict[TargetedAction, int] = {}

    def act(self, actions: Iterable[Action]) -> None:
        """Add actions: copies and sums as steps of compiled code, all others as Python calls."""
        calls: list[Action] = []
        for action in actions:
            kind, what = _compiled_step(action)
            if kind == CALL and not isinstance(action, ConditionalAction):
                calls.append(action)
                continue
            self._add_call(calls)
            calls = []
            if isinstance(action, TargetedAction):
                self._add_targeted(action)
            elif isinstance(action, ConditionalAction):
                self.conditional(action, _ignoring_sequence(action.action))
            else:
                self._add(kind, what, _never)
        self._add_call(calls)

    def _add_call(self, actions: Sequence[Action]) -> None:
        def run_all(sequence: int) -> None:
            for action in actions:
                action()

        if actions:
            self.call(run_all)

    def _add_targeted(self, targeted: TargetedAction) -> None:
        """Add a check that finds a changed target again, and the step bound to the target."""

        def run_bound(sequence: int) -> None:
            for action in targeted.bound:
                action()

        self.conditional(targeted, _ignoring_sequence(targeted.rebind))
        self._targeted[targeted] = len(self._steps)
        self.call(run_bound)

    def update(self, targeted: TargetedAction) -> None:
        """Bind the step of a targeted action again, after a search for its target."""
        at, bound = self._targeted[targeted], targeted.bound
        kind, what = _compiled_step(bound[0]) if len(bound) == 1 else (CALL, None)
        self._steps[at] = kind, what
        self._step_array[at] = _c_step(kind, what)

    def conditional(self, action: ConditionalAction, python_step: PythonStep) -> None:
        """Add the call ``python_step(sequence)``, skipped while `action` may be skipped.

        Only the words of `action` and their expected values count; `action` itself is not called.
        """
        self._add(CHECK, _check_structure(action), python_step)

    def call(self, python_step: PythonStep) -> None:
        """Add a call of a Python function, with the operation's sequence number, as a step."""
        self._add(CALL, None, python_step)

    def arrive(self, words: WordAddresses, fingerprint: int, otherwise: PythonStep) -> Any:
        """Add the arrival at an operation: announce this rank and wait until all have arrived.

        ``otherwise(sequence)`` goes on waiting in Python if a rank does not arrive soon, or its
        fingerprint differs.  The returned structure's ``mark``, the fingerprint, may be set between
        runs.
        """
        meeting = words.arrival(fingerprint)
        self._steps.append((ARRIVE, meeting))
        self._python_steps.append(otherwise)
        return meeting

    def meet(self, words: WordAddresses, otherwise: PythonStep) -> None:
        """Add a barrier; ``otherwise(sequence)`` goes on waiting in Python if a rank is late."""
        self._add(MEET, words.meeting(), otherwise)

    def _add(self, kind: int, what: Any, python_step: PythonStep) -> None:
        self._steps.append((kind, what))
        self._python_steps.append(python_step)

    def bind(self, words: WordAddresses | None = None) -> Callable[[int], None]:
        """Return ``run(sequence)``, which runs all steps as operation number `sequence`.

        If the steps are all of an operation, its end is recorded in the track of `words`.
        """
        count, python_steps = len(self._steps), tuple(self._python_steps)
        self._step_array = (Step * count)(*starmap(_c_step, self._steps))
        flight = None if words is None else words.flight
        where = None if flight is None else ctypes.addressof(flight)
        program = Program(ctypes.addressof(self._step_array), count, where)
        program.references = self, words
        for targeted in self._targeted:
            self.update(targeted)
            targeted.watchers.add(self)
        run_from = partial(compiled.function("run"), ctypes.addressof(program))
        run_from.program = program  # type: ignore[attr-defined]  # for as long as it may run

        def run(sequence: int) -> None:
            at = run_from(sequence, 0)
            while at >= 0:
                python_steps[at](sequence)
                at = run_from(sequence, at + 1)

        return run


class WordAddresses:
    """Addresses of this rank's word and of the words that it waits for, at an arrival or a barrier.

    `mine` and `others` are indices in `words` of shared memory, which must outlive the steps made
    from this object.  `patience` is the number of reads in a row, then of reads that yield the core
    in between.  The `track` is that of the communicator, in which arrivals are recorded.
    """

    def __init__(
        self,
        words: memoryview,
        mine: int,
        others: Sequence[int],
        patience: tuple[int, int],
        track: Track | None = None,
    ):
        first = _address(words)
        self._mine = first + 8 * mine
        self._others = (ctypes.c_size_t * len(others))(*[first + 8 * n for n in others])
        self._patience = patience
        # Kept, as is the track: whoever has its address may still write there.
        self.flight = None if track is None else Flight(*track.addresses, track.serial)
        self._track = track

    def meeting(self) -> Any:
        """Return the C structure of an arrival or a barrier."""
        looks, yields = self._patience
        others = ctypes.addressof(self._others)
        meeting = Meeting(self._mine, others, len(self._others), looks, yields, 0, 0, 0, None)
        meeting.references = self._others
        return meeting

    def arrival(self, fingerprint: int = 0) -> Any:
        """Return the C structure of the arrival at an operation, which is recorded."""
        meeting = self.meeting()
        meeting.prints, meeting.history, meeting.mark = PRINTS, HISTORY, fingerprint
        if self.flight is not None:
            meeting.flight = ctypes.addressof(self.flight)
            meeting.references = self
        return meeting


def announcing(
    words: memoryview, mine: int, track: Track | None
) -> Callable[[int, int], None] | None:
    """Return ``announce(sequence, fingerprint)`` in compiled code: ``Board.announce``, recorded.

    None without compiled code.
    """
    if not compiled.runs_steps():
        return None
    meeting = WordAddresses(words, mine, (), (0, 0), track).arrival()
    announce = partial(compiled.function("announce"), ctypes.addressof(meeting))
    announce.meeting = meeting  # type: ignore[attr-defined]  # for as long as it may be called
    return announce


def _c_step(kind: int, what: Any) -> Step:
    return Step(kind, None if what is None else ctypes.addressof(what))


def _check_structure(action: ConditionalAction) -> Any:
    """Return the C structure that compares the words of a conditional action."""
    first = _address(action.words)
    words = (ctypes.c_size_t * len(action.indices))(*(first + 8 * n for n in action.indices))
    check = Check(ctypes.addressof(words), ctypes.addressof(action.expected), len(action.indices))
    check.references = words, action
    return check


def _address(words: memoryview) -> int:
    return ctypes.addressof(ctypes.c_char.from_buffer(words))


def _ignoring_sequence(action: Action) -> PythonStep:
    return lambda sequence: action()


def _never(sequence: int) -> None:
    raise AssertionError("a step of compiled code cannot be run in Python")


def _compiled_step(action: Action) -> tuple[int, Any]:
    """Return (kind, C structure) of an action's compiled step, or (CALL, None) without one."""
    if not isinstance(action, partial):
        return CALL, None
    for kind, name in ((SUM, "sum"), (COPY, "copy")):
        if action.func is compiled.function(name):
            return kind, action.structure  # type: ignore[attr-defined]
    if action.func is not setitem:
        return CALL, None
    target, _, source = action.args
    return (COPY, compiled.copy(target, source)) if _is_byte_copy(target, source) else (CALL, None)


def _is_byte_copy(target: Any, source: Any) -> bool:
    """Return whether assigning `source` to `target` only copies bytes of two arrays."""
    # Of arrays at one address nothing is to be copied: numpy's assignment notices it, and does
    # nothing.  Others may overlap: the compiled copy moves the bytes as if by a copy elsewhere.
    return (
        isinstance(source, np.ndarray)
        and target.dtype == source.dtype
        and target.size == source.size
        and target.flags.c_contiguous
        and source.flags.c_contiguous
        and not (target.nbytes and address(target) == address(source))
    )
