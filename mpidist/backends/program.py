"""Programs: the messages and actions of a call, in the order in which they run."""

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
    """Give the action that copies an array into another of its length and dtype.

    An assignment: for a short array ``np.copyto`` takes three times as long, 0.35 µs.
    """
    return partial(setitem, target, Ellipsis, source)


@dataclass(slots=True)
class Round:
    """What the engine does in one round: pack, move, then combine, copy and unpack in order."""

    before: tuple[Action, ...]
    transfer: Transfer | None
    after: tuple[Action, ...]


@dataclass(slots=True)
class Side:
    """Strands run side by side, `window` at a time."""

    strands: list[list[Round | Side]]
    window: int


@dataclass(slots=True)
class Program:
    """A schedule bound to memory, ready to be run any number of times, one run at a time.

    Attributes
    ----------
    tags : list of int
        The number of the slot whose tags the next run has; 0 is that of blocking calls.
    greeting : Greeting or None
        Where there are messages with ranks of other nodes: it is to be told what each run serves.
    """

    items: list[Round | Side]
    finish: tuple[Action, ...]
    scratch_bytes: int
    messages: int
    tags: list[int]
    busy: bool = False
    before: tuple[Action, ...] = ()  # done before this rank is announced: others may read it then
    requests: int = 0  # messages sent and received
    held: int = 0  # what `held_bytes` found
    greeting: Greeting | None = None
