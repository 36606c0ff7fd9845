"""Programs: the messages and actions of a bound call, in the order in which they run."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from operator import setitem
from typing import Any, Protocol

import numpy as np

from .base import Transfer

Action = Callable[[], Any]


def store(target: np.ndarray, source: np.ndarray) -> Action:
    """Return the action that copies an array into another of its length and dtype.

    It is an assignment: for a short array ``np.copyto`` takes three times as long, 0.35 µs.
    """
    return partial(setitem, target, Ellipsis, source)


@dataclass(slots=True)
class Round:
    """One round: actions that pack, then messages, then actions that combine, copy and unpack.

    `transfer` has the messages; it is None if there are none.
    """

    before: tuple[Action, ...]
    transfer: Transfer | None
    after: tuple[Action, ...]


@dataclass(slots=True)
class Side:
    """Strands (independent lists of rounds) that run concurrently, at most `window` at a time."""

    strands: list[list[Round | Side]]
    window: int


class OperationCheck(Protocol):
    """A part of a program that checks that the ranks run the same operation."""

    def name(self, sequence: int, operation: str, fingerprint: int) -> None:
        """Record the operation that the next run serves: its number, text and fingerprint."""


@dataclass(slots=True)
class Program:
    """A call bound to memory, ready to be run any number of times, one run at a time."""

    items: list[Round | Side]
    finish: tuple[Action, ...] = ()  # after the last item, once the result is complete
    scratch_bytes: int = 0
    messages: int = 0  # sent
    # One number, set before each run: the bank of the run among the pending operations, which
    # selects its range of message tags, or its barrier counters; 0 for blocking calls.  In a list,
    # which the program's parts share: they read it at each run.
    bank: list[int] = field(default_factory=lambda: [0])
    busy: bool = False  # a run in the background is pending
    # Before this rank announces its arrival; other ranks may then read the results.
    before: tuple[Action, ...] = ()
    requests: int = 0  # messages sent and received
    meets: bool = False  # a run waits for all ranks first, and does only `before` until then
    # A wait inside can end at the deadline; a call of a library cannot: the watchdog watches it.
    interruptible: bool = True
    # A run is announced as one numbered operation; else it makes calls that are announced.
    announced: bool = True
    slot: int | None = None  # index of the staging slot in shared memory; unlike `bank`
    named: OperationCheck | None = None  # compares the ranks' operations; told that of each run
    # ``begin(give)`` starts a run in the background that is not `announced`, and returns its Work;
    # ``give()`` returns the user's result at the end.
    begin: Callable[[Callable[[], Any]], Any] | None = None
    # ``queue(check)`` queues a run in the background on a stream of a GPU, which the engine does
    # not poll.  It returns ``done()``, whether the run has ended, and ``end()``, which makes the
    # streams of the call's arrays wait for it.  ``check()``, called until then by any thread,
    # raises if the ranks' calls differ.
    queue: Callable[[Action], tuple[Callable[[], bool], Action]] | None = None
    held: int = 0  # bytes of memory; 0 until engine.binding.held_bytes has counted them


def library_call(*actions: Action) -> Program:
    """Return the program of a library's blocking call, which starts once all ranks have arrived."""
    items: list[Round | Side] = [Round((), None, actions)]
    return Program(items, meets=True, interruptible=False)
