"""Whether a flight record moves."""

import os
from types import SimpleNamespace

from mpidist.backends.recorder import Recorder
from mpidist.launcher.movement import Movement


def test_movement(tmp_path, monkeypatch):
    now = [7.0]
    clock = SimpleNamespace(monotonic=lambda: now[0])
    monkeypatch.setattr("mpidist.launcher.movement.time", clock)
    recorder = Recorder(tmp_path / "flights" / "job", 0, 1)
    movement = Movement(str(recorder.job), os.getpid(), 0.05)
    assert movement.still() is False and movement.pause == 0.01
    now[0] += 0.06
    assert movement.still() is True
    recorder.track([0], 0).begin(1, 3)
    assert movement.still() is False
    recorder.path.unlink()
    assert movement.still() is None


def test_process_without_a_record(tmp_path):
    assert Movement(str(tmp_path), os.getpid(), 300).still() is None
