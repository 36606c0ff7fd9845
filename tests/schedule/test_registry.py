"""The registry: names, parameters, and algorithms of users."""

import pytest

import mpidist
from mpidist.errors import InvalidArgument, UnknownName
from mpidist.schedule import Recv, Send, algorithm, algorithms, find, prove
from mpidist.schedule.registry import unregister
from mpidist.schedule.show import svg, text
from mpidist.schedule.sweep import sweep


@pytest.mark.parametrize(
    ("collective", "name", "nearest"),
    [
        ("allreduce", "rign", "'ring'"),
        ("allreduce", "rabenseiffner", "'rabenseifner'"),
        ("alltoall", "pair_wise", "'pairwise'"),
        ("allreduce", "hierarchic", "'hierarchical'"),
    ],
)
def test_an_unknown_name_gives_the_nearest(collective, name, nearest):
    with pytest.raises(
        UnknownName, match=f"{collective} algorithm {name!r}; did you mean.*{nearest}"
    ):
        find(collective, name)


def test_an_unknown_name_lists_what_there_is():
    known = "known: auto, dissemination, .*in_place, linear, native, published, single_copy, .*tree"
    with pytest.raises(UnknownName, match=known):
        find("barrier", "xyzzy")
    with pytest.raises(UnknownName, match="did you mean 'symmetric'"):
        find("allreduce", "symetric")


@pytest.mark.parametrize("name", ["native", "auto", "symmetric", "staged", "single_copy"])
def test_a_way_that_is_no_schedule(name):
    """What a call may ask for is not called unknown where a schedule is wanted."""
    with pytest.raises(InvalidArgument, match=f"'{name}': {name} is not a schedule") as raised:
        find("allreduce", name)
    assert "unknown" not in str(raised.value)


@pytest.mark.parametrize("call", [algorithms, lambda name: find(name, "ring")])
def test_an_unknown_collective(call):
    with pytest.raises(UnknownName, match="did you mean 'allgather'"):
        call("all_gather")
    with pytest.raises(UnknownName, match="did you mean 'broadcast'"):
        algorithm("broadcats", "mine")


def test_arity_in_the_name():
    choice = find("allreduce", "tree:4")
    assert (choice.algorithm.name, choice.arity, choice.name) == ("tree", 4, "tree:4")
    assert find("allreduce", "tree").arity is None
    # 4 children of the root, and one more level: 4 + 1 messages in a row each way
    assert prove("allreduce", "tree:4", 5).depth == 5 != prove("allreduce", "tree:2", 5).depth


@pytest.mark.parametrize("name", ["tree:1", "tree:0", "tree:-2", "tree:", "tree:two", "tree:2:3"])
def test_a_wrong_arity(name):
    with pytest.raises(InvalidArgument, match=f"{name!r}: arity .*>= 2"):
        find("allreduce", name)


def test_an_arity_where_there_is_none():
    with pytest.raises(InvalidArgument, match="'ring:3': ring has no arity"):
        find("allreduce", "ring:3")


@pytest.mark.parametrize("name", ["auto", "native", "nccl", "", "tree:3"])
def test_reserved_names(name):
    with pytest.raises(InvalidArgument, match=f"name={name!r}: .* an algorithm"):
        algorithm("allreduce", name)(lambda rank, size: ())


@pytest.fixture
def relay():
    @algorithm("broadcast", "relay")
    def relay(rank, size, *, root):
        """Everyone hands on to the next rank."""
        turn = (rank - root) % size
        if turn:
            yield Recv((rank - 1) % size)
        if turn < size - 1:
            yield Send((rank + 1) % size)

    yield relay
    unregister("broadcast", "relay")


def test_user_algorithm(relay):
    found = find("broadcast", "relay").algorithm
    assert found.function is relay and found in algorithms("broadcast")
    assert found.uses == {"root"} and found.summary == "Everyone hands on to the next rank."
    assert prove("broadcast", relay, 5, 3).messages == 4
    assert prove("broadcast", "relay", 5, 3).depth == 4
    assert "broadcast relay on 3 ranks" in text("broadcast", "relay", 3)
    assert svg("broadcast", "relay", 3).startswith("<svg")
    (row,) = sweep(range(1, 6), algorithms=["relay"])
    assert (row.name, row.proofs, row.proved) == ("relay", 15, True)
    assert list(mpidist.run_simulated(3, broadcast_rank_2)) == [[2.0], [2.0], [2.0]]


def broadcast_rank_2(comm):
    import numpy as np

    return comm.broadcast(np.full(1, float(comm.rank)), root=2, algorithm="relay").tolist()


def test_registering_a_name_again(relay):
    algorithm("broadcast", "relay")(lambda rank, size: ())
    assert find("broadcast", "relay").algorithm.function is not relay


def test_every_shipped_algorithm_is_documented():
    for each in algorithms():
        if each.function.__module__.startswith("mpidist."):
            assert each.summary.endswith("."), each.label
            for part in ("Rounds: ", "Bytes per rank: ", "Source: "):
                assert part in each.doc, each.label


def test_signatures_are_read_at_registration_only(monkeypatch):
    """To read one takes longer than a small call."""

    def blocks(size, groups, local):
        assert groups == (tuple(range(size)),) and local == ""
        return size

    @algorithm("barrier", "counted", blocks=blocks, requires=lambda size: None)
    def counted(rank, size):
        yield Send((rank + 1) % size), Recv((rank - 1) % size)

    monkeypatch.setattr("inspect.signature", lambda function: pytest.fail("read again"))
    try:
        found = find("barrier", "counted").algorithm
        assert found.block_count(3) == 3 and found.unsupported(3) is None
        assert found.schedule(0, 3) is not None
        assert find("allreduce", "hierarchical/direct/ring").algorithm.block_count(4) > 0
    finally:
        unregister("barrier", "counted")
