"""Waiting: a few polls in a row, then polls that yield the core, then sleeps that grow.

No wait outlasts its deadline.  Measured on 2 cores: pure spinning with more ranks than cores costs
5–20 ms per collective; ``time.sleep(0)`` costs 37–190 µs and does not yield.  A rank that only
yields keeps its core busy: with sleeps of 2 % of the time waited so far, a wait of 20 ms takes 3 ms
of processor time instead of 20, and ends 0.2 ms later.

Of ranks that share a core, each yields it at once, and the last to arrive goes on: so p ranks on a
core need p - 1 switches for a meeting, the least that is possible, about 2 µs each.  Code that runs
after a switch is slow, most of all Python's: the processor has forgotten its branches (with the
same addresses in all processes, by ``setarch -R``, calls took 0.65 of the time).  So a short wait
must not leave compiled code (steps.c).

Where the MPI library cannot copy from another process at once, a large message moves in pieces,
only while both ranks poll: with a sleep before each piece 8 MiB took 50 ms instead of 1.  A poll
that moved a piece took longer than usual; no sleep follows it.
"""

from __future__ import annotations

import math
import os
import threading
import time
from collections.abc import Callable

from ..errors import RankFailed

Condition = Callable[[], bool]
Progress = Callable[[], object] | None  # called between polls
LOOKS = 64
SPINS, SPINS_CROWDED = (400, 0), (2, 200)  # reads of shared memory in a row (20 µs), then yields
LOOKS_CROWDED = 4  # with more ranks than cores, the awaited rank may need this core
YIELD_SECONDS = 1e-3  # of yields, before the first sleep
SLEEP_SHARE = 0.02  # length of a sleep, as a share of the time waited so far
LONGEST_SLEEP_SECONDS = 500e-6
GENTLE_SLEEP_SECONDS = 50e-6
COLD = 3  # how much longer a poll takes after a sleep, by caches that have gone cold
MOVING_SECONDS = 200e-6  # of yields, after a poll that probably moved a piece of a message


class _Polling(threading.local):
    """Whether this thread sleeps between the polls of its waits from the start (`gentle`).

    It does while another thread of this process computes, because a thread that only yields keeps
    Python's lock for up to 5 ms.
    """

    gentle = False


POLLING = _Polling()


def spin(words: memoryview, bases: tuple[int, ...], least: int, patience: tuple[int, int]) -> bool:
    """Spin for a short time; return whether words in shared memory have reached a number.

    The words at `bases` must all be `least` or more.  `patience` has the number of reads in a row,
    then of reads that yield the core in between.  Faster than :func:`poll`, but no other operation
    advances meanwhile.
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
    test: Condition,
    deadline: float | None,
    progress: Progress = None,
    looks: int = LOOKS,
    nudge: Progress = None,
    lasts: Progress = None,
) -> bool:
    """Wait until ``test()`` is true; return False if `deadline` passed first.

    `deadline` is a time of ``time.monotonic``; None waits for ever.  The core is yielded for the
    first time after `looks` polls.  Between polls `progress` is called, so that other pending
    operations advance, and, less often (at first about every 20 µs), `nudge`, which lets MPI make
    progress and may raise RankFailed.  `lasts` is called once, when the wait has lasted 1 ms.
    """
    gentle = POLLING.gentle
    for _ in range(min(looks, LOOKS_CROWDED) if gentle else looks):
        if test():
            return True
    began = now = time.monotonic()
    until = now if gentle else now + YIELD_SECONDS
    usual, slept = math.inf, False  # usual processor time of a poll after a sleep
    while True:
        busy = time.thread_time()
        if test():
            return True
        if progress is not None:
            progress()
        if nudge is not None:
            try:
                nudge()
            except RankFailed:
                if test():  # a rank may come, and be lost, between the two looks
                    return True
                raise
        took = time.thread_time() - busy
        now = time.monotonic()
        if deadline is not None and now > deadline:
            return test()
        if now < until:
            if not slept:
                usual = min(usual, COLD * took)
            for _ in range(20):
                if test():
                    return True
                if progress is not None:
                    progress()
                os.sched_yield()
            continue
        if lasts is not None:
            lasts()
            lasts = None
        # A poll that moved a piece has copied it, so it took longer; the 2 µs are for polls so
        # short that half of their time is noise.  The mean follows long polls four times more
        # slowly: else a message of many pieces would make them usual, with a sleep after each
        # (above: 50 ms instead of 1).
        moving = took > 1.5 * usual + 2e-6
        usual = took if usual == math.inf else usual + (took - usual) / (32 if moving else 8)
        if moving:
            began += (now - began) / 2  # halves the next sleeps
            until = now if gentle else now + MOVING_SECONDS
        if not moving or gentle:
            seconds = min(SLEEP_SHARE * (now - began), LONGEST_SLEEP_SECONDS)
            time.sleep(max(seconds, GENTLE_SLEEP_SECONDS) if gentle else seconds)
            slept = True
