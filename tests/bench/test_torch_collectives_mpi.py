"""The benchmark of torch.distributed, of small tensors."""

import pytest

from mpidist.errors import InvalidArgument
from tests.support.training_kits import NEEDS_TORCH, torch

if torch is not None:
    from mpidist.bench import torch as torch_bench
    from mpidist.bench.cases import BARE
    from mpidist.bench.torch import GLOO, OURS, WAYS, measure_torch

pytestmark = pytest.mark.skipif(torch is None, reason=NEEDS_TORCH)


@pytest.mark.parametrize("name", ["all_reduce", "all_gather", "broadcast"])
def test_rows(comm, name, monkeypatch):
    monkeypatch.setattr(torch_bench, "MOST_QUEUED", 3)
    results = measure_torch(comm, [name], [64], 1, WAYS[1:])
    ways = [f"{who}, {way}" for way in WAYS[1:] for who in (GLOO, OURS)]
    assert [row.candidate for row in results.rows][:-1] == [BARE, GLOO, OURS, *ways]
    assert results.correct and all(row.correct and row.time_us > 0 for row in results.rows)
    times = {row.candidate: row.time_us for row in results.rows if row.memory == "private"}
    for row in results.rows:
        _, comma, way = row.candidate.partition(",")
        assert row.ratio == pytest.approx(times[GLOO + comma + way] / row.time_us)


def test_wrong_names(comm):
    with pytest.raises(InvalidArgument, match="'all_sum'.*all_reduce"):
        measure_torch(comm, ["all_sum"], [4], 1)
    with pytest.raises(InvalidArgument, match="'slow'.*queued"):
        measure_torch(comm, [], [4], 1, ["slow"])
