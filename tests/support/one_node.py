"""The ranks of a node in one process, with their shared memory in one array.

The ranks' programs run phase by phase, the ranks of a phase in a random order: what a meeting does
not order may happen so.
"""

import os
import random
import weakref
from types import SimpleNamespace

import numpy as np

from mpidist.algorithms.relabel import inward
from mpidist.backends.process_memory import ProcessMemory
from mpidist.calls.arrays import owner
from mpidist.calls.call import Caller
from mpidist.calls.prepare import prepare
from mpidist.engine.symmetric import Symmetric
from mpidist.operations import find_op
from mpidist.schedule.registry import find
from mpidist.schedule.rounds import blocks
from mpidist.selection.segmentation import Segmentation
from mpidist.shared_memory.barrier import BarrierLines
from mpidist.shared_memory.heap import STAGING_BYTES, Allocation, Heap
from mpidist.shared_memory.host import Host

ROOTED = ("reduce", "broadcast", "gather", "scatter")


def host_of(backend, heap):
    """What executors get of a communicator on one node."""
    groups = (tuple(range(backend.size)),)
    return Host(
        backend, heap, None, groups, Segmentation(1 << 30), 2, check_same=None, mismatch=None
    )


class Ranks:
    """The ranks of a node, each with the executor of one memory."""

    def __init__(self, size, executor=Symmetric):
        self.size, self.number = size, 0
        words = memoryview(bytearray(BarrierLines.bytes_needed(size, 2))).cast("q")
        self.heaps = [Heap(rank, range(size), lambda value: [value] * size) for rank in range(size)]
        for rank, heap in enumerate(self.heaps):
            heap._lines = BarrierLines(words, rank, size, (1, 0))
        self.executors = [
            executor(host_of(SimpleNamespace(rank=rank, size=size), heap))
            for rank, heap in enumerate(self.heaps)
        ]
        stride = 4 * STAGING_BYTES
        self.staging = np.empty(stride * size, np.uint8)
        start = self.staging.__array_interface__["data"][0]
        for rank, heap in enumerate(self.heaps):
            made = Allocation(0, start, stride, size, rank, weakref.ref(self.staging))
            heap._staging = made, self.staging
        for made in self.executors:
            made.ready, made._reason = True, None
            made._memory = ProcessMemory([os.getpid()] * size)

    def empty(self, n, dtype="float64"):
        """Return a symmetric array of each rank."""
        nbytes = n * np.dtype(dtype).itemsize
        stride = 2 * (nbytes // 64 + 1) * 64
        flat = np.zeros(stride * self.size, np.uint8)
        self.number += 1
        start = flat.__array_interface__["data"][0]
        for rank, heap in enumerate(self.heaps):
            ref = weakref.ref(owner(flat))
            made = Allocation(self.number, start, stride, self.size, rank, ref)
            heap._allocations[id(owner(flat))] = heap._by_number[self.number] = made
        return [flat[r * stride : r * stride + nbytes].view(dtype) for r in range(self.size)]

    def calls(self, collective, xs, outs, root=0, op=None, counts=None):
        """Return the call of each rank, which passes what a user of that rank would pass."""
        given = {"root": root} if collective in ROOTED else {}
        given |= {} if op is None else {"op": op}
        given |= {} if counts is None else {"counts": counts}
        made = []
        for rank, (x, out) in enumerate(zip(xs, outs)):
            if collective in ("reduce", "gather") and rank != root:
                out = None
            if collective == "scatter" and rank != root:
                x = None
            made.append(prepare(collective, Caller(rank, self.size), x, out, **given).call)
        return made

    def why_not(self, name, calls, background=False):
        choice = find(calls[0].collective, name)
        return [e.why_not(call, choice, background) for e, call in zip(self.executors, calls)]

    def bound(self, name, calls):
        assert not any(self.why_not(name, calls))
        choice = find(calls[0].collective, name)
        return [e.bind(call, choice) for e, call in zip(self.executors, calls)]

    def run(self, programs, seed=0):
        order, shuffle = list(range(self.size)), random.Random(seed).shuffle
        for rank in order:
            for action in programs[rank].before:
                action()
        for rounds in zip(*(program.items for program in programs), strict=True):
            for at in rounds:
                if at.transfer is not None:
                    at.transfer.start()
            shuffle(order)
            for rank in order:
                assert rounds[rank].transfer is None or rounds[rank].transfer.test()
                for action in rounds[rank].after:
                    action()


def lengths(collective, n, size):
    """The elements of `x` and `out` of each rank, for parts or arrays of `n`."""
    long = n * size
    return (
        long if collective in ("scatter", "reduce_scatter", "alltoall") else n,
        long if collective in ("gather", "allgather", "alltoall") else n,
    )


def filled(arrays):
    for rank, x in enumerate(arrays):
        values = np.random.default_rng(rank).random(x.size) - 0.5
        x[...] = (values * 20).astype(x.dtype)


def combined(xs, op, parts):
    """The bits of ``direct``: a part's owner combines with the ranks below it, then above it."""
    function, size, total = find_op(op).function, len(xs), np.empty_like(xs[0])
    for rank, part in enumerate(parts):
        value = xs[rank][part]
        for peer in inward(rank, size)[1:]:
            other = xs[peer][part]
            value = function(other, value) if peer < rank else function(value, other)
        total[part] = value
    return total


def expected(collective, xs, root, op):
    """The result of every rank; None for none."""
    size = len(xs)
    if collective in ("scan", "exscan"):
        function, totals = find_op(op).function, [xs[0]]
        for x in xs[1:]:
            totals.append(function(totals[-1], x))
        return totals if collective == "scan" else [None, *totals[:-1]]
    if op is not None:
        total = combined(xs, op, blocks(xs[0].size, size))
        return np.split(total, size) if collective == "reduce_scatter" else [total] * size
    if collective == "broadcast":
        return [xs[root]] * size
    if collective in ("allgather", "gather"):
        return [np.concatenate(xs)] * size
    if collective == "scatter":
        return np.split(xs[root], size)
    return [np.concatenate([np.split(x, size)[rank] for x in xs]) for rank in range(size)]


def check_bits(ranks, collective, name, make, sizes, kinds):
    """A schedule, twice, in different orders of the ranks: the bits of ``direct``, `x` unchanged.

    ``make(n, dtype)`` returns an array of each rank; `kinds` are pairs of a dtype and an operation.
    """
    reduces = find(collective, name).algorithm.contract.reduces
    for n in sizes:
        for dtype, op in kinds:
            for root in sorted({0, ranks.size - 1}) if collective in ROOTED else (0,):
                xs, outs = (make(length, dtype) for length in lengths(collective, n, ranks.size))
                filled(xs)
                kept = [x.copy() for x in xs]
                wanted = expected(collective, kept, root, op if reduces else None)
                calls = ranks.calls(collective, xs, outs, root, op if reduces else None)
                programs = ranks.bound(name, calls)
                for seed in range(2):
                    for out in outs:
                        out[...] = 77
                    ranks.run(programs, seed)
                    assert [x.tobytes() for x in xs] == [x.tobytes() for x in kept]
                    assert_bits(calls, wanted)


def assert_bits(calls, wanted):
    """Each rank that gets a result has that of `wanted`."""
    for call, right in zip(calls, wanted):
        if right is not None and call.out is not None:
            assert call.out.tobytes() == right.tobytes()
