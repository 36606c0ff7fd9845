"""The tests of the collectives' original, by name (ferrotorch-distributed, collective.rs)."""

import numpy as np
import pytest

from mpidist import InvalidRank, run_simulated


def test_allreduce_sum_4_ranks():
    for result in run_simulated(4, lambda comm: comm.allreduce(np.full(3, comm.rank, "f4"))):
        assert result.dtype == np.float32 and result.tolist() == [6, 6, 6]


def test_allreduce_mean_4_ranks():
    body = lambda comm: comm.allreduce(np.full(3, comm.rank, "f4"), "mean")  # noqa: E731
    for result in run_simulated(4, body):
        np.testing.assert_allclose(result, 1.5, atol=1e-6)


def test_broadcast_from_rank_0():
    body = lambda comm: comm.broadcast(np.full(2, 0 if comm.rank else 42, "f4"), 0)  # noqa: E731
    for result in run_simulated(4, body):
        assert result.tolist() == [42, 42]


def test_barrier_completes():
    assert run_simulated(4, lambda comm: comm.barrier()) == [None] * 4


def test_broadcast_invalid_root():
    def body(comm):
        with pytest.raises(InvalidRank) as caught:
            comm.broadcast(np.zeros(3, "f4"), 5)
        assert caught.value.rank == 5 and caught.value.size == 2

    run_simulated(2, body)


def test_allreduce_single_rank():
    (result,) = run_simulated(1, lambda comm: comm.allreduce(np.array([1, 2, 3], "f4")))
    assert result.tolist() == [1, 2, 3]


def roundtrip(dtype):
    """The bits that arrive are those that were sent."""
    original = np.array([1.0, 2.5, -3.14, 0.0, -0.0, np.inf, np.nan], dtype)

    def body(comm):
        return comm.broadcast(original if comm.rank == 0 else np.empty_like(original))

    for result in run_simulated(2, body):
        assert result.tobytes() == original.tobytes()


def test_bytes_roundtrip_f32():
    roundtrip("f4")


def test_bytes_roundtrip_f64():
    roundtrip("f8")
