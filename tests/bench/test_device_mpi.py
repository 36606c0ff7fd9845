"""The device of a benchmark: refusals where there is no GPU, and arrays on an emulated one."""

import sys

import numpy as np
import pytest

from mpidist.bench import Results
from mpidist.bench.device import filled, until_idle, use_device
from mpidist.bench.pipelines import engine_cost, measure_pipelines
from mpidist.bench.training import communication, measure_models, measure_steps
from mpidist.errors import InvalidArgument
from tests.support.training_kits import NEEDS_TORCH, torch

needs_torch = pytest.mark.skipif(torch is None, reason=NEEDS_TORCH)


def test_use_device_of_the_host_changes_nothing(comm):
    results = Results()
    use_device(comm, "cpu", results)
    assert results == Results()


def test_use_device_refuses_ranks_without_pytorch(comm, monkeypatch):
    monkeypatch.setitem(sys.modules, "torch", None)
    with pytest.raises(InvalidArgument, match="--device cuda: on rank 0.*: pip install torch"):
        use_device(comm, "cuda", Results())


@needs_torch
def test_use_device_names_each_rank_without_a_gpu(comm, monkeypatch):
    ranks = ", ".join(map(str, range(comm.size)))
    monkeypatch.setattr(torch.backends.cuda, "is_built", lambda: False)
    with pytest.raises(InvalidArgument, match=f"--device cuda: on rank {ranks}: .*without CUDA"):
        use_device(comm, "cuda", Results())
    monkeypatch.setattr(torch.backends.cuda, "is_built", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(InvalidArgument, match=f"--device cuda: on rank {ranks}: .*sees no GPU"):
        use_device(comm, "cuda", Results())


@needs_torch
def test_use_device_refuses_ranks_whose_gpu_cupy_cannot_use(comm, monkeypatch):
    from mpidist.gpu import assignment

    monkeypatch.setattr(torch.backends.cuda, "is_built", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(assignment.find, "why_no_device", lambda: "cupy cannot be imported")
    with pytest.raises(InvalidArgument, match="--device cuda: rank .*cupy cannot be imported"):
        use_device(comm, "cuda", Results())


@needs_torch
def test_every_benchmark_of_training_refuses_a_gpu_that_is_not_there(comm, monkeypatch):
    from mpidist.bench.torch import Scale, measure_torch, measure_torch_steps

    monkeypatch.setattr(torch.backends.cuda, "is_built", lambda: False)
    calls = [
        lambda: measure_steps(comm, 1, [1], device="cuda"),
        lambda: measure_models(comm, 1, ["gpt2"], device="cuda"),
        lambda: measure_torch(comm, ["broadcast"], [4], 1, device="cuda"),
    ]
    if comm.size > 1:
        scale = Scale(64 * comm.size)
        calls.append(lambda: measure_pipelines(comm, 1, device="cuda"))
        calls.append(lambda: measure_torch_steps(comm, ["fsdp2"], [scale], 1, device="cuda"))
    for call in calls:
        with pytest.raises(InvalidArgument, match="--device cuda: .*without CUDA"):
            call()


def test_filled_is_on_the_device(comm, emulated_device):
    assert (filled("cpu", (2, 3), 5, np.float32) == np.full((2, 3), 5, np.float32)).all()
    there = filled("cuda", (2, 3), 5, np.float32)
    until_idle("cuda")()
    assert hasattr(there, "__cuda_array_interface__") and there.dtype == np.float32
    assert (there.get() == 5).all()


def test_rows_of_arrays_on_the_device(comm, emulated_device):
    rows = communication(comm, rounds=2, count=20, elements=10, device="cuda")
    assert len(rows) == 2 and all(row.time_us > 0 for row in rows)
    if comm.size > 1:
        costs = engine_cost(comm, 2, microbatches=4, device="cuda")
        assert [cost.candidate for cost in costs] == ["gpipe", "1f1b", "zb-h1"]
