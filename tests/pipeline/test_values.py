"""Parts of a step, each by itself: microbatches, structures, what a stage keeps, how it fails."""

import numpy as np
import pytest

import mpidist
from mpidist.errors import InvalidArgument, RankFailed, Unsupported
from mpidist.nn import Identity, Linear, Module
from mpidist.pipeline.array_stage import Keeper
from mpidist.pipeline.microbatches import bounds, cut_gradients, shape_of
from mpidist.pipeline.values import flatten, select, unflatten


def test_the_remainder_goes_to_the_last():
    assert bounds(11, 4) == [(0, 2), (2, 4), (4, 6), (6, 11)]
    assert bounds(4, 4) == [(0, 1), (1, 2), (2, 3), (3, 4)]


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
        ((a,), "grad is a tuple of 1: allowed is a tuple of 2, or None"),
        (({"a": a}, c), r"grad\[0\] is a dict of \['a'\]: allowed is a dict of \['a', 'n', 'list'"),
        (((a, None, b), c), r"grad\[0\] is a tuple of 3: allowed is a dict of"),
        (({"a": 3, "n": None, "list": None}, c), r"grad\[0\]\['a'\] is a int: allowed is a tenso"),
    ):
        with pytest.raises(InvalidArgument, match=message):
            select(tree, wrong, "grad")


def test_gradients_are_made_like_the_outputs():
    outputs = [shape_of(np.ones((rows, 3))) for rows in (2, 2, 3)]
    whole = np.arange(21.0).reshape(7, 3)
    for given in (whole, [whole[:2], whole[2:4], whole[4:]]):
        found = cut_gradients(given, outputs, 1)
        assert np.array_equal(np.concatenate([part for (part,) in found]), whole)
    assert cut_gradients([None, whole[:2], None], outputs, 1)[0] == [None]
    for wrong, message in (
        (None, "grad=None: the outputs' gradients are needed here"),
        (np.ones((6, 3)), "grad has 6 rows: allowed are the 7 of the outputs"),
        ([whole], "grad has 1 entries: allowed is one for each of num_microbatches=3"),
        ([whole[:2]] * 3, r"grad of microbatch 2 has shape \(2, 3\): .* its output, \(3, 3\)"),
        ([whole[:2], 3, None], "grad of microbatch 1 is a int: allowed is a tensor or None"),
    ):
        with pytest.raises(InvalidArgument, match=f"rank 1: {message}"):
            cut_gradients(wrong, outputs, 1)


class Undeclared(Module):
    """Keeps things under names that nobody knows, and counts for itself."""

    def __init__(self):
        self.seen = 0

    def forward(self, x):
        self.seen = self.seen + 1
        self.cached = x
        return x

    def backward(self, grad):
        self.back = getattr(self, "back", 0) + 1
        return grad * self.cached


def test_keeper_finds_what_forward_leaves():
    module = Undeclared()
    keeper, kept = Keeper(module), []
    for x in (2.0, 3.0, 5.0):
        keeper.watch()
        module(x)
        kept.append(keeper.take())
    for values, expected in zip(kept, (2.0, 3.0, 5.0)):
        keeper.put(values)
        assert module.backward(1.0) == expected
        keeper.take()
    assert (module.seen, module.back) == (3, 3)


def test_keeper_empties_those_that_declare():
    layer = Linear(2, 2)
    keeper = Keeper(layer)
    layer(np.ones((1, 2), np.float32))
    kept = keeper.take()
    assert layer._input is None and kept[0][1]["_input"].shape == (1, 2)

    class Slots:
        __slots__ = ()

    with pytest.raises(Unsupported, match="no __dict__"):
        Keeper(Slots())


def test_inherited_halves_are_not_taken_for_own():
    class Doubled(Linear):
        def backward(self, grad):
            return 2 * super().backward(grad)

        def forward(self, x):
            self.extra = x
            return super().forward(x)

    layer = Doubled(2, 2)
    layer(np.ones((1, 2), np.float32))
    expected = layer.backward(np.ones((1, 2), np.float32))
    layer(np.ones((1, 2), np.float32))
    assert np.array_equal(layer.backward_input(np.ones((1, 2), np.float32)), expected)
    assert not layer.splits and layer.saved is None and Linear(2, 2).splits


class Failing(Identity):
    def forward(self, x):
        raise ArithmeticError("this stage cannot")


def test_a_stage_that_raises():
    """It is that error which is reported; the others hear of it, and the pipeline stays broken."""

    def job(comm):
        pipe = mpidist.Pipeline(Failing() if comm.rank == 1 else Identity(), comm, 2)
        try:
            pipe.step(np.ones((2, 2)), np.ones((2, 2)), lambda y, t: (0.0, y))
        except (ArithmeticError, RankFailed) as error:
            with pytest.raises(mpidist.CommunicatorBroken, match="pipeline step"):
                pipe.step(np.ones((2, 2)))
            raise error

    with pytest.raises(ArithmeticError, match="rank 1: this stage cannot"):
        mpidist.run_simulated(3, job)


def test_a_message_that_never_comes():
    """The deadline is the communicator's, and the report says which message."""

    def drop(source, target, number):
        return dropping[0]

    dropping = [False]

    def job(comm):
        pipe = mpidist.Pipeline(Identity(), comm, 2)
        give = np.ones((2, 2)), np.ones((2, 2)), lambda y, t: (0.0, y)
        pipe.step(*give)
        comm.barrier()
        dropping[0] = True
        comm.timeout = pipe._own.timeout = 0.3
        pipe.step(*give)

    with pytest.raises(mpidist.CollectiveTimeout, match="gradient of microbatch 0 for stage 0"):
        mpidist.run_simulated(2, job, faults=mpidist.Faults(drop=drop))
