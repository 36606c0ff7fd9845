"""The watchdog of native calls, with a clock of its own."""

import time
import weakref
from types import SimpleNamespace

import pytest

from mpidist.engine import watchdog


@pytest.mark.parametrize(
    "calls, ended",
    [
        ([7, 7, 7], []),
        ([7, 7, 7, 7], [7]),  # 3 s in one call
        ([7, 7, 8, 8, 9, 9], []),  # many short calls, one after the other
        ([7, 7, 0, 7, 7], []),
        ([0, 0, 0, 0, 0], []),
        ([5, 5, 6, 6, 6, 6], [6]),
    ],
)
def test_deadline_is_of_one_call(monkeypatch, calls, ended):
    now, found = [0.0], []
    monkeypatch.setattr(watchdog.time, "monotonic", lambda: now[0])
    dog, service = watchdog.Watchdog(), SimpleNamespace(inside=0)
    monkeypatch.setattr(dog, "_end", lambda service, sequence, timeout: found.append(sequence))
    for service.inside in calls:
        dog._check(service, 2.5)
        now[0] += 1.0
    assert found == ended


def test_thread_keeps_no_communicator_alive():
    class Sequencer:
        inside, timeout = 0, 0.04

    dog, sequencer = watchdog.Watchdog(), Sequencer()
    kept = weakref.ref(sequencer)
    dog.watch(sequencer)
    time.sleep(0.1)
    del sequencer
    until = time.monotonic() + 60
    while kept() is not None and time.monotonic() < until:
        time.sleep(0.01)
    assert kept() is None
