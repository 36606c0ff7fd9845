"""States as trees of JSON: what may be in one, and how the ranks' trees are joined."""

import numpy as np
import pytest

from mpidist import Checkpoint, run_simulated
from mpidist.checkpoint.state import Divided, MayDiffer
from mpidist.checkpoint.tree import check_tree, flatten, is_divided, merge, unflatten
from mpidist.errors import CheckpointError
from tests.support.odd_arrays import odd_ndarrays
from tests.support.training_kits import torch

if torch is not None:
    from tests.support.odd_arrays import Named, odd_tensors, waiting


pytestmark = pytest.mark.ranks(1, 3, 4)


@pytest.mark.ranks(1)
def test_is_divided_at_any_depth():
    part = Divided({0: np.zeros(2)})
    for value in (part, {"a": part}, [1, (2, {"b": [part]})]):
        assert is_divided(flatten(value, "x", {}))
    for value in (1, None, "divided", np.zeros(2), {}, [], {"divided": 1, "a": [{}, ()]}):
        assert not is_divided(flatten(value, "x", {}))


def test_save_of_records_is_refused(comm, folder):
    """Their fields would have no names after a load."""
    checkpoint = Checkpoint(folder, comm)
    for value in (np.zeros(3, [("a", "i4"), ("b", "f8")]), np.zeros((), [("a", "i4")])[()]):
        with pytest.raises(
            CheckpointError, match=r"state/0/x has dtype \[\('a', '<i4'\).*: save the f"
        ):
            checkpoint.save(1, state=[{"x": value}])
    assert checkpoint.steps() == []


def test_arrays_that_are_not_their_memory_are_refused(comm, folder):
    """By path; a mask was dropped without a word.  What has one meaning is saved."""
    checkpoint = Checkpoint(folder, comm)
    odd = odd_ndarrays(4) + ([] if torch is None else odd_tensors(4))
    for k, (x, word, *_) in enumerate(odd):
        with pytest.raises(CheckpointError, match=r"state/w/0 is .*") as caught:
            checkpoint.save(k, state={"w": [x]})
        assert word in str(caught.value)
    assert checkpoint.steps() == []
    plain = {"matrix": np.ones((2, 2)).view(np.matrix)}
    if torch is not None:
        one = torch.arange(4.0)
        plain |= {"waiting": waiting(one), "parameter": torch.nn.Parameter(one)}
        plain |= {"named": one.as_subclass(Named)}
    checkpoint.save(1, state=plain)
    for name, x in checkpoint.load()["state"].items():
        assert x.tolist() == plain[name].tolist(), name


@pytest.mark.parametrize("make", (lambda v: [v], lambda v: {"k": v}), ids=("list", "dict"))
def test_save_of_a_state_nested_too_deep_is_refused(make, tmp_path):
    """What can be saved can be loaded."""

    def nested(depth):
        value = 1
        for _ in range(depth):
            value = make(value)
        return value

    def act(comm):
        checkpoint = Checkpoint(tmp_path, comm)
        checkpoint.save(1, v=nested(50))
        assert checkpoint.load()["v"] == nested(50)
        for depth in (60, 300, 2000):
            with pytest.raises(CheckpointError, match=r"v/.* is nested more than 50"):
                checkpoint.save(2, v=nested(depth))

    run_simulated(2, act)


@pytest.mark.ranks(1)
def test_flatten_and_back():
    x = np.arange(6.0).reshape(2, 3)
    leaves = {}
    state = {"a": [1, (True, None, "s")], 3: {"x": x, "m": MayDiffer(x[0])}}
    tree = flatten(state, "s", leaves)
    assert list(leaves) == ["s/3/x", "s/3/m"]
    assert [leaf.may_differ for leaf in leaves.values()] == [False, True]
    check_tree(tree, "s", leaves)
    found = unflatten(tree, lambda path, library: (path, library))
    wanted = {"x": ("s/3/x", "numpy"), "m": ("s/3/m", "numpy")}
    assert found == {"a": [1, (True, None, "s")], 3: wanted}
    del leaves["s/3/x"]
    with pytest.raises(TypeError, match="s/3/x is neither a value nor an array"):
        check_tree(tree, "s", leaves)


@pytest.mark.ranks(1)
def test_merge_joins_what_is_divided_and_tells_of_the_rest():
    def merged(*states):
        unlike = []
        trees = {rank: flatten(state, "s", {}) for rank, state in enumerate(states)}
        joined = merge(trees, "s", lambda path, ranks: unlike.append((path, list(ranks))))
        return unflatten(joined, None), unlike

    assert merged(Divided({0: "a"}), Divided({1: "b"})) == ({0: "a", 1: "b"}, [])
    assert merged({"k": [1, 2]}, {"k": [1, 3]})[1] == [("s/k/1", [1])]
    assert merged({"k": 1}, {"k": 1, "n": 2}, {"k": True})[1] == [("s/n", [0, 2]), ("s/k", [2])]
    assert merged([1], [1, 2], (1,))[1] == [("s", [1, 2])]
