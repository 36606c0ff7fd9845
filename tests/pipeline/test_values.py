"""Parts of a step, each by itself: microbatches, structures, what a stage keeps, how it fails."""

import weakref

import numpy as np
import pytest

import mpidist
from mpidist.errors import InvalidArgument, RankFailed
from mpidist.nn import Identity, Linear, Module, ReLU, Sequential
from mpidist.pipeline.array_stage import ArrayStage, ArrayTensors
from mpidist.pipeline.microbatches import bounds, cut_gradients, form_of
from mpidist.pipeline.stage import stage_of
from mpidist.pipeline.values import flatten, select, unflatten
from tests.support.odd_arrays import odd_ndarrays
from tests.support.pipeline_kits import mean
from tests.support.training_kits import NEEDS_TORCH, torch


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
        ((a,), "grad .*tuple of 1: .*tuple of 2"),
        (({"a": a}, c), r"grad\[0\] .*\['a'\]: .*\['a', 'n', 'list'"),
        (((a, None, b), c), r"grad\[0\] .*tuple of 3: .*dict"),
        (({"a": 3, "n": None, "list": None}, c), r"grad\[0\]\['a'\] .*\bint: .*tensor"),
    ):
        with pytest.raises(InvalidArgument, match=message):
            select(tree, wrong, "grad")


def test_gradients_are_made_like_the_outputs():
    outputs = [form_of(np.ones((rows, 3))) for rows in (2, 2, 3)]
    whole = np.arange(21.0).reshape(7, 3)
    for given in (whole, [whole[:2], whole[2:4], whole[4:]]):
        found = cut_gradients(given, outputs, 1)
        assert np.array_equal(np.concatenate([part for (part,) in found]), whole)
    assert cut_gradients([None, whole[:2], None], outputs, 1)[0] == [None]
    for wrong, message in (
        (None, "grad=None: "),
        (np.ones((6, 3)), r"grad .*\b6 rows: .*\b7\b"),
        ([whole], r"grad .*\b1 entries: .*num_microbatches=3"),
        ([whole[:2]] * 3, r"grad of microbatch 2 .*\(2, 3\): .*\(3, 3\)"),
        ([whole[:2], 3, None], r"grad of microbatch 1 .*\bint: .*tensor"),
    ):
        with pytest.raises(InvalidArgument, match=f"rank 1: {message}"):
            cut_gradients(wrong, outputs, 1)


class Undeclared(Module):
    """Saves activations under a name that it does not declare."""

    def forward(self, x):
        self.cached = x
        return x

    def backward(self, grad):
        return grad * self.cached


class Declared(Undeclared):
    saved = ("cached",)


class Container(Module):
    """Holds layers, and is never called itself."""

    def __init__(self, *layers):
        self.layer = layers[0]


def test_a_layer_must_declare_what_it_saves():
    for layer in (Undeclared(), Sequential(Linear(2, 2), Undeclared())):
        with pytest.raises(InvalidArgument, match=r"rank 3: Undeclared\.saved .*None.*_input"):
            ArrayStage(layer, layer, "rank 3")
    Declared.saved = "cached"
    try:
        with pytest.raises(InvalidArgument, match=r"rank 3: Declared\.saved .*'cached'"):
            ArrayStage(Declared(), Declared(), "rank 3")
    finally:
        Declared.saved = ("cached",)
    held = Sequential(Declared())
    held.beside = Container(Linear(2, 2))
    ArrayStage(held, held, "rank 3")

    class Slots:
        __slots__ = ("forward", "backward", "parameters")
        saved = ("x",)

        def __init__(self):
            self.forward = self.backward = abs
            self.parameters = list

    with pytest.raises(InvalidArgument, match="rank 3: Slots .*saved=.*__dict__"):
        ArrayStage(Slots(), Slots(), "rank 3")


def test_saved_activations_of_several_microbatches():
    """Taken out of the layers after forward, and put back before backward."""
    layer, kept = Declared(), []
    stage = ArrayStage(layer, layer, "")
    for x in (2.0, 3.0, 5.0):
        value = np.full((1, 1), x)
        output, saved = stage.forward("tensor", [value], False, True)
        stage.finish(saved, "tensor", [output])
        assert layer.cached is None
        kept.append((x, saved))
    for x, saved in kept:
        (found,) = stage.backward(saved, [np.full((1, 1), 10.0)])
        assert found == 10 * x and layer.cached is None


@pytest.mark.parametrize("kind", ("plain", "torch"))
@pytest.mark.parametrize("checkpoint", (False, True))
def test_unsplit_stage_keeps_nothing_for_w(kind, checkpoint, monkeypatch):
    """I of a stage that cannot be split leaves no memory for W."""
    if kind == "torch":
        torch = pytest.importorskip("torch", reason=NEEDS_TORCH)
        monkeypatch.setattr("mpidist.torch.stage.can_halve", lambda: False)
        layer = torch.nn.Sequential(torch.nn.Linear(4, 6), torch.nn.Tanh()).double()
    else:
        inner = Sequential(Linear(4, 6, dtype=np.float64), ReLU())
        layer = Whole(inner)
    stage = stage_of(layer, "", checkpoint=checkpoint)
    assert not stage.splits
    x = stage.tensors.tensor(np.ones(8), ("float64", (2, 4), True))
    output, saved = stage.forward("tensor", [x], False, True)
    stage.finish(saved, "tensor", [output])
    there, grad = weakref.ref(x), stage.tensors.tensor(np.ones(12), ("float64", (2, 6), False))
    del x, output
    assert there() is not None
    stage.backward_input(saved, [grad])
    assert there() is None
    stage.backward_weight(saved)


class Whole:
    """A stage whose backward has no halves."""

    def __init__(self, inner):
        self.modules, self.parameters = inner.modules, inner.parameters
        self.forward, self.backward = inner.forward, inner.backward


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


@mean
def no_loss(y, target):
    return 0.0, y


class Failing(Identity):
    saved = ()

    def forward(self, x):
        raise ArithmeticError("this stage cannot")


def test_a_stage_that_raises():
    """It is that error which is reported; the others hear of it, and the pipeline stays broken."""

    def job(comm):
        pipe = mpidist.Pipeline(Failing() if comm.rank == 1 else Identity(), comm, 2)
        try:
            pipe.step(np.ones((2, 2)), np.ones((2, 2)), no_loss)
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
        give = np.ones((2, 2)), np.ones((2, 2)), no_loss
        pipe.step(*give)
        comm.barrier()
        dropping[0] = True
        comm.timeout = pipe._own.timeout = 3.0
        pipe.step(*give)

    with pytest.raises(mpidist.CollectiveTimeout, match="gradient of microbatch 0 for stage 0"):
        mpidist.run_simulated(2, job, faults=mpidist.Faults(drop=drop))


def test_arrays_between_stages_are_the_memory_they_show():
    for x, word in odd_ndarrays(4):
        for send in (ArrayTensors().array, ArrayTensors().own):
            with pytest.raises(InvalidArgument, match=f"between stages is .*{word}"):
                send(x)


@pytest.mark.skipif(torch is None, reason=NEEDS_TORCH)
def test_tensors_between_stages_are_the_memory_they_show():
    from mpidist.torch.stage import TorchTensors
    from tests.support.odd_arrays import odd_tensors, waiting

    for send in (TorchTensors().array, TorchTensors().own):
        assert send(waiting(torch.arange(3.0))).tolist() == [0, 1, 2]
        for x, word, *_ in odd_tensors(4):
            with pytest.raises(InvalidArgument, match=f"between stages is .*{word}"):
                send(x)
