"""Process groups of the backend "mpidist": how they begin and end, and what c10d asks of them."""

import os
import sys
import time
from datetime import timedelta

import pytest

from mpidist.communicator.communicator import Communicator
from mpidist.errors import InvalidArgument, MpidistError
from tests.support.torch_groups import SECONDS, need
from tests.support.training_kits import NEEDS_TORCH, torch

pytestmark = pytest.mark.skipif(torch is None, reason=NEEDS_TORCH)
if torch is not None:
    import torch.distributed as dist

    import mpidist.torch
    from mpidist.backends import memory_file
    from mpidist.backends.native import NativeCollectives


def test_init(place):
    rank, size = place
    assert dist.get_backend() == "mpidist" and dist.is_initialized()
    assert os.environ["RANK"] == str(rank) and os.environ["WORLD_SIZE"] == str(size)
    assert 0 <= int(os.environ["LOCAL_RANK"]) < int(os.environ["LOCAL_WORLD_SIZE"])
    assert os.environ["MASTER_ADDR"] and os.environ["MASTER_PORT"].isdigit()
    assert dist.group.WORLD.name() == "mpidist" and dist.group.WORLD.size() == size


def test_a_new_group_chooses_no_way(place, monkeypatch):
    """It shares no memory but its boards, and calls no collective of MPI, before its first call."""
    purposes, called = [], []
    create, actions = memory_file.create, NativeCollectives.actions

    def creating(nbytes, purpose, *kind):
        purposes.append(purpose)
        return create(nbytes, purpose, *kind)

    def acting(native, call):
        called.append(call.collective)
        return actions(native, call)

    monkeypatch.setattr(memory_file, "create", creating)
    monkeypatch.setattr(NativeCollectives, "actions", acting)
    group = dist.new_group()
    assert set(purposes) <= {"board"} and not called
    dist.destroy_process_group(group)


def test_again(place):
    """Destroyed and made again, by each of the addresses; groups of gloo meet in the store too."""
    rank, size = place
    for address in (None, "mpidist://", "env://"):
        dist.destroy_process_group()
        assert not dist.is_initialized()
        dist.init_process_group("mpidist", address, timeout=timedelta(seconds=SECONDS))
        x = torch.tensor([rank])
        dist.all_reduce(x)
        assert x.item() == size * (size - 1) // 2
        beside = dist.new_group(backend="gloo")
        dist.all_reduce(x, group=beside)
        assert x.item() == size * size * (size - 1) // 2


def test_wrong_rank(place):
    """A rank that MPI does not give is refused, with both."""
    rank, size = place
    dist.destroy_process_group()
    try:
        with pytest.raises(InvalidArgument, match=rf"rank {rank}: .*world_size={size + 1}.*MPI"):
            dist.init_process_group("mpidist", rank=rank, world_size=size + 1)
    finally:
        dist.init_process_group("mpidist", timeout=timedelta(seconds=SECONDS))


def test_what_cannot_be(place):
    rank, _ = place
    with pytest.raises(MpidistError, match=f"rank {rank}: .*xor.*float32"):
        dist.all_reduce(torch.ones(2), op=dist.ReduceOp.BXOR)
    elsewhere = (
        f"rank {rank}: a tensor on meta: group '.*' .*tensors on cpu and cuda.*backend='nccl'"
    )
    with pytest.raises(NotImplementedError, match=elsewhere):
        dist.all_reduce(torch.ones(2, device="meta"))
    for both in ("cpu:mpidist,cuda:gloo", "cuda:gloo,cpu:mpidist"):
        group = dist.new_group(backend=both)
        with pytest.raises(InvalidArgument, match=f"rank {rank}: group .*backend '{both}'.*'nccl'"):
            dist.all_reduce(torch.ones(2), group=group)
    x = torch.ones(2)
    dist.all_reduce(x)
    assert (x == dist.get_world_size()).all()


def test_symmetric_memory(place):
    """Tensors that come and go, where private ones may come next; groups have their own."""
    rank, size = place
    mine = dist.new_group()
    total = size * (size + 1) / 2
    for group in (None, mine):
        for _ in range(3):
            x = mpidist.torch.empty(1000, 50, group=group)
            assert x.shape == (1000, 50) and x.dtype == torch.float32 and (x == 0).all()
            for _ in range(3):
                x.fill_(rank + 1)
                dist.all_reduce(x, group=group)
                assert (x == total).all()
                part = x[10:20].fill_(rank + 1)
                dist.all_reduce(part, group=group)
                assert (part == total).all() and (x[20:] == total).all()
            private = torch.full((1000, 50), rank + 1.0)
            dist.all_reduce(private, group=group)
            assert (private == total).all()
            del x, part
            private = torch.full((1000, 50), rank + 1.0)
            dist.all_reduce(private, group=group)
            assert (private == total).all()
    half = mpidist.torch.empty(3, dtype=torch.bfloat16).fill_(1)
    dist.all_reduce(half, async_op=True).wait()
    assert (half == size).all() and mpidist.torch.empty(0, 3).shape == (0, 3)


def test_objects(place):
    rank, size = place
    every = [None] * size
    dist.all_gather_object(every, {"rank": rank, "text": "x" * 1000 * rank})
    assert [value["rank"] for value in every] == list(range(size))
    got = [rank, None] if rank == size - 1 else [None, None]
    dist.broadcast_object_list(got, src=size - 1)
    assert got == [size - 1, None]
    gathered = [None] * size if rank == 0 else None
    dist.gather_object((rank,), gathered, dst=0)
    assert gathered == ([(r,) for r in range(size)] if rank == 0 else None)
    mine = [None]
    dist.scatter_object_list(mine, [f"for {r}" for r in range(size)] if rank == 0 else None, src=0)
    assert mine == [f"for {rank}"]


def test_groups(place):
    rank, size = place
    even = dist.new_group(list(range(0, size, 2)))
    if rank % 2 == 0:
        assert dist.get_rank(even) == rank // 2
        x = torch.tensor([rank])
        dist.all_reduce(x, group=even)
        assert x.item() == sum(range(0, size, 2))
        dist.broadcast(x.fill_(rank), 0, group=even)
        assert x.item() == 0
        dist.barrier(even)
        dist.destroy_process_group(even)
    mine, every = dist.new_subgroups_by_enumeration([[r] for r in range(size)])
    assert dist.get_world_size(mine) == 1 and len(every) == size
    turned = dist.group.WORLD.split_group(list(range(size))[::-1], group_name="turned")
    assert turned.rank() == size - 1 - rank
    x = torch.tensor([float(rank)])
    turned.broadcast(x, 0).wait()
    assert x.item() == size - 1


def test_destroyed_groups_are_freed(place):
    """By the next one of the same ranks, or of more; not what is still pending."""
    rank, size = place
    need(size, 2)
    pair, old = dist.new_group([0, 1]), dist.new_group()
    comms = [old.comm, old.messages]
    if rank < 2:
        comms += [pair.comm, pair.messages]
    for group in (pair, old) if rank < 2 else (old,):
        dist.all_reduce(torch.ones(1), group=group)
        dist.destroy_process_group(group)
    assert not any(comm.freed for comm in comms)
    last = dist.new_group()
    assert all(comm.freed for comm in comms)
    with pytest.raises(dist.DistBackendError, match=f"rank {rank}: .*the communicator was freed"):
        old.allreduce(torch.ones(1)).wait()
    lost = dist.irecv(torch.empty(1), group=last) if rank == 0 else None  # which nobody sends
    comm = last.comm
    dist.destroy_process_group(last)
    dist.new_group()
    assert not comm.freed and (lost is None or not lost.is_completed())


def test_mesh(place):
    rank, size = place
    from torch.distributed.device_mesh import init_device_mesh

    mesh = init_device_mesh("cpu", (size,), mesh_dim_names=("all",))
    x = torch.ones(2)
    dist.all_reduce(x, group=mesh.get_group("all"))
    assert (x == size).all() and mesh.get_local_rank() == rank
    if size == 4:
        square = init_device_mesh("cpu", (2, 2), mesh_dim_names=("row", "column"))
        for name, members in (("column", [rank // 2 * 2, rank // 2 * 2 + 1]),):
            got = [None] * 2
            dist.all_gather_object(got, rank, group=square.get_group(name))
            assert got == members


def test_plain_calls(place):
    """The group's own methods, with tensors by themselves, as C++ has them."""
    rank, size = place
    group = dist.group.WORLD
    x = torch.full((2,), float(rank + 1))
    group.allreduce(x, dist.ReduceOp.MAX).wait()
    assert (x == size).all()
    group.broadcast(x.fill_(rank), 0, timedelta(seconds=20)).wait()
    assert (x == 0).all()
    group.reduce(x.fill_(1), 0, dist.ReduceOp.SUM).wait()
    assert (x == size).all() or rank
    outs = [torch.empty(2) for _ in range(size)]
    group.allgather(outs, x.fill_(rank)).wait()
    assert all((out == r).all() for r, out in enumerate(outs))
    group.reduce_scatter(x, outs, dist.ReduceOp.SUM).wait()
    assert (x == size * rank).all()
    group.scatter(x, outs if rank == 0 else [], 0).wait()
    assert (x == rank).all()
    group.gather(outs if rank == 0 else [], x, 0).wait()
    group.barrier(timedelta(seconds=20)).wait()
    group.monitored_barrier(timedelta(seconds=20))


def test_detail(place):
    """TORCH_DISTRIBUTED_DEBUG=DETAIL: ranks that call different things all hear of it."""
    rank, size = place
    need(size, 2)
    before = dist.get_debug_level()
    dist.set_debug_level(dist.DebugLevel.DETAIL)
    try:
        group = dist.new_group()
    finally:
        dist.set_debug_level(before)
    dist.all_reduce(torch.ones(3), group=group)
    for async_op in (False, True):
        with pytest.raises(dist.DistBackendError, match=f"rank {rank}: ") as caught:
            line = sys._getframe().f_lineno + 1
            work = dist.all_reduce(torch.ones(5 if rank else 3), group=group, async_op=async_op)
            work.wait()
        assert "allreduce op=sum 3 x float32" in str(caught.value)
        assert "allreduce op=sum 5 x float32" in str(caught.value)
        rows = str(caught.value).splitlines()[1:]  # the call sites are the user's, not torch's
        assert len(rows) == size and all(row.endswith(f"  at {__file__}:{line}") for row in rows)
    dist.all_reduce(torch.ones(2), group=group)
    dist.barrier()


def test_a_short_deadline_is_for_operations(place, monkeypatch):
    """Members that have come may take longer to make a group, and to free it."""
    rank, size = place
    need(size, 2)

    def slow(method):
        def slowly(self, *arguments):
            if rank == 1:
                time.sleep(0.4)
            return method(self, *arguments)

        return slowly

    for name in ("split", "free"):
        monkeypatch.setattr(Communicator, name, slow(getattr(Communicator, name)))
    create_group = Communicator.create_group

    def once_all_have_come(self, *arguments, **more):
        given, self.timeout = self.timeout, None
        made = create_group(self, *arguments, **more)
        self.timeout = made.timeout = given
        return made

    monkeypatch.setattr(Communicator, "create_group", once_all_have_come)
    group = dist.new_group(timeout=timedelta(seconds=0.2))
    assert (group.comm.timeout, group.messages.timeout) == (0.2, 0.2)
    dist.destroy_process_group(group)
    dist.barrier()
    dist.new_group()  # frees it


@pytest.mark.filterwarnings("ignore")
def test_without_a_gpu_none_is_chosen(place):
    """ShardedTensor and others prefer the device of a backend that is not the CPU."""
    from torch.distributed._shard import sharded_tensor
    from torch.distributed._shard.sharding_spec import ChunkShardingSpec

    if torch.cuda.is_available():
        pytest.skip("needs a machine without a GPU")
    rank, size = place
    assert list(dist.BackendConfig(dist.Backend("mpidist")).device_backend_map) == ["cpu"]
    places = [f"rank:{k}/cpu" for k in range(size)]
    spec = ChunkShardingSpec(dim=0, placements=places)
    whole = torch.zeros(2 * size, 2) if rank == 0 else None
    sharded_tensor.ones(spec, 2 * size, 2).gather(dst=0, out=whole)
    assert whole is None or whole.eq(1).all()
