"""States as bytes: every dtype and shape comes back, also of parts and of several in a row."""

import numpy as np
import pytest

import mpidist as md
from mpidist.recovery.kept import Kept
from mpidist.recovery.packing import (
    Joined,
    arrays_of,
    filled,
    from_bytes,
    is_part,
    lengths_of,
    packed,
    to_parts,
    unpacked,
)


@pytest.mark.parametrize("dtype", ["float64", "float32", "int8", "bool", "complex64", "float16"])
def test_packed_state_comes_back(dtype):
    state = {"a": np.arange(6).reshape(2, 3).astype(dtype), "b": [1, (2.5, None)], 7: "text"}
    data = b"".join(bytes(part) for part in to_parts(packed(state, "x")))
    back = unpacked([from_bytes(data)], "x")
    assert back["b"] == [1, (2.5, None)] and back[7] == "text"
    assert back["a"].dtype == dtype and np.array_equal(back["a"], state["a"])


def test_bytes_of_empty_and_of_strided_arrays():
    content = {"empty": np.empty((0, 3)), "strided": np.arange(10)[::3], "none": None}
    back = from_bytes(b"".join(bytes(part) for part in to_parts(content)))
    assert back["empty"].shape == (0, 3) and back["none"] is None
    assert np.array_equal(back["strided"], content["strided"])


def test_states_in_a_row_come_back():
    given = {"x": np.arange(3), "y": {"a": np.empty((0, 2)), "b": [2, np.ones(2, "float32")]}}
    states = {name: packed(value, name) for name, value in given.items()}
    row = np.concatenate(arrays_of(states))
    assert row.dtype == np.uint8 and len(row) == 3 * 8 + 0 + 2 * 4
    back = {name: unpacked([one], name) for name, one in filled(lengths_of(states), row).items()}
    assert np.array_equal(back["x"], given["x"]) and back["y"]["a"].shape == (0, 2)
    assert back["y"]["b"][0] == 2 and np.array_equal(back["y"]["b"][1], np.ones(2, "float32"))


def test_parts_of_ranks_are_joined():
    """Those of a ZeroOptimizer, of which each rank has a piece of the moments."""

    def program(comm):
        net = md.nn.Linear(3, 2)
        for number, p in enumerate(net.parameters()):
            p.data[...] = number
        model = md.DDP(net, comm)
        optimizer = md.ZeroOptimizer(md.nn.Adam, model, learning_rate=0.1)
        model.backward(model(np.ones((1, 3))))
        optimizer.step()
        kept = Kept.of("optimizer", optimizer, False)
        return packed(kept.state(), "optimizer")

    two, one = (md.run_simulated(ranks, program) for ranks in (2, 1))
    assert all(map(is_part, two)) and not is_part(packed(np.zeros(3), "x"))
    moments = [found for found in leaves(unpacked(two, "x")) if isinstance(found, Joined)]
    expected = [found for found in leaves(unpacked(one, "x")) if isinstance(found, Joined)]
    assert len(moments) == len(expected) >= 2
    for found, other in zip(moments, expected):
        assert np.array_equal(found.read(0, found.flat.size), other.read(0, other.flat.size))
        assert found.flat.any() and found.read(1, 1).shape == (0,)


def leaves(tree):
    """Return the leaves of nested dicts and lists."""
    if isinstance(tree, dict):
        return [leaf for value in tree.values() for leaf in leaves(value)]
    if isinstance(tree, (list, tuple)):
        return [leaf for value in tree for leaf in leaves(value)]
    return [tree]


def test_states_that_differ_are_named():
    states = [packed({"n": n}, "x") for n in (1, 2)]
    with pytest.raises(md.MpidistError, match="differs between ranks: declare x in per_rank"):
        unpacked(states, "x")
