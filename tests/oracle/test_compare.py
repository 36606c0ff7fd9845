"""Verdicts on logs: equal but for noise, or the tensor and the ranks that differ."""

import numpy as np
import pytest

from mpidist.oracle.compare import compare, nondeterministic, rows
from mpidist.oracle.log import PHASES, Part
from tests.support.oracle_runs import SIZE, Training, whole


def test_clean_training_is_equal_in_every_phase():
    found = list(rows(Training().runs()))
    assert [row.phase for row in found] == list(PHASES)
    assert not any(row.differences for row in found)
    assert found[1].note == "3 × 4 samples = the reference's 12"
    assert [row.compared for row in found[2:]] == [3, 3, 3, 3, 1]


@pytest.mark.parametrize("fact", ["failed", "ended"])
def test_step_of_a_rank_that_was_killed_is_no_difference(fact):
    """Rank 1 has failed, and with it the job, before rank 2 has recorded the step."""
    training = Training()
    training.absent = (2,)
    runs = training.runs()
    runs.ranks[1].facts[fact] = True
    assert any(row.differences for row in rows(runs)) == (fact != "failed")


@pytest.mark.parametrize("seed", range(20))
def test_rounding_noise_is_no_difference(seed):
    training = Training(seed)
    for data in training.ranks:
        for phase in ("gradients", "parameters", "optimizer"):
            for name, x in data[phase].items():
                noise = 1 + 2e-7 * training.random.normal(size=x.shape)
                data[phase][name] = (x * noise).astype(np.float32)
    assert not any(row.differences for row in rows(training.runs()))


def test_difference_names_tensor_and_rank():
    training = Training()
    training.ranks[1]["gradients"]["head.weight"][2, 3] += 0.01
    row = compare(training.runs(), 1, "gradients")
    assert [(each.name, each.ranks) for each in row.differences] == [("head.weight", [1])]
    assert row.differences[0].distance == pytest.approx(0.01, rel=1e-3)


def test_row_of_one_sample_that_differs_is_found():
    training = Training()
    training.ranks[2]["outputs"]["head"][0] *= 1.001
    row = compare(training.runs(), 1, "forward")
    assert [(each.name, each.ranks) for each in row.differences] == [("head", [2])]


def test_not_a_number_differs():
    training = Training()
    training.ranks[0]["parameters"]["body.bias"][0] = np.nan
    (found,) = compare(training.runs(), 1, "parameters").differences
    assert (found.name, found.ranks, found.distance) == ("body.bias", [0], np.inf)


def test_shards_of_all_ranks_are_compared_together():
    training = Training()
    runs = training.runs()
    for change in (0.0, 0.01):
        for rank in range(SIZE):
            full = training.whole["gradients"]["head.weight"].reshape(-1)
            begin, end = rank * 14, 40 if rank == SIZE - 1 else (rank + 1) * 14
            piece = full[begin:end] + np.float32(change * (rank == 1))
            gradients = runs.ranks[rank].step(1).tensors["gradients"]
            gradients["head.weight"] = whole("head.weight", piece, rank, "part", begin, (5, 8))
        row = compare(runs, 1, "gradients")
        assert [each.name for each in row.differences] == ["head.weight"] * bool(change)


def test_sum_of_losses_is_taken_if_it_is_the_references():
    training = Training()
    training.whole["loss"] = sum(data["loss"] for data in training.ranks)
    assert not compare(training.runs(), 1, "forward").differences
    training.whole["loss"] = 1.5 * training.whole["loss"]
    assert compare(training.runs(), 1, "forward").differences[0].name == "loss"


def test_rank_that_made_no_step_is_named():
    runs = Training().runs()
    runs.ranks[1].steps.clear()
    found = list(rows(runs))
    batch = next(row for row in found if row.phase == "batch")
    assert batch.differences[0].ranks == [1]


def test_reference_that_is_not_itself_is_named():
    training = Training()
    runs = training.runs()
    assert nondeterministic(runs) is None
    imprint = runs.again[0].step(1).tensors["parameters"]["body.bias"]
    imprint.parts[0] = Part(imprint.parts[0].sums + 1e-3, imprint.parts[0].squares)
    imprint.hash = 1
    row, name = nondeterministic(runs)
    assert (row.step, row.phase, name) == (1, "parameters", "body.bias")
