"""Waiting: a few polls in a row, then polls that yield the core, then short sleeps.

No wait outlasts its deadline.  Measured on 2 cores: pure spinning with more ranks than cores costs
5–20 ms per collective; ``time.sleep(0)`` costs 37–190 µs and does not yield; sleeping from the
start stalls large messages, which advance only while a rank polls.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable

LOOKS = 64
SPINS, SPINS_CROWDED = (400, 0), (2, 200)  # reads of shared memory in a row (20 µs), then yields
LOOKS_CROWDED = 4  # with more ranks than cores, the awaited rank may need this core
YIELD_SECONDS = 0.05
SLEEP_SECONDS = 200e-6
GENTLE_SLEEP_SECONDS = 50e-6


class _Polling(threading.local):
    """Whether this thread sleeps between the polls of its waits.

    Attributes
    ----------
    gentle : bool
        Whether another thread of this process computes meanwhile: then this one sleeps between
        polls from the start, because a thread that only yields keeps Python's lock for up to 5 ms.
    """

    gentle = False


POLLING = _Polling()


def spin(words: memoryview, bases: tuple[int, ...], least: int, patience: tuple[int, int]) -> bool:
    """Spin for a short time; return whether words in shared memory have reached a number.

    Faster than :func:`poll`, but no other operation advances meanwhile.

    Parameters
    ----------
    words : memoryview of int64
        The shared memory.
    bases : tuple of int
        Indices of the words.
    least : int
        The number that each of them must reach.
    patience : tuple of int
        Number of reads in a row, then of reads that yield the core in between.
    """
    looks, yields = patience
    for base in bases:
        while words[base] < least:
            if looks:
                looks -= 1
            elif yields:
                yields -= 1
                os.sched_yield()
            else:
                return False
    return True


def poll(
    test: Callable[[], bool],
    deadline: float | None,
    progress: Callable[[], object] | None = None,
    looks: int = LOOKS,
    nudge: Callable[[], object] | None = None,
) -> bool:
    """Wait until ``test()`` is true; return False if `deadline` passed first.

    Parameters
    ----------
    test : callable
        The condition to poll.
    deadline : float or None
        A time of ``time.monotonic``; None waits for ever.
    progress : callable, optional
        Called between polls, so that other pending operations advance.
    looks : int
        Number of polls before the core is yielded for the first time.
    nudge : callable, optional
        Called less often than `progress`, at first about every 20 µs.
    """
    gentle = POLLING.gentle
    for _ in range(min(looks, LOOKS_CROWDED) if gentle else looks):
        if test():
            return True
    if gentle:
        return _sleep(test, deadline, progress, nudge, GENTLE_SLEEP_SECONDS)
    until = time.monotonic() + YIELD_SECONDS
    while True:
        for _ in range(20):
            if test():
                return True
            if progress is not None:
                progress()
            os.sched_yield()
        if nudge is not None:
            nudge()
        now = time.monotonic()
        if deadline is not None and now > deadline:
            return test()
        if now > until:
            break
    return _sleep(test, deadline, progress, nudge, SLEEP_SECONDS)


def _sleep(
    test: Callable[[], bool],
    deadline: float | None,
    progress: Callable[[], object] | None,
    nudge: Callable[[], object] | None,
    seconds: float,
) -> bool:
    """Wait as :func:`poll` does, with a sleep of `seconds` between polls."""
    while True:
        if test():
            return True
        if progress is not None:
            progress()
        if nudge is not None:
            nudge()
        if deadline is not None and time.monotonic() > deadline:
            return test()
        time.sleep(seconds)
