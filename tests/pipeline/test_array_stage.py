"""Stages of mpidist.nn: what they keep of a forward, and arrays between them."""

import numpy as np
import pytest

from mpidist.errors import InvalidArgument
from mpidist.nn import Linear, Module, Sequential
from mpidist.pipeline.array_stage import ArrayStage, ArrayTensors
from tests.support.odd_arrays import odd_ndarrays


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


def test_layer_must_declare_what_it_saves():
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


def test_arrays_between_stages_are_the_memory_they_show():
    for x, word in odd_ndarrays(4):
        for send in (ArrayTensors().array, ArrayTensors().own):
            with pytest.raises(InvalidArgument, match=f"between stages is .*{word}"):
                send(x)
