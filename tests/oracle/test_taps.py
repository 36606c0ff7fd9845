"""What the taps record of calls, losses and steps, without a script."""

import numpy as np
import pytest

from mpidist.nn import SGD, CrossEntropy, Linear, Module, Sequential
from mpidist.oracle.array_taps import LIBRARY
from mpidist.oracle.log import NOBODY, read_logs
from mpidist.oracle.plan import Plan
from mpidist.oracle.sketch import row_ids, sketch_rows
from mpidist.oracle.taps import Taps, leaves

X = np.random.default_rng(0).normal(size=(6, 4)).astype(np.float32)


def taps_of(folder, role="ranks", **options):
    folder = folder / role
    folder.mkdir(exist_ok=True)
    return Taps(Plan(role, 2, 5, **options), folder, 0)


def called(taps, module, *inputs):
    return taps.call(LIBRARY, Module.__call__, module, inputs, {})


def train(taps, net, optimizer, x):
    """Make a step of a training, recorded by hand."""
    criterion = CrossEntropy()
    taps.loss(criterion(called(taps, net, x), np.zeros(len(x), int)))
    net.backward(criterion.backward())
    taps.before_step(optimizer, optimizer.parameters)
    optimizer.step()
    taps.after_step(LIBRARY, optimizer, optimizer.parameters)
    optimizer.zero_grad()


def model():
    return Sequential(Linear(4, 3, seed=1), Linear(3, 2, seed=2))


def test_step_has_all_phases_by_name(tmp_path):
    taps, net = taps_of(tmp_path), model()
    train(taps, net, SGD(net.parameters(), 0.1, momentum=0.9), X)
    (step,) = read_logs(tmp_path / "ranks")[0].steps
    names = ["0.weight", "0.bias", "1.weight", "1.bias"]
    assert list(step.tensors["start"]) == names
    assert list(step.tensors["forward"]) == ["output", "loss"]
    assert list(step.tensors["gradients"]) == list(step.tensors["parameters"]) == names
    assert list(step.tensors["optimizer"]) == [f"{name}.velocity" for name in names]
    assert sorted(step.local) == sorted(names)
    assert step.samples.tolist() == row_ids([X]).tolist()


def test_gradient_is_recorded_before_the_step(tmp_path):
    taps, net = taps_of(tmp_path), model()
    train(taps, net, SGD(net.parameters(), 0.1), X)
    (step,) = read_logs(tmp_path / "ranks")[0].steps
    gradient = step.tensors["gradients"]["1.weight"].parts[0].sums
    moved = step.tensors["start"]["1.weight"].parts[0].sums
    moved = moved - step.tensors["parameters"]["1.weight"].parts[0].sums
    assert np.allclose(0.1 * gradient, moved, atol=1e-6)


def test_microbatches_of_a_step_are_one_batch(tmp_path):
    taps, net = taps_of(tmp_path), model()
    whole = np.array(net(X))
    for part in (X[:2], X[2:]):
        called(taps, net, part)
    found = taps.step.tensors["forward"]["output"].parts[0]
    sums, squares = sketch_rows("output", whole, row_ids([X]))
    assert found.rows == 6
    assert np.allclose(found.sums, sums.sum(0), atol=1e-5)
    assert found.squares == pytest.approx(squares.sum(), rel=1e-5)


def test_rows_of_the_reference_belong_to_the_ranks_that_have_their_samples(tmp_path):
    ids = row_ids([X]).tolist()
    owners = {1: {ids[0]: [1], ids[1]: [0], ids[2]: [1, 0]}}
    taps, net = taps_of(tmp_path, "reference", owners=owners), model()
    x = np.concatenate([X[:4], X[2:3]])  # the third sample twice, one for each of the ranks
    called(taps, net, x)
    parts = taps.step.tensors["forward"]["output"].parts
    assert {rank: part.rows for rank, part in parts.items()} == {0: 2, 1: 2, NOBODY: 1}


def test_samples_that_another_model_computed_are_those_from_which_they_were(tmp_path):
    found = []
    for role, bias in (("ranks", 0.0), ("reference", 1e-6)):  # other last bits
        taps, one, other = taps_of(tmp_path, role), Linear(4, 4, seed=1), model()
        taps.know(LIBRARY, one), taps.know(LIBRARY, other)
        one.bias.data += np.float32(bias)
        made = np.array(called(taps, one, X))
        called(taps, other, np.concatenate([X[:2], made[3:]]))
        found.append([ids.tolist() for ids in taps.step.ids])
    assert found[0] == found[1]
    assert found[0][1][:2] == row_ids([X[:2]]).tolist()
    assert not set(found[0][1][2:]) & set(row_ids([X]).tolist())


def test_evaluation_is_not_recorded(tmp_path):
    taps, net = taps_of(tmp_path), model()
    called(taps, net.eval(), X)
    assert not taps.step.ids
    assert not taps.step.tensors


def test_perturbed_parameters_are_an_ulp_away(tmp_path):
    net = model()
    before = [p.data.copy() for p in net.parameters()]
    called(taps_of(tmp_path, "perturbed"), net, X)
    for p, old in zip(net.parameters(), before, strict=True):
        steps = np.abs(p.data.view(np.int32) - old.view(np.int32))
        assert (steps == 1).all()


def test_reference_takes_the_parameters_of_rank_0(tmp_path):
    net = model()
    called(taps_of(tmp_path), net, X)
    other = Sequential(Linear(4, 3, seed=7), Linear(3, 2, seed=8))
    start = str(tmp_path / "ranks")
    called(taps_of(tmp_path, "reference", start=start), other, X)
    for p, q in zip(net.parameters(), other.parameters(), strict=True):
        assert np.array_equal(p.data, q.data)
    assert read_logs(tmp_path / "reference")[0].facts["start"] == "1.bias"


def test_leaves_are_named_by_their_place():
    a, b, c = np.zeros((3, 1))
    found = dict(leaves("head", {"logits": a, "rest": [(b, c), None, 3]}))
    assert list(found) == ["head.logits", "head.rest[0][0]", "head.rest[0][1]"]
