"""The benchmark of training, on networks that are small."""

import numpy as np
import pytest

from mpidist.bench import training
from mpidist.bench.training import (
    CHECK,
    CHECKED,
    COMMIT,
    COMMITTED,
    OUR_DDP,
    communication,
    describe_stats,
)
from mpidist.parallel.ddp import on_made
from tests.support.bench_kits import check_rows
from tests.support.training_kits import NEEDS_TORCH, torch


def test_communication(comm):
    rows = communication(comm, rounds=2, count=20, elements=10)
    check_rows(comm, rows, [OUR_DDP, "one allreduce per parameter"])


def test_overlap(comm, monkeypatch):
    for name, value in (("LAYERS", 3), ("ELEMENTS", 10), ("SECONDS", 1e-4)):
        monkeypatch.setattr(training, name, value)
    rows = training.overlaps(comm, 3, "waits", training.waiting, autos=1)
    ways = ["none", "polls", "thread"] if comm.size > 1 else ["none"]
    assert [row.candidate for row in rows[:-2]] == ways
    assert rows[-2].candidate in [f"auto 1 ({way})" for way in ways]
    assert rows[-1].candidate == "communication alone"
    assert rows[0].figures["share"] == 1 and "hidden" not in rows[0].figures
    assert all(0 < row.figures["least_us"] <= row.time_us for row in rows)
    told = comm.allgather_object([row.to_json() for row in rows])
    assert all(other == told[0] for other in told)


def test_what_was_hidden(comm, monkeypatch):
    """Of backward or communication, whichever is shorter, by the least times."""
    times = np.array([[10.0, 9.0, 8.0, 11.0, 4.0], [12.0, 10.0, 6.0, 10.0, 5.0]])
    names = ["none", "polls", "thread"] if comm.size > 1 else ["none"]
    chosen = [names.index(name) for name in names] + [3, 4]
    monkeypatch.setattr(training, "race", lambda *_: times[:, chosen])
    rows = {
        row.candidate.partition(" (")[0]: row.figures
        for row in training.overlaps(comm, 2, "waits", training.waiting, autos=1)
    }
    assert rows["auto 1"]["hidden"] == 0 and rows["auto 1"]["share"] == (11 / 10 + 10 / 12) / 2
    if comm.size > 1:
        assert rows["polls"]["hidden"] == 1 / 4 and rows["thread"]["hidden"] == 4 / 4


@pytest.mark.skipif(torch is None, reason=NEEDS_TORCH)
def test_training(comm, caplog):
    from mpidist.bench.training import mlp_steps

    names = [OUR_DDP, "no communication"]
    if comm.size > 1:
        names += ["one allreduce per parameter", "torch DDP over gloo"]
    rows, stats = mlp_steps(comm, rounds=2, width=16)
    check_rows(comm, rows, names)
    rows, _ = mlp_steps(comm, rounds=2, width=16, checked=True, elastic=True)
    ours = [CHECKED, CHECK, COMMITTED, COMMIT]
    check_rows(comm, rows, [*names[:2], *ours, *names[2:]])
    commit, first = rows[5], rows[0]
    assert commit.ratio == pytest.approx(first.time_us / commit.time_us)
    assert not on_made  # its State has ended
    assert "between the step of an optimizer" not in caplog.text  # those of the others
    text = describe_stats(stats)
    assert f"overlap '{stats.overlap}'" in text and " ms, hidden " in text
