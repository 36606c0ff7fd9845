"""What the main job must find, on the simulated backend and under mpiexec."""

import numpy as np

from mpidist.demo import train

SMALL = {
    "epochs": 2,
    "hidden": (32,),
    "batch": 47,
}  # 1438 = 30 * 47 + 28: no rank count divides both


def training_matches_one_process(comm):
    for dtype in ("float64", "float32"):
        result = train(comm, dtype=dtype, **SMALL)
        assert result.identical and result.matches and result.passed
        assert len(result.fingerprints) == comm.size == result.ranks
        assert result.max_loss_difference <= (1e-12 if dtype == "float64" else 1e-5)
        assert result.losses[1] < result.losses[0] and len(result.losses) == 2
        assert result.steps == 62 and result.layers == (64, 32, 10)
        assert result.parameters == 64 * 32 + 32 + 32 * 10 + 10 == result.gradients.size
        assert result.gradients.dtype == np.float32 and result.gradients.any()
        assert 0 < result.sync_seconds < result.seconds and result.reference_seconds > 0
        assert comm.allgather_object(result.losses) == [result.losses] * comm.size
        same = comm.allgather(result.gradients).reshape(comm.size, -1)
        assert (same == result.gradients).all()


def parts_may_be_empty(comm):
    result = train(comm, epochs=1, hidden=(4,), batch=1437)  # the last batch is one sample
    assert result.passed and result.steps == 2


def reference_can_be_left_out(comm):
    result = train(comm, epochs=1, hidden=(), reference=False)
    assert result.reference_losses == () and result.reference_accuracy is None
    assert result.max_loss_difference is None and result.matches is None and result.passed


CASES = [training_matches_one_process, parts_may_be_empty, reference_can_be_left_out]
