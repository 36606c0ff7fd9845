"""The benchmark of torch.distributed, of small tensors and models."""

import pytest

from mpidist.errors import InvalidArgument
from tests.support.training_kits import NEEDS_TORCH, torch

if torch is not None:
    from mpidist.bench import torch as torch_bench
    from mpidist.bench.cases import BARE
    from mpidist.bench.torch import (
        GLOO,
        MPIDIST,
        STEPS,
        WAYS,
        Scale,
        measure_torch,
        measure_torch_steps,
    )

pytestmark = pytest.mark.skipif(torch is None, reason=NEEDS_TORCH)


@pytest.mark.parametrize("name", ["all_reduce", "all_gather", "broadcast"])
def test_measure_torch_rows_of_each_way(comm, name, monkeypatch):
    monkeypatch.setattr(torch_bench, "MOST_QUEUED", 3)
    results = measure_torch(comm, [name], [64], 1, WAYS[1:])
    ways = [f"{who}, {way}" for way in WAYS[1:] for who in (GLOO, MPIDIST)]
    assert [row.candidate for row in results.rows][:-1] == [BARE, GLOO, MPIDIST, *ways]
    assert results.correct and all(row.correct and row.time_us > 0 for row in results.rows)
    times = {row.candidate: row.time_us for row in results.rows if row.memory == "private"}
    for row in results.rows:
        _, comma, way = row.candidate.partition(",")
        assert row.ratio == pytest.approx(times[GLOO + comma + way] / row.time_us)


def test_measure_torch_wrong_names_are_refused(comm):
    with pytest.raises(InvalidArgument, match="'all_sum'.*all_reduce"):
        measure_torch(comm, ["all_sum"], [4], 1)
    with pytest.raises(InvalidArgument, match="'slow'.*queued"):
        measure_torch(comm, [], [4], 1, ["slow"])


@pytest.mark.long
def test_measure_torch_steps_rows_and_groups(comm, monkeypatch):
    from mpidist.commands.bench.torch import STEPS as NAMES

    assert tuple(STEPS) == NAMES
    small = Scale(width=64 * comm.size, layers=1, samples=2)
    if comm.size == 1:
        with pytest.raises(InvalidArgument, match="on 1 rank"):
            measure_torch_steps(comm, NAMES, [small], 1)
        return
    with pytest.raises(InvalidArgument, match=f"width=7: expected a multiple of {64 * comm.size}"):
        measure_torch_steps(comm, NAMES, [Scale(width=7)], 1)
    results = measure_torch_steps(comm, NAMES, [small], 1)
    assert [row.candidate for row in results.rows] == ["gloo", "mpidist", "no communication"] * 2
    assert [row.correct for row in results.rows] == [True, True, None] * 2
    assert results.reference == "gloo" and results.rows[3].ratio == 1
    work = [row.work for row in results.rows[::3]]
    assert work[0].startswith("step, FSDP2, width ") and work[1].startswith("step, tensor-parallel")
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        measure_torch_steps(comm, ["tensor_parallel"], [small], 1)
    calls = {event.key: event.count for event in profile.key_averages()}
    assert calls["mpidist:all_reduce"] == calls["gloo:all_reduce"] > 0, "each over its own group"
    # Gradients that are not averaged: each rank trains on its own batch.
    model = torch_bench.Fsdp2.model
    monkeypatch.setattr(torch_bench.Fsdp2, "model", lambda self, mesh: model(self, None))
    wrong = measure_torch_steps(comm, ["fsdp2"], [small], 1)
    assert [row.correct for row in wrong.rows] == [False, False, None]
