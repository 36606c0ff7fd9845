"""Schedules over the messages of NCCL."""

import numpy as np
import pytest

from mpidist.device.find import find_device
from mpidist.errors import Unsupported
from mpidist.gpu.nccl import schedules
from mpidist.gpu.nccl.schedules import why_stuck
from mpidist.schedule.registry import algorithm, algorithms, find, unregister
from mpidist.schedule.rounds import Copy, Reduce, Send
from mpidist.schedule.unrolled import materialise
from tests.support import collectives as cases
from tests.support.gpu_kits import OnDevice


@pytest.mark.parametrize("size", [2, 5])
def test_written_schedules_over_its_messages(by_nccl, size):
    """All that there are, in place and not, with the bits that they have on the host."""

    def check(comm, library):
        served = 0
        for found in algorithms():
            name = found.collective
            if name not in cases.CHECKS or found.requires is not None:
                continue
            for n, in_place in ((1, True), (size + 1, False), (33, True)):
                if not found.equal_blocks or n % size == 0:
                    there = OnDevice(comm)
                    cases.CHECKS[name](there, found.name, n, "float32", size - 1, in_place)
            served += 1
        x = np.random.default_rng(comm.rank).normal(size=1001)
        for name in ("ring", "recursive_doubling", "tree:3"):
            for op in ("mean", "prod"):
                mine = comm.allreduce(find_device().array(x), op, algorithm=name).get()
                assert mine.tobytes() == comm.allreduce(x, op, algorithm=name).tobytes(), name
            half = np.linspace(-1, 1, 1001, dtype="f2") * np.float16(65000)
            mine = comm.allreduce(find_device().array(half), "mean", algorithm=name).get()
            assert mine.tobytes() == comm.allreduce(half, "mean", algorithm=name).tobytes(), name
            assert np.allclose(mine, half, rtol=0.01), name  # nor has it overflowed
        return served, library.groups

    (served, groups), *_ = by_nccl(size, check)
    assert served > 20 and groups > served


def test_a_schedule_that_nccl_would_wait_in(by_nccl):
    """It sends in one round what is received in the next: MPI keeps that, NCCL does not."""

    def late(rank, size):
        peer = 1 - rank
        yield Send(peer, blocks=0)
        yield Reduce(peer, blocks=0)

    def check(comm, library):
        with pytest.raises(
            Unsupported, match="'late': NCCL does not buffer messages: ranks 0, 1 would"
        ):
            comm.allreduce(find_device().array(np.ones(4)), algorithm="late")
        assert (comm.allreduce(find_device().array(np.ones(4))).get() == 2).all()

    algorithm("allreduce", "late", blocks=1)(late)
    try:
        by_nccl(2, check)
    finally:
        unregister("allreduce", "late")


def test_a_round_is_a_group(by_nccl):
    """Rounds that only copy are none, and a schedule is written down once, whatever the array."""
    played = []

    def counted(rank, size):
        played.append(rank)
        yield Copy((0, 1), (0, 1), "out", "tmp")
        for block in (0, 1):
            yield Send(1 - rank, blocks=block), Reduce(1 - rank, blocks=block)

    def check(comm, library):
        for n in (5, 8):
            x = find_device().array(np.arange(n) + comm.rank)
            before = library.groups
            got = comm.allreduce(x, algorithm="counted")
            assert (got.get() == 2 * np.arange(n) + 1).all()
            assert library.groups - before == 2
        return played.count(comm.rank)

    algorithm("allreduce", "counted", blocks=2)(counted)
    try:
        for rank_played in by_nccl(2, check):
            # by each rank for itself, and by both to see that it does not wait for itself
            assert rank_played <= 4
    finally:
        unregister("allreduce", "counted")


def test_what_is_known_of_schedules_is_limited():
    for arity in range(2, 302):
        assert schedules._why_stuck(find("allreduce", "tree").algorithm, 2, 0, arity, ()) is None
    assert schedules._why_stuck.cache_info().currsize < 300


def test_no_shipped_schedule_waits_for_itself():
    for found in algorithms():
        for size in (2, 3, 4, 7, 8):
            groups = (tuple(range(size // 2)), tuple(range(size // 2, size)))
            if found.unsupported(size, groups=groups) is None:
                every = [
                    materialise(found.schedule(r, size, size - 1, 3, groups)) for r in range(size)
                ]
                assert why_stuck(every) is None, found
