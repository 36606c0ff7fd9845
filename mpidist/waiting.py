"""How to wait: a few looks, then yielding the core, then short sleeps; never past the deadline.

Measured on 2 cores: pure spinning with more ranks than cores costs 5–20 ms a collective;
``time.sleep(0)`` costs 37–190 µs and is no yield; sleeping from the start stalls large messages,
which only move while someone looks.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable

LOOKS = 64
SPINS = 400  # looks at a word of shared memory, 20 µs: it is cheaper than a test of messages
SPINS_CROWDED = 20
LOOKS_CROWDED = 4  # with more ranks than cores, whom we wait for may need this core
YIELD_SECONDS = 0.05
SLEEP_SECONDS = 200e-6


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
    for _ in range(looks):
        if test():
            return True
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
    while True:
        if test():
            return True
        if progress is not None:
            progress()
        if nudge is not None:
            nudge()
        if deadline is not None and time.monotonic() > deadline:
            return test()
        time.sleep(SLEEP_SECONDS)
