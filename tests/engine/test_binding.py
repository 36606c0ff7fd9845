"""Memory: an algorithm touches only the blocks that its steps name; the input is never written."""

import numpy as np
import pytest

from mpidist import run_simulated
from mpidist.backends.null import NullBackend
from mpidist.calls.call import Call
from mpidist.engine.binding import CallBinder
from mpidist.engine.storage import HostMemory
from mpidist.errors import ScheduleError, Unsupported
from mpidist.operations import OPS
from mpidist.schedule import COLLECTIVES, Meet, algorithms, find, prove
from mpidist.schedule import algorithm as registered
from mpidist.schedule.registry import unregister
from mpidist.selection.segmentation import Segmentation

N = 1 << 12  # elements of the whole buffer


def program_bytes(collective, name, size, rank, root=0):
    """Scratch bytes of a program, and the call whose buffers it uses besides."""
    contract = COLLECTIVES[collective]
    count = N // size if contract.per_rank else N
    brings = contract.input_blocks(rank, size, root, size if contract.per_rank else 1)
    gets = contract.output_blocks(rank, size, root, size if contract.per_rank else 1)
    x = np.zeros(count * len(brings), np.float32) if len(brings) else None
    out = np.zeros(count * len(gets), np.float32) if len(gets) else None
    op = OPS["sum"] if contract.reduces else None
    counts = (count,) * size if contract.per_rank else ()
    dtype = np.dtype(np.float32)
    call = Call(collective, rank, size, root, dtype, x, out, op, counts, counts)
    groups = (tuple(range(size)),)
    binder, memory = CallBinder(groups, Segmentation(1 << 30)), HostMemory(call.dtype)
    return binder.program(
        NullBackend(size, rank), memory, call, find(collective, name), 2
    ).scratch_bytes


@pytest.mark.parametrize("size", [2, 4, 8])
@pytest.mark.parametrize(
    ("collective", "name"),
    [("gather", "linear"), ("gather", "binomial"), ("reduce", "binomial"), ("reduce", "tree")],
)
def test_leaf_has_no_scratch(collective, name, size):
    assert program_bytes(collective, name, size, rank=size - 1) == 0


@pytest.mark.parametrize("size", [2, 4, 8])
def test_scratch_of_gather_binomial(size):
    each = 4 * (N // size)
    for rank in range(1, size):
        subtree = min(rank & -rank, size - rank)
        # Its own block is sent from the input; it is packed with the others where there are any.
        allowed = 0 if subtree == 1 else (2 * subtree - 1) * each
        assert program_bytes("gather", "binomial", size, rank) <= allowed + 4


@pytest.mark.parametrize("size", [2, 4, 8])
@pytest.mark.parametrize("name", ["ring", "rabenseifner"])
def test_allreduce_needs_one_message_beside_the_result(name, size):
    largest = {"ring": N // size, "rabenseifner": N // 2}[name]
    assert program_bytes("allreduce", name, size, rank=0) <= 4 * (largest + 1)


@pytest.mark.parametrize("size", [2, 4, 8])
def test_scratch_of_allreduce_direct(size):
    assert program_bytes("allreduce", "direct", size, 0) <= 4 * (size - 1) * (N // size + 1)


SERVED = [
    pytest.param(algorithm, size, id=f"{algorithm.label}-{size}")
    for algorithm in algorithms()
    for size in (1, 2, 3, 5, 8)
    if algorithm.unsupported(size) is None and algorithm.collective != "barrier"
]


@pytest.mark.parametrize(("algorithm", "size"), SERVED)
def test_scratch_is_what_the_steps_write(algorithm, size):
    """Never more than the blocks written outside the result, and twice the largest round."""
    collective = algorithm.collective
    proof = prove(collective, algorithm, size)
    block = -(-N // proof.block_count) + 1
    for rank in range(size):
        rounds = proof.blocks_sent[rank] + proof.written[rank]
        allowed = 4 * block * (proof.written[rank] + 2 * max(rounds, 0))
        assert program_bytes(collective, algorithm.name, size, rank) <= allowed


def test_the_input_is_read_and_not_trampled():
    from mpidist import run_simulated

    def work(comm):
        for algorithm in algorithms("allreduce"):
            if algorithm.unsupported(comm.size, groups=comm.topology.groups) is None:
                x = np.arange(1000.0) + comm.rank
                x.flags.writeable = False
                comm.allreduce(x, algorithm=algorithm.name)
                assert (x == np.arange(1000.0) + comm.rank).all()

    run_simulated(4, work)


def test_messages_do_not_reach_other_ranks_memory():
    def work(comm):
        for name, why in (
            ("in_place", "the simulated backend has no shared memory"),
            ("hierarchical/published/ring", "the simulated backend has no shared memory"),
        ):
            with pytest.raises(Unsupported, match=f"{name}.*: {why}"):
                comm.allreduce(np.ones(3), algorithm=name)
        with pytest.raises(ScheduleError, match="Meet needs the memory of other ranks, which mess"):
            comm.barrier(algorithm="undeclared")

    @registered("barrier", "undeclared")
    def undeclared(rank, size):
        yield Meet(range(size))

    try:
        run_simulated(2, work)
    finally:
        unregister("barrier", "undeclared")
