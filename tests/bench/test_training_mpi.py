"""The benchmark of training, on networks that are small."""

import numpy as np
import pytest

from mpidist.bench import training
from mpidist.bench.training import OURS, communication, describe
from mpidist.errors import InvalidArgument
from tests.support.training_kits import NEEDS_TORCH, torch


def check(comm, rows, names):
    assert [row.candidate for row in rows] == names
    assert all(row.time_us > 0 for row in rows)
    assert rows[0].ratio == 1
    assert rows[1].ratio == pytest.approx(rows[0].time_us / rows[1].time_us)
    told = comm.allgather_object([row.to_json() for row in rows])
    assert all(other == told[0] for other in told)


def test_communication(comm):
    rows = communication(comm, rounds=2, count=20, elements=10)
    check(comm, rows, [OURS, "one allreduce per parameter"])


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
def test_training(comm):
    from mpidist.bench.training import mlp_steps

    names = [OURS, "no communication"]
    if comm.size > 1:
        names += ["one allreduce per parameter", "torch DDP over gloo"]
    rows, stats = mlp_steps(comm, rounds=2, width=16)
    check(comm, rows, names)
    assert f"overlap '{stats.overlap}'" in describe(stats) and " ms, hidden " in describe(stats)


@pytest.mark.skipif(torch is None, reason=NEEDS_TORCH)
def test_models(comm, monkeypatch):
    from mpidist.bench import models
    from mpidist.bench.training import model_steps
    from mpidist.commands.bench.ddp import MODELS

    assert tuple(models.MODELS) == MODELS
    small = {
        "gpt2": lambda: (models.Language(True, 20, 64, 1), language),
        "bert": lambda: (models.Language(False, 20, 64, 1), classifier),
        "lstm": lambda: (models.Recurrent(20, 8), language),
        "moe": lambda: (models.Experts(4, 8, 4), experts),
    }
    words = torch.arange(6).reshape(2, 3) + comm.rank

    def language(model):
        return torch.nn.functional.cross_entropy(model(words).flatten(0, 1), words.flatten())

    def classifier(model):
        return torch.nn.functional.cross_entropy(model(words), words[:, 0] % 2)

    def experts(model):
        return model(torch.ones(3, 4)).pow(2).mean()

    names = [OURS, "no communication"]
    if comm.size > 1:
        names += ["torch DDP over mpidist, views"]
        names += ["torch DDP over gloo, views", "torch DDP over gloo"]
    for name, make in small.items():
        monkeypatch.setitem(models.MODELS, name, make)
        rows, stats = model_steps(comm, 2, name)
        check(comm, rows, names)
        assert rows[0].work.startswith(f"step, {name} of ") and stats.steps >= 5
    net, loss = models.resnet18()
    assert sum(p.numel() for p in net.parameters()) == 11_173_962 and loss(net).isfinite()


@pytest.mark.skipif(torch is None, reason=NEEDS_TORCH)
def test_steps_over_torch_distributed(comm, monkeypatch):
    from mpidist.bench import torch as torch_bench
    from mpidist.bench.torch import STEPS, Scale, measure_torch_steps
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
