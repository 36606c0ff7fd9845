"""The benchmarks of training with CUDA tensors, of small models, on ranks that may share a GPU."""

import pytest

from mpidist.bench import pipelines
from mpidist.bench.training import OUR_DDP, measure_models, measure_steps
from tests.support.gpu_kits import NEEDS_GPU, torch_for_gpu

pytestmark = [NEEDS_GPU, pytest.mark.timeout(300)]


@pytest.fixture(autouse=True)
def torch():
    return torch_for_gpu()


def check(comm, results, candidates=()):
    """Check what all of these benchmarks have, and which candidates were measured or refused."""
    assert results.correct and all(row.time_us > 0 for row in results.rows)
    assert len(results.header["gpus"]) == comm.size
    assert results.notes[0] == f"rank 0: {results.header['gpus'][0]}" and "GPU" in results.notes[0]
    measured = {row.candidate for row in results.rows}
    refused = {one.candidate for one in results.unsupported}
    assert not measured & refused and measured | refused == set(candidates)
    assert all(name.startswith(("gloo", "torch pipelining, gloo")) for name in refused), refused
    told = comm.allgather_object([row.to_json() for row in results.rows])
    assert all(other == told[0] for other in told)


def test_measure_steps(comm):
    names = [OUR_DDP, "no communication"]
    if comm.size > 1:
        names += ["one allreduce per parameter", "torch DDP over gloo"]
    results = measure_steps(comm, 2, [0.02], "cuda")
    check(comm, results, names)
    assert any(note.endswith("by the host's clock") for note in results.notes)


@pytest.mark.parametrize("model", ["gpt2", "resnet18", "moe"])
def test_measure_models(comm, model):
    names = [OUR_DDP, "no communication"]
    if comm.size > 1:
        names += ["torch DDP over mpidist, views"]
        names += ["torch DDP over gloo, views", "torch DDP over gloo"]
    check(comm, measure_models(comm, 1, [model], "cuda"), names)


def test_measure_torch(comm):
    from mpidist.bench.torch import GLOO, MPIDIST, WAYS, measure_torch

    names = [GLOO, MPIDIST, *(f"{who}, {way}" for who in (GLOO, MPIDIST) for way in WAYS[1:])]
    for collective in ("all_reduce", "all_gather", "broadcast"):
        results = measure_torch(comm, [collective], [4096], 1, WAYS, "cuda")
        check(comm, results, names)
        assert all(row.correct for row in results.rows)


@pytest.mark.parametrize("step", ["fsdp2", "tensor_parallel"])
def test_measure_torch_steps(comm, step):
    from mpidist.bench.torch import GLOO, MPIDIST, Scale, measure_torch_steps

    if comm.size < 2:
        pytest.skip("needs at least 2 ranks")
    small = Scale(width=64 * comm.size, layers=1, samples=2)
    results = measure_torch_steps(comm, [step], [small], 1, "cuda")
    check(comm, results, [GLOO, MPIDIST, "no communication"])
    assert {row.candidate: row.correct for row in results.rows}[MPIDIST]


def test_measure_pipelines(comm, monkeypatch):
    if comm.size < 2:
        pytest.skip("needs at least 2 ranks")
    monkeypatch.setattr(pipelines, "WIDTHS_AND_ROWS", ((64, 2),))
    names = ["gpipe", "1f1b", "zb-h1", pipelines.OUR_PIPELINE]
    names += [f"{pipelines.TORCH_PIPELINING}, {backend}" for backend in ("mpidist", "gloo")]
    results = pipelines.measure_pipelines(comm, 2, "cuda")
    check(comm, results, names)
    assert [one.candidate for one in results.unsupported] == [names[-1]]
