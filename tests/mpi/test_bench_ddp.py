"""The benchmark of training, on networks that are small."""

import pytest
from training_kits import NEEDS_TORCH, torch

from mpidist.bench.training import OURS, communication
from mpidist.commands.bench_ddp import describe


def check(comm, rows, names):
    assert [row.name for row in rows] == names
    assert all(row.seconds > 0 for row in rows)
    assert rows[0].ratio == 1
    assert rows[1].ratio == pytest.approx(rows[0].seconds / rows[1].seconds)
    told = comm.allgather_object([row.as_json() for row in rows])
    assert all(other == told[0] for other in told)


def test_communication(comm):
    rows = communication(comm, rounds=2, count=20, elements=10)
    check(comm, rows, [OURS, "one allreduce per parameter"])


@pytest.mark.skipif(torch is None, reason=NEEDS_TORCH)
def test_training(comm):
    from mpidist.bench.training_torch import training

    names = [OURS, "no communication"]
    if comm.size > 1:
        names += ["one allreduce per parameter", "torch DDP over gloo"]
    rows, stats = training(comm, rounds=2, width=16)
    check(comm, rows, names)
    assert f"overlap '{stats.overlap}'" in describe(stats) and " ms, hidden " in describe(stats)
