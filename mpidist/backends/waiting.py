"""How to wait: a few looks, then yielding the core, then short sleeps; never past the deadline.

Measured on 2 cores: pure spinning with more ranks than cores costs 5–20 ms a collective;
``time.sleep(0)`` costs 37–190 µs and is no yield; sleeping from the start stalls large messages,
which only move while someone looks.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable

LOOKS = 64
SPINS, SPINS_CROWDED = (400, 0), (2, 200)  # looks at words of shared memory: 20 µs; then yields
LOOKS_CROWDED = 4  # with more ranks than cores, whom we wait for may need this core
YIELD_SECONDS = 0.05
SLEEP_SECONDS = 200e-6
GENTLE_SLEEP_SECONDS = 50e-6


class _Manners(threading.local):
    """How this thread waits.

    Attributes
    ----------
    gentle : bool
        Whether another thread of this process computes meanwhile: then this one sleeps between
        looks from the start, for one that only yields keeps Python's lock for up to 5 ms.
    """

    gentle = False


MANNERS = _Manners()


def spin(words: memoryview, bases: tuple[int, ...], least: int, patience: tuple[int, int]) -> bool:
    """Look for a short time whether words in shared memory have reached a number.

    This is quicker to see it than :func:`poll`, and nothing else makes progress meanwhile.

    Parameters
    ----------
    words : memoryview of int64
        The memory.
    bases : tuple of int
        Which words.
    least : int
        What each of them must have reached.
    patience : tuple of int
        Looks in a row, then looks that give the core away between.
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
    """Wait until ``test()`` is true; False if `deadline` (of ``time.monotonic``) passed first.

    `progress` is called between looks: whatever else is under way must go on while we wait.  The
    first `looks` are made without giving the core away.  `nudge` is called less often, about every
    20 µs at first: what only has to be done now and then.
    """
    gentle = MANNERS.gentle
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
    """Wait with a sleep of so many seconds between looks."""
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
