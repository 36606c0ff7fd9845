"""Symmetric memory on several nodes: each has its own, and calls are served as ever."""

import numpy as np
import pytest

import mpidist
from mpidist import CollectiveConfig, Communicator
from mpidist.backends import memory_file
from mpidist.backends.mpi import MpiBackend
from tests.support.pretended import on_nodes

N = 1000
TWO = CollectiveConfig(
    num_nodes=2, global_allreduce="ring", global_reduce="auto", global_broadcast="auto"
)


def test_each_node_has_its_own(nodes):
    """Every array of the node is in reach, at the same place, and has only its rank's values."""
    x, y = nodes.empty(N), nodes.empty((3, 4), "int16")
    assert not x.any() and not y.any() and y.shape == (3, 4)
    heap, node = nodes._service.heap, nodes.topology.node
    assert heap.ranks == node and heap.rank == nodes.topology.local_rank
    x[:], y[:] = nodes.rank, -nodes.rank
    nodes.barrier()
    reached = [view.tolist() for view in heap.find(x).views(N, x.dtype)]
    assert reached == [[rank] * N for rank in node]
    reached = [view.tolist() for view in heap.find(y[1:].reshape(-1)).views(8, y.dtype)]
    assert reached == [[-rank] * 8 for rank in node]
    nodes.barrier()  # until all have read
    assert len(set(nodes.allgather_object(heap.key(y)))) == 1


def test_a_store_is_seen_on_the_node_only(nodes):
    x = nodes.empty(nodes.size)
    for view in nodes._service.heap.find(x).views(nodes.size, x.dtype):
        view[nodes.rank] = 1
    nodes.barrier()
    assert np.flatnonzero(x).tolist() == list(nodes.topology.node)


def test_who_is_missing(nodes):
    """At a barrier of a node its ranks are named as the communicator numbers them."""
    nodes.empty(1)
    nodes.barrier()  # the first one may calibrate, in barriers of the node
    heap, last = nodes._service.heap, nodes.topology.node[-1]
    if nodes.rank != last:
        heap.lines.arrive(0)
    nodes.barrier()
    assert heap.missing() == (() if nodes.rank == last else (last,))
    nodes.barrier()
    if nodes.rank == last:
        heap.lines.arrive(0)
    nodes.barrier()
    assert heap.missing() == ()


@pytest.mark.one_node
@pytest.mark.parametrize("algorithm", ["auto", "native", "linear"])
@pytest.mark.parametrize("debug", [False, True])
def test_calls(comm, algorithm, debug):
    """On symmetric arrays all calls have the results that they have on private ones."""
    nodes = on_nodes(comm, 2, debug=debug)
    p, r = nodes.size, nodes.rank
    x, out, whole = nodes.empty(N), nodes.empty(N), nodes.empty(N * p)
    ranks = np.repeat(np.arange(p), N)
    how = {"algorithm": algorithm}
    for turn in range(3):
        root, here = turn % p, r == turn % p
        x[:], out[:], whole[:] = r, -1, ranks
        assert (nodes.allreduce(x, out=out, **how) == p * (p - 1) / 2).all()
        assert (nodes.iallreduce(out, out=out, **how).wait() == p * p * (p - 1) / 2).all()
        got = nodes.reduce(x, "max", root=root, out=out if here else None, **how)
        assert (got == p - 1).all() if here else got is None
        out[:] = r
        assert (nodes.broadcast(out, root=root, **how) == root).all()
        assert (nodes.reduce_scatter(whole, out=out, **how) == p * r).all()
        assert (nodes.scatter(whole if here else None, root=root, out=out, **how) == r).all()
        whole[:] = -1
        got = nodes.gather(x, root=root, out=whole if here else None, **how)
        assert (got.reshape(-1) == ranks).all() if here else got is None
        assert (nodes.allgather(x, out=whole, **how).reshape(-1) == ranks).all()
        assert (nodes.ialltoall(whole, **how).wait() == r).all()
    nodes.free()


def test_memory_that_only_a_node_shares_serves_no_call(nodes):
    x, count = nodes.empty(N), nodes.topology.num_nodes
    for name in ("symmetric", "staged", "single_copy"):
        with pytest.raises(mpidist.Unsupported, match=f"{name!r}: {count} nodes: .*within each"):
            nodes.allreduce(x, out=x, algorithm=name)
    chosen, every = nodes.explain("allreduce", x.nbytes, memory="symmetric")
    assert chosen.name == nodes.explain("allreduce", x.nbytes)[0].name
    (symmetric,) = (one for one in every if one.name == "symmetric")
    assert not symmetric.can and f"{count} nodes" in symmetric.why
    assert (nodes.allreduce(x, out=x) == 0).all()


def test_more_than_one_node_has(nodes, monkeypatch):
    """It fails on all ranks of all nodes, and later allocations are numbered alike again."""
    create, full = memory_file.create, nodes.topology.groups[-1][0]

    def refuse(nbytes, purpose, kind=memory_file.KINDS[0]):
        if nodes.rank == full and nbytes > 1 << 20:
            raise MemoryError("this node is full")
        return create(nbytes, purpose, kind)

    x = nodes.empty(N)
    monkeypatch.setattr(memory_file, "create", refuse)
    said = f"rank {nodes.rank}: cannot map .* memory: on rank {full}: this node is full$"
    with pytest.raises(MemoryError, match=said):
        nodes.empty(1 << 21)
    if nodes.rank == 0:
        del x  # the others keep it
    y = nodes.empty(N)
    assert len(set(nodes.allgather_object(nodes._service.heap.key(y)))) == 1
    assert (nodes.allreduce(y + 1, out=y) == nodes.size).all()


@pytest.mark.one_node
@pytest.mark.parametrize("debug", [False, True])
def test_free(comm, debug):
    nodes = on_nodes(comm, 2, debug=debug)
    x, y = nodes.empty(N), nodes.empty(N)
    x[:] = y[:] = 1
    work = nodes.iallreduce(x, out=x)
    nodes.free(x)
    assert (work.wait() == nodes.size).all()
    with pytest.raises(mpidist.InvalidArgument, match=rf"rank {nodes.rank}: free\(x\).*was freed"):
        nodes.free(x)
    x[:] = 1
    assert (nodes.allreduce(x, out=x) == nodes.size).all() and (y == 1).all()
    nodes.free(y)
    nodes.free()


def test_a_split_for_each_node_has_memory_of_all_its_ranks(nodes):
    """And one of a rank of each node has memory of one rank."""
    nodes.empty(3)  # else the numbers of both would be equal by chance
    topology = nodes.topology
    node = nodes.split(topology.node_rank)
    x = node.empty(N)
    for _ in range(3):
        x[:] = nodes.rank
        assert (node.allreduce(x, out=x, algorithm="symmetric") == sum(topology.node)).all()
    with pytest.raises(mpidist.InvalidArgument, match="was not allocated"):
        nodes.free(x)
    lane = nodes.split(topology.local_rank)
    y = lane.empty(N)
    y[:] = 1
    assert lane._service.heap.ranks == (lane.rank,)
    assert (lane.allreduce(y, out=y) == lane.size).all()
    for made in (lane, node):
        made.free()


@pytest.mark.one_node
def test_nodes_whose_ranks_share_no_memory(comm, monkeypatch):
    """As ranks in containers of their own, or on hosts that only count as a node."""
    if comm.size < 3:
        pytest.skip("needs at least 3 ranks")
    attach = memory_file.attach

    def fail(made, nbytes):
        if comm.rank == 1:
            raise FileNotFoundError(made)
        return attach(made, nbytes)

    with monkeypatch.context() as patched:
        patched.setattr(memory_file, "attach", fail)
        nodes = on_nodes(comm, 2)
    assert not nodes.backend.shares_memory
    reason = f"rank {comm.rank}: .*cannot map the same memory.*MPIDIST_RANKS_PER_NODE"
    with pytest.raises(mpidist.Unsupported, match=reason):
        nodes.empty(3)
    with pytest.raises(mpidist.Unsupported, match=reason):
        nodes.explain("allreduce", 8, memory="symmetric")
    with pytest.raises(mpidist.InvalidArgument, match="no symmetric memory: .*cannot map"):
        nodes.free(np.ones(3))
    assert (nodes.allreduce(np.ones(3)) == nodes.size).all()
    nodes.free()


@pytest.mark.one_node
def test_nodes_of_the_configuration(comm):
    """Where they lie on one host each, memory is shared within them; else there is none."""
    if comm.size % 2:
        pytest.skip("needs an even number of ranks")
    half = comm.size // 2
    halves = tuple(range(half)), tuple(range(half, comm.size))
    here = Communicator(MpiBackend(comm.backend.comm, [0] * comm.size), TWO)
    x = here.empty(3)
    x[:] = here.rank
    here.barrier()
    node = halves[here.rank >= half]
    views = here._service.heap.find(x).views(3, x.dtype)
    assert [view.tolist() for view in views] == [[rank] * 3 for rank in node]
    assert (here.allreduce(x, out=x) == comm.size * (comm.size - 1) / 2).all()
    here.free()
    if comm.size > 2:
        apart = on_nodes(comm, 1, TWO)
        said = rf"rank {comm.rank}: num_nodes=2 makes a node of the ranks \(0, 1.* several hosts"
        with pytest.raises(mpidist.Unsupported, match=said):
            apart.empty(3)
        apart.free()
