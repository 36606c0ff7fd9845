"""Works of the backend "mpidist", and their futures."""

import threading

import pytest

from mpidist.errors import MpidistError
from tests.support.training_kits import NEEDS_TORCH, torch

pytestmark = pytest.mark.skipif(torch is None, reason=NEEDS_TORCH)
if torch is not None:
    import torch.distributed as dist


@pytest.mark.parametrize("async_ops", (False, True))
def test_coalesced_with_a_device(place, async_ops):
    """PyTorch then keeps no Work but the one of the block's end, which stands for all."""
    rank, size = place
    before = dist.all_reduce(torch.ones(300_000), async_op=True)  # blocking ones are queued behind
    x, y = torch.full((300_000,), float(rank)), torch.full((3,), float(rank))
    out, peers = torch.zeros(2), ((rank + 1) % size, (rank - 1) % size)
    cpu = torch.device("cpu")
    with dist._coalescing_manager(device=cpu, async_ops=async_ops) as block:
        dist.all_reduce(x)
        dist.all_reduce(y)
        dist.broadcast(last := torch.full((2,), rank), size - 1, async_op=True)
        if size > 1:
            dist.isend(torch.full((2,), float(rank)), peers[0])
            dist.irecv(out, peers[1])
    block.wait()
    assert all((t == size * (size - 1) // 2).all() for t in (x, y)) and (last == size - 1).all()
    assert (out == (peers[1] if size > 1 else 0)).all() and before.wait()
    assert [work.is_success() for work in block.works] == [True] * async_ops
    for work in block.works:
        assert len(work.get_future().wait()) == (5 if size > 1 else 3) and not work.exception()


def test_the_first_error_of_a_coalesced_block(place):
    rank, size = place
    x = torch.ones(3)
    with dist._coalescing_manager(device=torch.device("cpu"), async_ops=True) as block:
        dist.reduce(torch.ones(2), 0, op=dist.ReduceOp.BXOR, async_op=True)  # of floats
        dist.reduce(torch.ones(2), 0, op=dist.ReduceOp.BAND, async_op=True)
        dist.all_reduce(x)
    with pytest.raises(MpidistError, match=f"rank {rank}: .*xor"):
        block.wait()
    assert (x == size).all()  # it has waited for all
    (work,) = block.works
    assert work.is_completed() and not work.is_success() and "xor" in str(work.exception())
    with pytest.raises(Exception, match="xor"):
        work.get_future().wait()
    dist.barrier()


def test_work(place):
    rank, size = place
    x = torch.ones(4)
    work = dist.all_reduce(x, async_op=True)
    done = []
    chained = work.get_future().then(lambda future: done.append(future.value()[0].sum().item()))
    assert work.wait() and work.is_completed() and work.is_success()
    assert work.exception() is None and work.result()[0] is x
    chained.wait()
    assert done == [4.0 * size] and work.get_future().done()
    works = [dist.all_reduce(torch.full((2,), float(k)), async_op=True) for k in range(20)]
    assert [w.result()[0][0].item() for w in works] == [float(k * size) for k in range(20)]


def test_threads_serve_again(place):
    def futures(count):
        return [
            dist.all_reduce(torch.ones(2), async_op=True).get_future().then(lambda f: f.value()[0])
            for _ in range(count)
        ]

    _, size = place
    assert all((future.wait() == size).all() for future in futures(3))
    more = []  # a thread that is held up may not be idle yet, and another one begins
    for _ in range(4):
        before = threading.active_count()
        for _ in range(5):
            assert all((future.wait() == size).all() for future in futures(10))
        more.append(threading.active_count() - before)
    assert min(more) <= 2, more  # one may run callbacks while one serves


def test_collective_in_a_callback(place):
    """A callback may start a collective and wait for it, as PowerSGD does."""
    _, size = place

    def again(future):
        (x,) = future.value()
        return dist.all_reduce(x, async_op=True).get_future().wait()[0]

    future = dist.all_reduce(torch.ones(2), async_op=True).get_future().then(again)
    assert (future.wait() == size * size).all()


def test_exception_of_a_work(place):
    rank, _ = place
    work = dist.all_reduce(torch.ones(2), op=dist.ReduceOp.AVG, async_op=True)
    work.wait()
    work = dist.all_reduce(torch.ones(2), op=dist.ReduceOp.BXOR, async_op=True)  # of floats
    with pytest.raises(MpidistError, match=f"rank {rank}"):
        work.wait()
    assert work.is_completed() and not work.is_success()
    assert isinstance(work.exception(), MpidistError)
    with pytest.raises(Exception, match=f"rank {rank}"):
        work.get_future().wait()
    dist.barrier()
