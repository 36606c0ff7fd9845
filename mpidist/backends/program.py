"""Programs: the messages and actions of a bound call, in the order in which they run."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from operator import setitem
from typing import Any

import numpy as np

from .base import Transfer
from .greeting import Greeting

Action = Callable[[], Any]


def store(target: np.ndarray, source: np.ndarray) -> Action:
    """Return the action that copies an array into another of its length and dtype.

    It is an assignment: for a short array ``np.copyto`` takes three times as long, 0.35 µs.
    """
    return partial(setitem, target, Ellipsis, source)


@dataclass(slots=True)
class Round:
    """One round: actions that pack, then messages, then actions that combine, copy and unpack."""

    before: tuple[Action, ...]
    transfer: Transfer | None
    after: tuple[Action, ...]


@dataclass(slots=True)
class Side:
    """Strands that run concurrently, at most `window` at a time."""

    strands: list[list[Round | Side]]
    window: int


@dataclass(slots=True)
class Program:
    """A schedule bound to memory, ready to be run any number of times, one run at a time.

    Attributes
    ----------
    tags : list of int
        One number: the slot whose tags the next run uses; slot 0 belongs to blocking calls.
    greeting : Greeting or None
        The greetings, if there are messages with ranks of other nodes; each run sets their call.
    """

    items: list[Round | Side]
    finish: tuple[Action, ...]
    scratch_bytes: int
    messages: int
    tags: list[int]
    busy: bool = False
    before: tuple[Action, ...] = ()  # run before the rank is announced; then others may read it
    requests: int = 0  # messages sent and received
    held: int = 0  # the result of `held_bytes`
    greeting: Greeting | None = None
