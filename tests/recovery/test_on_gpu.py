"""Training on a GPU, which ranks share, goes on after a loss.  Skipped where there is no GPU."""

import pytest

from mpidist.gpu.nccl.backend import lets_share, load
from tests.support.elastic_chaos import train
from tests.support.gpu_kits import NEEDS_GPU

pytestmark = [NEEDS_GPU, pytest.mark.timeout(200)]


@pytest.mark.parametrize("executor", ["", "ipc_slots", "nccl"])
@pytest.mark.parametrize("wrapper", ["ddp", "zero", "torch"])
def test_killed_rank_leaves_same_bits(wrapper, executor):
    """Before, in and behind a call, in which a stream would wait for the lost rank for ever."""
    pytest.importorskip("torch", reason="needs PyTorch")
    where = {"DEVICE": "cuda"} | ({"MPIDIST_GPU": executor} if executor else {})
    if executor == "nccl":
        where["NCCL_MULTI_RANK_GPU_ENABLE"] = "1"
        if not lets_share(load().get_version(), where):
            pytest.skip("this executor cannot be here: ranks share a GPU from NCCL 2.30.3 on")
    finished, _, undisturbed = train(wrapper, 40, 2, 2, **where)
    assert len(undisturbed) == 2 and len(set(undisturbed)) == 1, finished.output
    points = ["before", "after", *["barrier"] * (executor == "ipc_slots")]
    for point in points:
        kills = f"1:{point}:15 0:{point}:40" if point == "barrier" else f"1:{point}:5 0:{point}:15"
        finished, _, done = train(wrapper, 40, 2, 2, KILL=kills, **where)
        assert done == undisturbed, (point, finished.output)
        assert finished.output.count("was killed by signal 9") >= 2, (point, finished.output)
