"""The configuration acts: two levels, strategies on each, thresholds and arity steer auto."""

import numpy as np
import pytest

from mpidist import CollectiveConfig, Communicator
from mpidist.backends.mpi import MpiBackend
from mpidist.errors import ConfigError, Unsupported
from tests.support import collectives as cases


def two_nodes(comm, config):
    """Two nodes of as many ranks as there are; on an odd number each rank is a node."""
    return Communicator(MpiBackend(comm.backend.comm), config)


def layout(comm):
    nodes = 2 if comm.size % 2 == 0 else comm.size
    return comm.size // nodes, nodes


def watch(comm):
    """Note which candidate is taken."""
    taken, choose = [], comm._service.chooser.choose

    def watching(*asked, **more):
        found = choose(*asked, **more)
        taken.append(found.name)
        return found

    comm._service.chooser.choose = watching
    return taken


def kind(local):
    """Only what gathers at a root in the node needs a leader."""
    return "hierarchical" if local in ("direct", "ring") else "hierarchical_leaders"


def test_results(comm):
    devices, nodes = layout(comm)
    two = two_nodes(comm, CollectiveConfig.multi_node(devices, nodes))
    for n in cases.lengths(comm.size):
        for root in range(comm.size):
            for in_place in (False, True):
                for collective in ("allreduce", "reduce", "broadcast"):
                    cases.CHECKS[collective](two, "auto", n, "int64", root, in_place)
    assert two.allreduce(comm.rank + 1.0, "mean") == (comm.size + 1) / 2
    got = two.reduce(np.full((2, 2), comm.rank + 1.0), "mean", comm.size - 1)
    assert got is None or (got == (comm.size + 1) / 2).all()
    for collective in ("allgather", "gather", "scatter", "reduce_scatter", "alltoall"):
        cases.CHECKS[collective](two, "auto", 7, "float32", 0, False)
    out = np.zeros((4, 8))[:, ::2]
    assert (two.allreduce(np.ones((4, 4)), out=out) == comm.size).all()
    two.barrier()
    assert (two.iallreduce(np.ones(4)).wait() == comm.size).all()
    assert two.allreduce(1, algorithm="ring") == comm.size  # a name asked for is one level
    two.free()


def test_order_where_it_matters(comm):
    """Ranks of a node need not follow each other: what does not commute is not nested."""
    devices, nodes = layout(comm)
    config = CollectiveConfig.multi_node(devices, nodes).replace(
        local_allreduce="linear", global_allreduce="linear"
    )
    hosts = [r % nodes for r in range(comm.size)]
    two = Communicator(MpiBackend(comm.backend.comm, hosts), config)
    x = np.array([(comm.rank + 1) * 100 + 1])
    got = two.allreduce(x, join, commute=False)
    assert got == int("".join(str(r + 1) for r in range(comm.size))) * 100 + comm.size
    two.free()


def join(a, b):
    (x, n), (y, m) = divmod(a, 100), divmod(b, 100)
    return (x * 10**m + y) * 100 + (n + m)


@pytest.mark.parametrize(
    ("strategy", "local", "across"),
    [
        ({}, "tree:2", "ring"),
        ({"local_allreduce": "ring"}, "ring", "ring"),
        ({"local_allreduce": "tree:3", "global_allreduce": "tree:4"}, "tree:3", "tree:4"),
        ({"local_allreduce": "linear", "global_allreduce": "tree"}, "linear", "tree:2"),
        ({"global_allreduce": "tree", "tree_arity": 5}, "tree:2", "tree:5"),
        ({"local_allreduce": "auto", "tree_threshold_bytes": 1}, "tree:2", "ring"),
    ],
)
def test_allreduce_strategies(comm, strategy, local, across):
    config = CollectiveConfig.multi_node(*layout(comm)).replace(**strategy)
    two = two_nodes(comm, config)
    taken = watch(two)
    expected = f"{kind(local)}/{local}/{across}"
    assert (two.allreduce(np.ones(9)) == comm.size).all()
    assert (two.iallreduce(np.ones(9)).wait() == comm.size).all()
    assert len(taken) >= 2 and set(taken) == {expected}
    assert two.explain("allreduce", 36)[0].name == expected
    two.free()


@pytest.mark.parametrize("collective", ["reduce", "broadcast"])
@pytest.mark.parametrize(
    ("strategy", "name"), [("linear", "linear"), ("tree", "tree:2"), ("tree:3", "tree:3")]
)
def test_rooted_strategies(comm, collective, strategy, name):
    """The local strategy of multi_node is left open, the global one a tree."""
    config = CollectiveConfig.multi_node(*layout(comm))
    for level, expected in (
        ("local", f"hierarchical_leaders/{name}/tree:2"),
        ("global", f"hierarchical/direct/{name}"),
    ):
        two = two_nodes(comm, config.replace(**{f"{level}_{collective}": strategy}))
        taken = watch(two)
        x = np.full(3, comm.rank + 1.0)
        getattr(two, collective)(x, root=comm.size - 1)
        getattr(two, f"i{collective}")(x, root=comm.size - 1).wait()
        assert len(taken) >= 2 and set(taken) == {expected}
        two.free()


def test_levels_have_the_right_ranks(comm):
    """Seen in the messages: with a star on both levels a leader hears from its node and leaders."""
    devices, nodes = layout(comm)
    star = dict.fromkeys(("local_allreduce", "global_allreduce"), "linear")
    two = two_nodes(comm, CollectiveConfig.multi_node(devices, nodes).replace(**star))
    peers, irecv = set(), two.backend.irecv

    def watching(data, peer, tag):
        peers.add(peer)
        return irecv(data, peer, tag)

    two.backend.irecv = watching
    two.allreduce(np.ones(3))
    first, top = comm.rank - comm.rank % devices, comm.rank == 0
    expected = set(range(first + 1, first + devices)) if comm.rank == first else {first}
    if comm.rank == first:
        expected |= set(range(devices, comm.size, devices)) if top else {0}
    assert peers == expected
    two.free()


def explained(comm, config, nbytes, collective="allreduce"):
    made = Communicator(comm.backend, config)
    return made.explain(collective, nbytes)[0].name


@pytest.mark.one_node
def test_thresholds_steer_auto(comm):
    """Set by the user they decide; their defaults do not, and what the call says comes first."""
    p = comm.size
    assert explained(comm, None, 100) == "staged"
    low = CollectiveConfig(tree_threshold_bytes=1000)
    assert explained(comm, low, 996) == "tree:2"
    assert explained(comm, low, 1000) == ("ring" if p >= 4 else "tree:2")
    wide = CollectiveConfig(tree_arity=7)
    assert explained(comm, wide, 100) == "tree:7"
    assert explained(comm, wide, 100, "broadcast") == "tree:7"
    assert explained(comm, CollectiveConfig(local_broadcast="linear"), 8, "broadcast") == ("linear")
    assert explained(comm, CollectiveConfig.single_node(p), 8) == "ring"
    ring = Communicator(comm.backend.split(0, comm.rank), CollectiveConfig(tree_arity=3))
    used = []
    choose = ring._service.chooser.choose

    def watching(*asked, **more):
        found = choose(*asked, **more)
        used.append(found.name)
        return found

    ring._service.chooser.choose = watching
    for name in ("auto", "ring", "native", "tree:4", "tree"):
        assert ring.allreduce(1, algorithm=name) == p
    assert list(dict.fromkeys(used)) == ["tree:3", "ring", "native", "tree:4", "tree"]
    ring.free()


def test_tree_without_arity_takes_the_configured_one(comm):
    """Seen in the messages that the root of a broadcast sends."""
    for arity in (2, 3, 4):
        sub = Communicator(comm.backend.split(0, comm.rank), CollectiveConfig(tree_arity=arity))
        sent = []
        isend = sub.backend.isend
        sub.backend.isend = lambda *a, sent=sent, isend=isend: sent.append(a[1]) or isend(*a)
        sub.broadcast(np.ones(3), algorithm="tree")
        if comm.rank == 0:
            assert len(sent) == min(arity, comm.size - 1)
        sub.free()


def test_counts_must_fit(comm):
    p = comm.size
    for config in (CollectiveConfig(num_devices=p + 1), CollectiveConfig.multi_node(p, 2)):
        with pytest.raises(ConfigError, match=f"rank {comm.rank}: .*the communicator has {p}"):
            Communicator(comm.backend, config)


def test_impossible_strategy_is_not_replaced(comm):
    """A strategy that cannot serve a call is an error, not another algorithm."""
    sub = Communicator(comm.backend, CollectiveConfig(local_allreduce="tree"))
    with pytest.raises(Unsupported, match="tree:2.*not commutative"):
        sub.allreduce(1.0, lambda a, b: a, commute=False)


def test_timeout(comm):
    sub = Communicator(comm.backend, CollectiveConfig(timeout=3.5))
    assert sub.timeout == 3.5
    sub.timeout = None
    assert sub.timeout is None
    with pytest.raises(ConfigError, match="timeout=-1"):
        sub.timeout = -1
