"""Structures of values between stages."""

import numpy as np
import pytest

import mpidist
from mpidist.errors import InvalidArgument
from mpidist.pipeline.values import flatten, select, unflatten
from tests.support.pipeline_kits import KITS


def test_structures_come_back():
    a, b, c = np.ones(1), np.ones(2), np.ones(3)
    value = ({"a": a, "n": None, "list": [b, 3, "text"]}, c)
    tree, tensors = flatten(value)
    assert [t.size for t in tensors] == [1, 2, 3] and hash(tree)
    back = unflatten(tree, tensors)
    assert back[0]["a"] is a and back[0]["list"][1:] == [3, "text"] and back[1] is c
    assert unflatten(tree, tensors, plain=False)[0]["list"][1:] == [None, None]
    assert [x if x is None else x.size for x in select(tree, (None, c))] == [None, None, 3]
    for wrong, message in (
        ((a,), "grad .*tuple of 1: .*tuple of 2"),
        (({"a": a}, c), r"grad\[0\] .*\['a'\]: .*\['a', 'n', 'list'"),
        (((a, None, b), c), r"grad\[0\] .*tuple of 3: .*dict"),
        (({"a": 3, "n": None, "list": None}, c), r"grad\[0\]\['a'\] .*\bint: .*tensor"),
    ):
        with pytest.raises(InvalidArgument, match=message):
            select(tree, wrong, "grad")


@pytest.mark.ranks(2, 4)
@pytest.mark.mpi(min_size=2)
@pytest.mark.parametrize("kit", KITS)
def test_values_of_many_kinds_pass_between_stages(comm, kit):
    """Tuples, dicts, whole numbers, None and plain values between stages; keyword arguments."""
    random = np.random.default_rng(5)
    x, steps = random.normal(size=(7, 4)), random.integers(0, 3, 7)
    target = random.normal(size=(7, 4))
    stage = kit.mixed(comm.rank, comm.size)
    pipe = mpidist.Pipeline(stage, comm, 3, "zb-h1")
    for _ in range(2):
        stage.weight.grad = None
        loss = pipe.step((kit.tensor(x), kit.tensor(steps)), kit.tensor(target), kit.squares)
        # Each stage multiplies by its weight; the last adds what went beside, and the steps.
        factor = np.prod([2.0 + r for r in range(comm.size)])
        out = x * factor + (x * 2.0 + steps[:, None])
        expected = ((out - target) ** 2).sum(axis=1).mean()
        assert abs(loss - expected) < 1e-9 * abs(expected)
        back = 2 * (out - target) / 7
        own = (back * x * factor).sum() / (2.0 + comm.rank)
        if comm.rank == 0:
            own += (back * x).sum()
        assert abs(float(kit.array(stage.weight.grad)) - own) < 1e-9 * abs(own)
    pipe.close()
