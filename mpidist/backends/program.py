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
    """A call bound to memory, ready to be run any number of times, one run at a time.

    Attributes
    ----------
    items : list of Round or Side
        The messages and actions, in order.
    finish : tuple of callable
        Actions after the last item, once the result is complete.
    scratch_bytes : int
        Bytes of scratch memory.
    messages, requests : int
        Number of messages sent; of messages sent and received.
    tags : list of int
        One number, set before each run: the slot of the run among the pending operations, which
        selects its range of message tags, or its barrier counters; 0 for blocking calls.
    busy : bool
        Whether a run in the background is pending.
    before : tuple of callable
        Actions before this rank announces its arrival; other ranks may then read their results.
    meets : bool
        Whether a run waits for all ranks first, and does only `before` until then.
    interruptible : bool
        Whether a wait inside can end at the deadline; a call of a library cannot, so the watchdog
        watches it.
    announced : bool
        Whether a run is announced as one numbered operation; if not, the run makes calls, each of
        which is announced.
    slot : int or None
        Index of the staging slot, a part of shared memory, that the program uses; unlike `tags`.
    named : OperationCheck or None
        The part that compares the ranks' operations, if any; told the operation of each run.
    begin : callable or None
        ``begin(give)`` starts a run in the background that is not `announced`, and returns its
        Work; ``give()`` returns the user's result at the end.
    queue : callable or None
        ``queue(check)`` queues a run in the background on a stream of a GPU, which the engine does
        not poll.  It returns ``done()``, whether the run has ended, and ``end()``, which makes the
        streams of the call's arrays wait for it.  ``check()``, called until then by any thread,
        raises if the ranks' calls differ.
    held : int
        Bytes of memory that the program holds; 0 until
        :func:`~mpidist.engine.binding.held_bytes` has counted them.
    """

    items: list[Round | Side]
    finish: tuple[Action, ...] = ()
    scratch_bytes: int = 0
    messages: int = 0
    tags: list[int] = field(default_factory=lambda: [0])
    busy: bool = False
    before: tuple[Action, ...] = ()
    requests: int = 0
    meets: bool = False
    interruptible: bool = True
    announced: bool = True
    slot: int | None = None
    named: OperationCheck | None = None
    begin: Callable[[Callable[[], Any]], Any] | None = None
    queue: Callable[[Action], tuple[Callable[[], bool], Action]] | None = None
    held: int = 0


def library_call(*actions: Action) -> Program:
    """Return the program of a library's blocking call, which starts once all ranks have arrived."""
    items: list[Round | Side] = [Round((), None, actions)]
    return Program(items, meets=True, interruptible=False)
