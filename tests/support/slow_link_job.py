"""What a rank does in test_slow_link_alone.py: ``python slow_link_job.py PART``, on two nodes."""

import sys
from time import perf_counter

import numpy as np

import mpidist
from mpidist.bench.training import overlaps, waiting
from mpidist.communicator.full_calibration import calibrate_fully
from mpidist.schedule import algorithms, find
from tests.support import collectives as cases

OTHERS = {
    "allreduce": ["hierarchical/ring/recursive_doubling", "hierarchical_leaders/tree:2/direct"],
    "broadcast": ["hierarchical/bruck/chain"],
}


def right(comm):
    """Every two-level algorithm gives the right result, from every root, in place or not.

    Those that take all ranks for alike too, from one root; "every" has them do all of it.
    """
    check(comm, two=(0, 1, 5, 1001), flat=(5, 1001), all_flat=False)


def every(comm):
    """Every algorithm at all, also with buffers that go in segments."""
    sizes = (0, 1, 5, 1001, 300_001)
    check(comm, two=sizes, flat=sizes, all_flat=True)


def check(comm, two, flat, all_flat):
    """Check every algorithm at these numbers of elements."""
    checked = 0
    for algorithm in algorithms():
        collective, full = algorithm.collective, all_flat or bool(algorithm.local)
        if algorithm.unsupported(comm.size, groups=comm.topology.groups) is not None:
            continue
        names = [algorithm.name, *(OTHERS.get(collective, []) if algorithm.local else [])]
        roots = range(comm.size) if algorithm.contract.rooted else (0,)
        for name in names:
            checked += 1
            if collective == "barrier":
                comm.barrier(name)
                continue
            for root in roots if full else roots[-1:]:
                for n in two if algorithm.local else flat:
                    for in_place in (False, True) if full else (False,):
                        cases.CHECKS[collective](comm, name, n, "float32", root, in_place)
    if comm.rank == 0:
        print(f"{checked} algorithms", flush=True)


def chosen(comm):
    """Across nodes "auto" takes two levels for large buffers; so does a two-level configuration."""
    for collective in ("allreduce", "broadcast", "reduce", "allgather", "reduce_scatter"):
        name = comm.explain(collective, 64 << 10)[0].name
        assert find(collective, name).algorithm.local, f"{collective} takes {name}"
    assert "the first call will calibrate" in comm.explain("allreduce", 16 << 20)[0].why
    x = np.full(1 << 20, comm.rank + 1.0, "float32")
    assert (comm.allreduce(x) == 10).all()
    candidate = comm.explain("allreduce", 16 << 20)[0]
    assert candidate.name.startswith("hierarchical/"), candidate
    assert candidate.why.startswith("cost model with the measured links: hierarchical/"), (
        candidate.why
    )
    assert len(set(comm.allgather_object(candidate.why))) == 1, "every rank has the same figures"
    config = mpidist.CollectiveConfig.multi_node(num_devices=2, num_nodes=2)
    from mpidist.backends.mpi import MpiBackend

    two = mpidist.Communicator(MpiBackend(comm.backend.comm), config)
    assert two.explain("allreduce", 4 << 20)[0].name == "hierarchical_leaders/tree:2/ring"
    assert (two.allreduce(x) == 10).all() and (two.iallreduce(x).wait() == 10).all()
    two.free()


def faster(comm):
    """Two levels against the flat ring, in turns; prints the ratio of the least times."""
    names = ("ring", "hierarchical/direct/recursive_doubling")
    for nbytes in (64 << 10, 1 << 20):
        x = np.ones(nbytes // 4, "float32")
        times = {name: [] for name in names}
        for turn in range(12):
            for name in names[:: 1 if turn % 2 else -1]:
                comm.barrier()
                begun = perf_counter()
                comm.allreduce(x, algorithm=name)
                taken = np.array([perf_counter() - begun])
                times[name].append(float(comm.allreduce(taken, op="max")[0]))
        ratio = min(times[names[0]][2:]) / min(times[names[1]][2:])
        if comm.rank == 0:
            print(f"ring / two levels at {nbytes}: {ratio:.2f}", flush=True)


def symmetric(comm):
    """Arrays of ``comm.empty`` are shared within each node, and calls on them are right."""
    x, whole, node = comm.empty(70_001), comm.empty(4 * 70_001), comm.topology.node
    x[:] = comm.rank + 1
    comm.barrier()
    reached = comm._service.heap.find(x).views(1, x.dtype)
    assert [view[0] for view in reached] == [rank + 1 for rank in node]
    comm.barrier()
    for algorithm in ("auto", "native", "hierarchical", "ring", "hierarchical/in_place/ring"):
        for _ in range(3):
            x[:] = comm.rank + 1
            comm.allgather(x, out=whole, algorithm=algorithm)
            assert (whole.reshape(4, -1) == np.arange(1, 5)[:, None]).all()
            assert (comm.allreduce(x, out=x, algorithm=algorithm) == 10).all()
    for memory in ("slots", "published"):
        for _ in range(3):
            private = np.full(70_001, comm.rank + 1.0)
            assert (comm.allreduce(private, algorithm=f"hierarchical/{memory}/ring") == 10).all()
    node = comm.split(comm.topology.node_rank)
    y = node.empty(1000)
    y[:] = 1
    assert (node.allreduce(y, out=y, algorithm="symmetric") == 2).all()
    comm.free(x)
    assert (comm.iallreduce(x, out=x).wait() == 40).all()


def hidden(comm):
    """Print how much of the communication is hidden behind a backward that leaves the cores free.

    In percent, what a thread hid, and what "auto" hid.
    """
    rows = overlaps(comm, 6, "training", waiting, autos=1)
    found = {row.candidate: row.figures["hidden"] for row in rows if "hidden" in row.figures}
    if comm.rank == 0:
        auto = next(name for name in found if name.startswith("auto"))
        print(f"{auto}: {100 * found[auto]:.0f}, thread: {100 * found['thread']:.0f}", flush=True)


def calibrated(comm):
    """A full calibration has curves of the link, by which "auto" chooses alike on all ranks."""
    found, wire = calibrate_fully(comm, 1.0), (1 << 20) * 8e-9
    assert comm.allgather_object(found) == [found] * comm.size
    assert found.ranks_per_node == (2, 2) and {name for name, _, _ in found.kernels} == {"native"}
    for curve in (found.far.one_way, found.far.both_ways):
        assert wire / 2 < curve.at(1 << 20) < 50 * wire, curve
    assert found.messages.one_way.at(1 << 20) < found.far.one_way.at(1 << 20)
    for collective in ("allreduce", "broadcast", "reduce_scatter"):
        chosen = comm.explain(collective, 1 << 20)[0]
        assert chosen.why.startswith("cost model: "), chosen.why
        assert len(set(comm.allgather_object((chosen.name, chosen.why)))) == 1
        cases.CHECKS[collective](comm, "auto", 1 << 16, "float32", 0, False)


PARTS = {
    part.__name__: part for part in (right, every, chosen, faster, symmetric, hidden, calibrated)
}


def main(part):
    comm = mpidist.init(timeout=30.0)
    nodes = ((0,), (1,)) if part == "hidden" else ((0, 1), (2, 3))
    assert comm.topology.groups == nodes, comm.topology.groups
    PARTS[part](comm)
    comm.barrier()
    if comm.rank == 0:
        print(f"{part}: yes", flush=True)


if __name__ == "__main__":
    main(sys.argv[1])
