"""The watchdog of native calls, with a clock of its own."""

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
