"""Operations of the backend "mpidist": performed in order, by a waiter or a thread; deadlines."""

import random
import time
from datetime import timedelta

import pytest

from tests.support.torch_groups import SECONDS, in_threads, need
from tests.support.training_kits import NEEDS_TORCH, torch

pytestmark = pytest.mark.skipif(torch is None, reason=NEEDS_TORCH)
if torch is not None:
    import torch.distributed as dist


def test_a_waiter_performs_what_has_not_begun(place, monkeypatch):
    """Nobody serves the group's queue here, as if its thread had not come to it yet."""
    rank, size = place
    group = dist.new_group()
    monkeypatch.setattr("mpidist.torch.work.THREADS.start", lambda _: None)
    x, y, z = (torch.ones(3) for _ in range(3))
    first, second, third = (dist.all_reduce(t, group=group, async_op=True) for t in (x, y, z))
    with pytest.raises(dist.DistBackendError, match=f"rank {rank}: .*Timed out waiting 20ms"):
        first.wait(timedelta(milliseconds=20))  # an operation has its own deadline
    assert not first.is_completed() and (x == 1).all()
    assert second.wait() and first.is_completed() and not third.is_completed()
    assert (x == size).all() and (y == size).all() and second.result()[0] is y
    dist.all_reduce(x, group=group)  # behind what is queued
    assert third.is_completed() and (z == size).all() and (x == size * size).all()
    dist.all_reduce(x.fill_(1), group=group)  # nothing is queued: it is performed at once
    assert (x == size).all()


def test_operations_end_without_a_waiter(place):
    _, size = place
    tensors = [torch.ones(5) for _ in range(10)]
    works = [dist.all_reduce(x, async_op=True) for x in tensors]
    until = time.monotonic() + 60
    while not all(work.is_completed() for work in works):
        assert time.monotonic() < until
        time.sleep(1e-3)
    assert all((x == size).all() for x in tensors)


def test_futures_end_in_order_while_others_wait(place):
    """Works with and without futures, waited for in any order of rank and thread."""
    rank, size = place
    chosen = random.Random(rank)
    for _ in range(10):
        tensors = [torch.full((k % 5 + 1,), float(k)) for k in range(12)]
        works = [dist.all_reduce(x, async_op=True) for x in tensors]
        futures = {k: works[k].get_future() for k in chosen.sample(range(12), 4)}
        for k in chosen.sample(range(12), 12):
            given = futures[k].wait()[0] if k in futures else works[k].result()[0]
            assert given is not None and (tensors[k] == k * size).all()


def test_works_are_performed_in_order(place):
    """The ranks wait in orders of their own; operations out of order would differ in length."""
    rank, size = place
    chosen = random.Random(rank)
    for _ in range(30):
        tensors = [torch.full((k % 5 + 1,), float(k)) for k in range(8)]
        works = [dist.all_reduce(x, async_op=True) for x in tensors]
        for k in chosen.sample(range(8), 8):
            assert works[k].wait() and (tensors[k] == k * size).all()


def test_threads_share_a_group(place):
    """Sends and receives, short and long, beside each other and beside collectives."""
    rank, size = place
    need(size, 2)
    right, left = (rank + 1) % size, (rank - 1) % size

    def exchange(tag):
        for k in range(30):
            x = torch.zeros(100_000 if (k + tag) % 7 == 0 else 5)
            if (rank + tag) % size:
                dist.recv(x, left, tag=tag)
                dist.send(torch.full_like(x, 100 * tag + k), right, tag=tag)
            else:
                dist.send(torch.full_like(x, 100 * tag + k), right, tag=tag)
                dist.recv(x, left, tag=tag)
            assert (x == 100 * tag + k).all()

    joined = in_threads(*(lambda tag=tag: exchange(tag) for tag in range(4)))
    for k in range(60):
        x = torch.ones(3)
        work = dist.all_reduce(x, async_op=k % 3 == 0)
        assert (work is None or work.wait()) and (x == size).all()
    joined()
    dist.barrier()


def test_a_profiler_sees_the_calls(place):
    """Collectives and messages, each once; a blocking collective with the time that it takes."""
    rank, size = place
    x, y, waited = torch.ones(2), torch.zeros(2), [False] * size
    for _ in range(5):  # a rank that comes late to the barrier, too, has waited less
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
            dist.all_reduce(x)
            dist.broadcast(x, 0, async_op=True).wait()
            works = [dist.isend(x, (rank + 1) % size), dist.irecv(y, (rank - 1) % size)]
            for work in works:
                work.wait()
            if rank == 0:
                time.sleep(0.2)
            dist.barrier()
        found = {e.key: e for e in profile.key_averages() if e.key.startswith("mpidist:")}
        assert {key: e.count for key, e in found.items()} == dict.fromkeys(
            [f"mpidist:{name}" for name in ("all_reduce", "broadcast", "send", "recv", "barrier")],
            1,
        )
        long = rank == 0 or found["mpidist:barrier"].cpu_time_total > 1e5  # µs
        dist.all_gather_object(waited, long)
        if all(waited):
            break
    assert all(waited)


def test_deadline(place):
    """A call of some members ends in time; the error has the call and the missing rank."""
    rank, size = place
    need(size, 2)
    group = dist.new_group(timeout=timedelta(seconds=SECONDS))
    slow = dist.new_group()
    slow.set_timeout(timedelta(seconds=0.4))  # not before: the members may come one by one
    begin = time.monotonic()
    if rank == 0:
        with pytest.raises(dist.DistBackendError, match="barrier #1 .*Timed out waiting 300ms"):
            group.barrier(timedelta(seconds=0.3)).wait()
        work = dist.all_reduce(torch.ones(1), group=slow, async_op=True)
        with pytest.raises(dist.DistBackendError, match="all_reduce.* Timed out waiting 400ms"):
            work.wait()
        assert not work.is_success()
        assert time.monotonic() - begin < 20
    dist.barrier()
    if rank == 0:
        late = dist.new_group([0, 1])
        late.set_timeout(timedelta(seconds=0.3))
        with pytest.raises(dist.DistBackendError, match="recv from rank 1 .*Timed out"):
            dist.recv(torch.ones(1), 1, group=late)
    else:
        dist.new_group([0, 1])
    dist.barrier()


def test_a_wait_with_a_deadline(place):
    rank, size = place
    need(size, 2)
    group = dist.new_group()
    if rank == 0:
        work = dist.all_reduce(torch.ones(1), group=group, async_op=True)
        with pytest.raises(dist.DistBackendError, match="Timed out waiting 200ms"):
            work.wait(timedelta(seconds=0.2))
        dist.barrier()
        assert work.wait()
    else:
        dist.barrier()
        dist.all_reduce(torch.ones(1), group=group)


@pytest.mark.parametrize("call", ["all_reduce", "all_gather_into_tensor"])
def test_wait_tensor_waits_for_a_collective_given_to_a_graph(place, call):
    """As C++ registers the work of its own groups; without, a graph read the old data."""
    rank, size = place
    functional = torch.distributed._functional_collectives
    registered = torch._C._distributed_c10d._get_work_registry_size
    out, before = torch.zeros(size * 4096), registered()
    given = out.fill_(1.0) if call == "all_reduce" else torch.ones(4096)
    with functional.allow_inflight_collective_as_graph_input_ctx():
        if rank == size - 1:
            time.sleep(0.3)
        if call == "all_reduce":
            work = dist.all_reduce(out, async_op=True)
        else:
            work = dist.all_gather_into_tensor(out, given, async_op=True)
        torch.ops._c10d_functional.wait_tensor(out)
        assert work.is_completed()
        assert set(out.tolist()) == {size if call == "all_reduce" else 1.0}
    assert registered() == before
