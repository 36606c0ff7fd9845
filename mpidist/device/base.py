"""The interface of a device: the operations that communication needs, ordered by streams."""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from contextlib import suppress
from typing import Any, Protocol

import numpy as np


class InFlight:
    """Keeps memory alive until the device work on it is complete; deletion waits for that."""

    def __init__(self) -> None:
        self._held: list[tuple[Event, Any]] = []
        self._events: list[Event] = []
        wait_before_deletion(self, self._events)

    def hold(self, event: Event, memory: Any) -> None:
        """Keep `memory` until `event` is complete; release what was held for completed events."""
        self._held = [pair for pair in self._held if not pair[0].done()]
        self._held.append((event, memory))
        self._events[:] = [event for event, _ in self._held]


def wait_before_deletion(owner: Any, events: Sequence[Event]) -> None:
    """Wait for what `events` contains by then before `owner` is deleted, with its memory."""
    # Not by __del__: in a cycle the events may have been finalized first, and CUDA crashes a
    # process that waits for an event that was destroyed.  A finalizer keeps them alive.
    weakref.finalize(owner, _wait_for, events).atexit = False


def _wait_for(events: Sequence[Event]) -> None:
    for event in events:
        with suppress(Exception):  # an error of the work, or of a call behind it
            event.synchronize()


class Event(Protocol):
    """A mark in a stream; complete when all work queued in the stream before it is complete."""

    def record(self, stream: int) -> None:
        """Put the mark at the end of a stream, in place of any earlier one."""

    def synchronize(self) -> None:
        """Wait on the host until the event is complete; an event never recorded is complete."""

    def block(self, stream: int) -> None:
        """Make later work of a stream wait for the most recently recorded mark of this event."""

    def done(self) -> bool:
        """Return whether the event is complete, without waiting."""


class Device(Protocol):
    """The accelerator that a thread of this process uses.

    Streams are numbers, as in the CUDA Array Interface, where 1 is CUDA's default stream.  Methods
    that queue work on a stream return at once; the work runs in the order in which it was queued.
    """

    name: str  # of the kind of device, such as "cuda"
    # Addresses are those of host memory, which any MPI library takes, and queued work runs in the
    # thread that waits for it.
    emulated: bool
    nccl: bool  # NCCL can use the device
    number: int  # among those that this process may use
    side_by_side: bool  # the work of several processes runs at the same time

    def describe(self) -> str:
        """Return the device's name, with its number if there can be several, for messages."""

    def identity(self) -> str:
        """Return text such as a UUID that no other device of this host has."""

    def enter(self) -> None:
        """Make this device the current one of the calling thread."""

    def is_current(self) -> bool:
        """Return whether this is the current device of this thread."""

    def owns(self, pointer: int) -> bool:
        """Return whether an address is in this device's memory, or managed memory."""

    def empty(self, shape: tuple[int, ...], dtype: np.dtype) -> Any:
        """Return a new array of a users' library, such as cupy, with undefined contents."""

    def pinned(self, nbytes: int) -> np.ndarray:
        """Return `nbytes` bytes of pinned (page-locked) host memory."""

    def page_lock(self, memory: np.ndarray) -> None:
        """Page-lock host memory, so that :meth:`copy` takes its addresses; else Unsupported."""

    def page_unlock(self, memory: np.ndarray) -> None:
        """Undo :meth:`page_lock`; no copy of the memory may be queued any more."""

    def current_stream(self) -> int:
        """Return the stream on which the caller's library queues work now."""

    def new_stream(self) -> int:
        """Return a new stream, concurrent with the others, until :meth:`release_stream`."""

    def release_stream(self, stream: int) -> None:
        """Wait on the host for the work of a stream of :meth:`new_stream`, and release it."""

    def is_capturing(self, stream: int) -> bool:
        """Return whether work queued on a stream is now recorded in a graph, and does not run."""

    def event(self) -> Event:
        """Return a new event, which is complete until it is recorded."""

    def copy(self, target: int, source: int, nbytes: int, stream: int) -> None:
        """Queue a copy to `target` from `source`, addresses on the device or in pinned memory."""

    def synchronize(self, stream: int) -> None:
        """Wait on the host until all work queued on a stream is complete."""

    # -- memory that several processes of one node share ----------------------------------------

    def new_shared(self, nbytes: int) -> tuple[int, bytes]:
        """Allocate zeroed memory; return its address, and the handle for :meth:`open_shared`."""

    def open_shared(self, handle: bytes, nbytes: int) -> int:
        """Open memory of another process; return its address in this one.

        `handle` is that of the other's :meth:`new_shared`.  Raises Unsupported if it fails.
        """

    def close_shared(self, pointer: int) -> None:
        """Close memory opened by :meth:`open_shared`."""

    def release_shared(self, pointer: int) -> None:
        """Free memory of :meth:`new_shared`, which no other process may have open."""

    def wrap(self, pointer: int, shape: tuple[int, ...], dtype: np.dtype, owner: Any) -> Any:
        """Return an array of a users' library, such as cupy, that keeps the memory's owner."""

    def finish(self) -> None:
        """Wait on the host for all work queued on any stream."""

    def write_word(self, pointer: int, value: int, stream: int) -> None:
        """Queue the write of a 32-bit word; other GPUs see all earlier writes before it."""

    def wait_word(self, pointer: int, value: int, stream: int) -> None:
        """Queue a wait until a 32-bit word is at least `value`.

        The sign of their 32-bit difference decides, so a counter in the word may wrap around.
        """

    def digest(self, pointer: int, nbytes: int, sums: int, stream: int) -> None:
        """Queue the addition of an array's digest to the 64-bit words at the address `sums`.

        The array has `nbytes` > 0; see :func:`mpidist.shared_memory.digest.digest`.
        """

    def combines(self, dtype: np.dtype) -> bool:
        """Return whether :meth:`combine` supports a dtype."""

    def combine(
        self,
        op: str,
        dtype: np.dtype,
        sources: Sequence[int],
        targets: Sequence[int],
        count: int,
        divisor: int,
        stream: int,
    ) -> None:
        """Queue a kernel that combines arrays in order and stores the result in all targets.

        `op` is the name of an operation, such as "sum"; `sources` and `targets` are addresses of
        `count` elements each.  The result is divided by `divisor`, if that is more than 1; "mean"
        alone does not divide.
        """


class DeviceClass(Protocol):
    """A class of devices, such as CUDA's: see :func:`~mpidist.device.find.install_device`.

    Its attributes are those of :class:`Device`.
    """

    name: str
    emulated: bool
    nccl: bool

    def __call__(self, number: int | None = None) -> Device:
        """Return a device, by its number; by default the current one."""

    def why_not(self) -> str | None:
        """Return why this process cannot use a device, or None if it can."""

    def identities(self) -> tuple[str, ...]:
        """Return the identity of each device that this process may use, by number."""

    def current(self) -> int:
        """Return the number of this thread's current device."""
