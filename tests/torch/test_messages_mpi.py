"""Sends and receives of the backend "mpidist", and the monitored barrier."""

import os
import signal
import threading
import time
from datetime import timedelta

import pytest

from mpidist.errors import CommunicatorInUse
from tests.support.torch_groups import SECONDS, in_threads, need
from tests.support.training_kits import NEEDS_TORCH, torch

pytestmark = pytest.mark.skipif(torch is None, reason=NEEDS_TORCH)
if torch is not None:
    import torch.distributed as dist


@pytest.mark.parametrize("count", [0, 1, 2000, 100_000])
def test_messages(place, count):
    """Round the ring, with tags; long messages are received in the other order."""
    rank, size = place
    need(size, 2)
    right, left = (rank + 1) % size, (rank - 1) % size
    received = [torch.empty(count) for _ in range(3)]
    works = [dist.irecv(x, left, tag=tag) for tag, x in enumerate(received)]
    sent = [dist.isend(torch.full((count,), 10.0 * rank + tag), right, tag=tag) for tag in range(3)]
    for work in reversed(works):
        work.wait()
    assert all((x == 10.0 * left + tag).all() for tag, x in enumerate(received))
    for work in sent:
        work.wait()
        assert work.is_completed() and work.exception() is None


def test_any_source(place):
    rank, size = place
    need(size, 2)
    if rank:
        dist.send(torch.full((3000,), float(rank)), 0, tag=5)
        dist.send(torch.full((3,), float(rank)), 0, tag=6)
    else:
        for count, tag in ((3000, 5), (3, 6)):
            found = set()
            for _ in range(size - 1):
                x = torch.empty(count)
                source = dist.recv(x, tag=tag)
                assert (x == source).all()
                found.add(source)
            assert found == set(range(1, size))
    dist.barrier()
    if rank == 1:
        dist.send(torch.ones(4), 0)
    if rank == 0:
        x = torch.empty(4)
        work = dist.irecv(x)
        work.wait()
        assert work._source_rank() == 1 and (x == 1).all()


def test_message_before_collective(place):
    """A long receive is pending while other operations run, blocking and not."""
    rank, size = place
    need(size, 2)
    for async_op in (False, True):
        if rank == 0:
            x = torch.empty(300_000)
            pending = dist.irecv(x, 1)
        if rank == 1:
            dist.send(torch.full((300_000,), 7.0), 0)
        y = torch.ones(3)
        work = dist.all_reduce(y, async_op=async_op)
        if async_op:
            work.wait()
        assert (y == size).all()
        if rank == 0:
            pending.wait()
            assert (x == 7).all()


def test_wrong_message(place):
    """A message of another length writes nothing, and says both lengths."""
    rank, size = place
    need(size, 2)
    if rank == 0:
        dist.send(torch.ones(5), 1, tag=3)
    elif rank == 1:
        x = torch.zeros(8)
        with pytest.raises(RuntimeError, match=r"rank 1: recv from rank 0 .*tag 3.*float32 \(5,\)"):
            dist.recv(x[:3], 0, tag=3)
        assert (x == 0).all()
    dist.barrier()


def test_a_receive_waits_in_a_thread_beside_sends(place):
    """What the thread waits for comes after many more messages of the main thread."""
    rank, size = place
    need(size, 2)
    right, left = (rank + 1) % size, (rank - 1) % size
    for count in (3, 100_000):
        last = torch.zeros(count)
        joined = in_threads(lambda last=last: dist.recv(last, left, tag=77))
        for k in range(10):
            x = torch.zeros(count)
            receive = dist.irecv(x, left, tag=k)
            dist.send(torch.full((count,), float(k)), right, tag=k)
            assert receive.wait() and (x == k).all()
        assert (last == 0).all()
        dist.barrier()
        dist.send(torch.ones(count), right, tag=77)
        joined()
        assert (last == 1).all()
    dist.barrier()


def test_two_threads_wait_for_one_receive(place):
    """Both return when the tensor has the message; nothing is written to it afterwards."""
    rank, size = place
    need(size, 2)
    right, left = (rank + 1) % size, (rank - 1) % size
    for k in range(20):
        x = torch.zeros(1000, 2)[:, 0]  # received elsewhere, and copied
        receive = dist.irecv(x, left, tag=k)
        joined = in_threads(receive.wait)
        send = dist.isend(torch.full((1000,), float(k)), right, tag=k)
        assert receive.wait() and (x == k).all() and send.wait()
        x.fill_(-1)
        joined()
        assert (x == -1).all()
    dist.barrier()


def test_a_refused_wait_loses_no_message(place, folder):
    """A signal handler that interrupts the wait is refused; the message still comes."""
    rank, size = place
    need(size, 2)
    right, left = (rank + 1) % size, (rank - 1) % size
    x, refused = torch.zeros(3), []
    receive = dist.irecv(x, left, tag=5)

    def handler(*_):
        try:
            receive.wait()
        except CommunicatorInUse as error:
            refused.append(str(error))

    before = signal.signal(signal.SIGUSR1, handler)
    try:
        main = threading.get_ident()

        def strike():
            until = time.monotonic() + SECONDS
            while not refused and time.monotonic() < until:
                time.sleep(0.02)
                signal.pthread_kill(main, signal.SIGUSR1)
            (folder / str(rank)).touch()  # a message would end the wait of a rank before its strike
            while len(list(folder.iterdir())) < size and time.monotonic() < until:
                time.sleep(0.02)
            dist.send(torch.ones(3), right, tag=5)

        joined = in_threads(strike)
        assert receive.wait() and (x == 1).all()
        joined()
    finally:
        signal.signal(signal.SIGUSR1, before)
    assert refused
    for text in refused:
        assert f"rank {rank}: " in text and " inside " in text, text
        assert text.count(os.path.basename(__file__)) == 2, text  # both places
    dist.barrier()


def test_messages_to_oneself(place):
    """In any order, short and long, in a batch, and to whoever receives from any rank."""
    rank, _ = place
    for count in (3, 100_000):
        x = torch.full((count,), rank + 1.0)
        for begin in ((dist.isend, dist.irecv), (dist.irecv, dist.isend)):
            y = torch.zeros(count)
            given = {dist.isend: x, dist.irecv: y}
            for work in [call(given[call], rank) for call in begin]:
                work.wait()
            assert (y == x).all()
        y = torch.zeros(count)
        batch = [dist.P2POp(dist.isend, x, rank), dist.P2POp(dist.irecv, y, rank)]
        for work in dist.batch_isend_irecv(batch):
            work.wait()
        assert (y == x).all()
    y, sent = torch.zeros(count), dist.isend(x, rank, tag=2)
    came = dist.group.WORLD.recv_anysource([y], 2)
    assert came.source_rank() == rank and (y == x).all()
    sent.wait()


def test_after_a_message_that_did_not_come(place):
    """Which breaks a communicator on one rank: the group is not freed, on no rank."""
    rank, size = place
    need(size, 2)
    group = dist.new_group()
    group.set_timeout(timedelta(seconds=0.2))  # not before: the members may come one by one
    if rank == 0:
        with pytest.raises(dist.DistBackendError, match="recv from rank 1 .*Timed out"):
            dist.recv(torch.ones(1), 1, group=group)
        calls = {
            "monitored_barrier": group.monitored_barrier,
            "allocate_tensor": lambda: group.allocate_tensor(3, dtype=torch.int, device="cpu"),
            "send to rank 1": lambda: dist.send(torch.ones(1), 1, group=group),
        }
        for name, call in calls.items():
            with pytest.raises(dist.DistBackendError, match=f"rank 0: {name} of group .* broken"):
                call()
    dist.destroy_process_group(group)
    for _ in range(2):
        dist.barrier(dist.new_group())


def test_monitored_barrier(place):
    """Rank 0 names who is missing, the first or all; the group is usable afterwards."""
    rank, size = place
    need(size, 2)
    for every in (False, True):
        dist.monitored_barrier(timeout=timedelta(seconds=20), wait_all_ranks=every)
    dist.barrier()
    missing = list(range(1, size))
    if rank == 0:
        words = f"Ranks? {', '.join(map(str, missing))} failed to pass monitoredBarrier in 200 ms"
        with pytest.raises(dist.DistBackendError, match=words):
            dist.monitored_barrier(timeout=timedelta(seconds=0.2), wait_all_ranks=True)
        with pytest.raises(dist.DistBackendError, match="Rank 1 failed to pass monitoredBarrier"):
            dist.monitored_barrier(timeout=timedelta(seconds=0.2))
        with pytest.raises(dist.DistBackendError, match="Rank 0 timed out in monitoredBarrier"):
            dist.monitored_barrier(timeout=timedelta(0))
    dist.barrier()
    if rank == size - 1:
        for _ in range(3):
            words = f"Rank {rank} successfully reached monitoredBarrier, but received errors"
            with pytest.raises(dist.DistBackendError, match=words):
                dist.monitored_barrier(timeout=0.1)
    dist.barrier()
    dist.all_reduce(torch.ones(1))
