"""What a device is: the few things that moving data needs of it, all ordered by streams."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from typing import Any, Protocol

import numpy as np


class InFlight:
    """Keeps memory until its work is over, and waits for that when it is dropped itself."""

    def __init__(self) -> None:
        self._held: list[tuple[Event, Any]] = []

    def hold(self, event: Event, memory: Any) -> None:
        """Keep memory until an event is over; forget that of earlier ones."""
        self._held = [pair for pair in self._held if not pair[0].done()]
        self._held.append((event, memory))

    def __del__(self) -> None:
        for event, _ in self._held:
            with suppress(Exception):  # the driver may have been shut down with the interpreter
                event.synchronize()


class Event(Protocol):
    """A mark in a stream: over when all that was queued there before it has been done."""

    def record(self, stream: int) -> None:
        """Put the mark at the end of a stream; an earlier one counts no more."""

    def synchronize(self) -> None:
        """Wait on the host; an event that was never recorded is over."""

    def block(self, stream: int) -> None:
        """Have all that is queued on a stream from now on wait for the mark as it is now."""

    def done(self) -> bool:
        """Tell whether it is over, without waiting."""


class Device(Protocol):
    """One accelerator, as this process uses it.

    Streams are numbers, as in the CUDA Array Interface: 0 is the default one.  Whatever takes a
    stream returns at once; the work is done in the order it was queued.
    """

    name: str
    emulated: bool
    number: int

    def describe(self) -> str:
        """Name the device, for people."""

    def identity(self) -> str:
        """Give what no other device of this host has: its UUID."""

    def enter(self) -> None:
        """Make it the device that this thread works with."""

    def is_current(self) -> bool:
        """Tell whether this thread works with it."""

    def owns(self, pointer: int) -> bool:
        """Tell whether an address lies in this device's memory, or memory that it can reach."""

    def empty(self, shape: tuple[int, ...], dtype: np.dtype) -> Any:
        """Make an array that users can work with; its contents are undefined."""

    def pinned(self, nbytes: int) -> np.ndarray:
        """Give bytes of host memory from which copies are asynchronous."""

    def current_stream(self) -> int:
        """Give the stream that the caller's library queues work on now."""

    def new_stream(self) -> int:
        """Make a stream that runs beside the others; it lives as long as the device object."""

    def event(self) -> Event:
        """Make an event."""

    def copy(self, target: int, source: int, nbytes: int, stream: int) -> None:
        """Queue a copy between two addresses, on the device or in pinned memory."""

    def synchronize(self, stream: int) -> None:
        """Wait on the host until all that is queued on a stream has been done."""

    # -- memory that several processes have open, on one node -----------------------------------

    def new_shared(self, nbytes: int) -> tuple[int, bytes]:
        """Allocate zeros; give their address, and the handle by which other processes open them."""

    def open_shared(self, handle: bytes, nbytes: int) -> int:
        """Open another process's memory and give its address here; Unsupported if that fails."""

    def close_shared(self, pointer: int) -> None:
        """Close what :meth:`open_shared` opened."""

    def release_shared(self, pointer: int) -> None:
        """Give back what :meth:`new_shared` made; no other process may have it open."""

    def wrap(self, pointer: int, shape: tuple[int, ...], dtype: np.dtype) -> Any:
        """Make an array, as users work with, of memory that lives as long as it is not released."""

    def finish(self) -> None:
        """Wait on the host for everything that is queued."""

    def write_word(self, pointer: int, value: int, stream: int) -> None:
        """Queue that a word of 32 bits is written, when all before it can be seen by others."""

    def wait_word(self, pointer: int, value: int, stream: int) -> None:
        """Queue a wait until a word is at least `value`, as a difference of 32 bits with a sign."""

    def combines(self, dtype: np.dtype) -> bool:
        """Tell whether :meth:`combine` can be had for a dtype."""

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
        """Queue one pass: combine the sources in their order, divide, store in all targets."""
