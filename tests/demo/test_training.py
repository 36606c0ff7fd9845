"""The main job, on simulated ranks or under mpiexec, and what it must notice."""

import io
import logging

import numpy as np
import pytest
from rich.console import Console

from mpidist import run_simulated
from mpidist.demo import train, training
from mpidist.demo.training import progress
from mpidist.errors import InvalidArgument

SMALL = {
    "epochs": 2,
    "hidden": (32,),
    "batch": 47,
}  # 1438 = 30 * 47 + 28: no rank count divides both


@pytest.mark.ranks(1, 3, 4)
def test_train_default_matches_one_process(comm):
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


@pytest.mark.ranks(1, 3, 4)
def test_train_empty_parts_passes(comm):
    result = train(comm, epochs=1, hidden=(4,), batch=1437)  # the last batch is one sample
    assert result.passed and result.steps == 2


@pytest.mark.ranks(1, 3, 4)
def test_train_without_reference_passes(comm):
    result = train(comm, epochs=1, hidden=(), reference=False)
    assert result.reference_losses == () and result.reference_accuracy is None
    assert result.max_loss_difference is None and result.matches is None and result.passed


def test_train_default_settings_learns():
    (result,) = run_simulated(1, lambda comm: train(comm, reference=False), timeout=200)
    assert result.accuracy >= 0.96


@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_train_mean_of_means_does_not_match(monkeypatch, dtype):
    class MeanOfMeans(training.CrossEntropy):
        def backward(self, scale):
            return super().backward(1 / len(self._labels))

    monkeypatch.setattr(training, "CrossEntropy", MeanOfMeans)
    settings = {**SMALL, "batch": 7}
    result = run_simulated(3, lambda comm: train(comm, dtype=dtype, **settings), timeout=200)[0]
    assert result.identical and not result.matches and not result.passed
    assert result.max_loss_difference > result.loss_tolerance


def test_train_unlike_replicas_fails(monkeypatch):
    monkeypatch.setattr(training.DDP, "broadcast_parameters", lambda self, root=0: None)
    result = run_simulated(2, lambda comm: train(comm, **SMALL), timeout=200)[0]
    assert not result.identical and not result.passed


@pytest.mark.parametrize(
    "values",
    [{"epochs": 0}, {"batch": -1}, {"batch": 2.5}, {"hidden": (3, 0)}, {"dtype": "float16"}],
)
def test_train_bad_arguments_are_refused(values):
    (name,) = values

    def rank_main(comm):
        with pytest.raises(InvalidArgument, match=f"rank 0: {name}=.*expected"):
            train(comm, **values)

    run_simulated(1, rank_main)


def test_progress_terminal_draws_a_bar():
    console = Console(file=io.StringIO(), force_terminal=True, width=100)
    with progress(0, 2, console) as report:
        report(1, 0.5, 0.9)
        report(2, 0.25, 0.975)
    text = console.file.getvalue()
    assert "2/2" in text and "97.50%" in text and "0.2500" in text


def test_progress_no_terminal_logs(caplog):
    console = Console(file=io.StringIO(), force_terminal=False)
    with caplog.at_level(logging.INFO, "mpidist.demo"):
        with progress(0, 2, console) as report:
            report(1, 0.5, 0.9)
        with progress(1, 2, console) as report:
            report(1, 0.5, 0.9)
    assert caplog.messages == ["epoch 1/2: loss 0.5000, test accuracy 90.00 %"]
    assert console.file.getvalue() == ""
