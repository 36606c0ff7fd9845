"""The main job with every rank a thread, and what it must notice."""

import io
import logging
import sys

import numpy as np
import pytest
from rich.console import Console

from mpidist import run_simulated
from mpidist.demo import load_digits, train, training
from mpidist.demo.training import progress
from mpidist.errors import InvalidArgument, Unsupported
from tests.support import demo_cases


@pytest.mark.parametrize("size", [1, 3, 4])
@pytest.mark.parametrize("case", demo_cases.CASES, ids=lambda case: case.__name__)
def test_demo(case, size):
    run_simulated(size, case, timeout=200)


def test_it_learns():
    (result,) = run_simulated(1, lambda comm: train(comm, reference=False), timeout=200)
    assert result.accuracy >= 0.96


def test_digits():
    digits = load_digits("float32")
    assert digits.train_images.shape == (1438, 64) and digits.test_images.shape == (359, 64)
    assert digits.train_images.dtype == np.float32 and digits.train_images.max() == 1.0
    assert set(digits.test_labels) == set(range(10))
    np.testing.assert_array_equal(load_digits().test_labels, digits.test_labels)


@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_a_mean_of_means_is_noticed(monkeypatch, dtype):
    class MeanOfMeans(training.CrossEntropy):
        def backward(self, scale):
            return super().backward(1 / len(self._labels))

    monkeypatch.setattr(training, "CrossEntropy", MeanOfMeans)
    settings = {**demo_cases.SMALL, "batch": 7}
    result = run_simulated(3, lambda comm: train(comm, dtype=dtype, **settings), timeout=200)[0]
    assert result.identical and not result.matches and not result.passed
    assert result.max_loss_difference > result.loss_tolerance


def test_unlike_replicas_are_noticed(monkeypatch):
    monkeypatch.setattr(training.DDP, "broadcast_parameters", lambda self, root=0: None)
    result = run_simulated(2, lambda comm: train(comm, **demo_cases.SMALL), timeout=200)[0]
    assert not result.identical and not result.passed


def test_missing_scikit_learn(monkeypatch):
    monkeypatch.setitem(sys.modules, "sklearn", None)

    def rank_main(comm):
        with pytest.raises(Unsupported, match=rf"rank {comm.rank}.*scikit-learn"):
            train(comm)

    run_simulated(2, rank_main)


@pytest.mark.parametrize(
    "values",
    [{"epochs": 0}, {"batch": -1}, {"batch": 2.5}, {"hidden": (3, 0)}, {"dtype": "float16"}],
)
def test_refused_arguments(values):
    (name,) = values

    def rank_main(comm):
        with pytest.raises(InvalidArgument, match=f"rank 0: {name}=.*expected"):
            train(comm, **values)

    run_simulated(1, rank_main)


def test_progress_on_a_terminal():
    console = Console(file=io.StringIO(), force_terminal=True, width=100)
    with progress(0, 2, console) as report:
        report(1, 0.5, 0.9)
        report(2, 0.25, 0.975)
    text = console.file.getvalue()
    assert "2/2" in text and "97.50%" in text and "0.2500" in text


def test_progress_in_the_log(caplog):
    console = Console(file=io.StringIO(), force_terminal=False)
    with caplog.at_level(logging.INFO, "mpidist.demo"):
        with progress(0, 2, console) as report:
            report(1, 0.5, 0.9)
        with progress(1, 2, console) as report:
            report(1, 0.5, 0.9)
    assert caplog.messages == ["epoch 1/2: loss 0.5000, test accuracy 90.00 %"]
    assert console.file.getvalue() == ""
