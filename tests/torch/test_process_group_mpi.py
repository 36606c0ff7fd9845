"""The backend "mpidist" of torch.distributed: every call of c10d, by closed forms."""

import contextlib
import gc
import os
import queue
import random
import re
import signal
import sys
import threading
import time
from datetime import timedelta

import pytest

from mpidist.communicator.communicator import Communicator
from mpidist.errors import CommunicatorInUse, InvalidArgument, InvalidRank, MpidistError
from tests.support.training_kits import NEEDS_TORCH, torch

pytestmark = pytest.mark.skipif(torch is None, reason=NEEDS_TORCH)
if torch is not None:
    import torch.distributed as dist

    import mpidist.torch
    from mpidist.backends import memory_file
    from mpidist.backends.native import NativeCollectives
    from tests.support.odd_arrays import Named, odd_tensors

    FLOATS = [torch.float16, torch.bfloat16, torch.float32, torch.float64]
    INTS = [torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64]
    COMPLEX = [torch.complex64, torch.complex128]
    DTYPES = [*FLOATS, *INTS, *COMPLEX, torch.bool]
else:
    FLOATS = INTS = COMPLEX = DTYPES = []
SECONDS = 30
name_of = str


@pytest.fixture(scope="module")
def world():
    """The default group; of this file alone."""
    dist.init_process_group("mpidist", timeout=timedelta(seconds=SECONDS))
    yield dist.group.WORLD
    dist.destroy_process_group()


@pytest.fixture
def place(world):
    return dist.get_rank(), dist.get_world_size()


def need(size, least):
    if size < least:
        pytest.skip(f"needs at least {least} ranks")


# -- starting -------------------------------------------------------------------------------------


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


def test_store(place):
    rank, size = place
    store = dist.distributed_c10d._get_default_store()
    store.set(f"key {rank}", f"value {rank}")
    for other in range(size):
        assert store.get(f"key {other}") == f"value {other}".encode()
    store.add("sum", rank + 1)
    dist.barrier()
    assert store.add("sum", 0) == size * (size + 1) // 2
    assert store.check(["key 0", "sum"]) and not store.check(["key 0", "none"])
    begin = time.monotonic()
    with pytest.raises(RuntimeError, match=rf"rank {rank}: store: Timed out .*'.*none'"):
        store.wait(["none"], timedelta(seconds=0.2))
    assert time.monotonic() - begin < 5
    dist.barrier()
    if rank == 0:
        threading.Timer(0.1, store.set, ("late", "it came")).start()
    assert store.get("late") == b"it came"
    dist.barrier()
    if rank == size - 1:
        assert store.delete_key("late") and not store.delete_key("late")
        assert store.compare_set("switch", "", "on") == b"on"
        assert store.compare_set("switch", "off", "no") == b"on"
        with pytest.raises(RuntimeError, match=rf"rank {rank}: store: add\(.*switch', 1\): .*'on'"):
            store.add("switch", 1)  # not a number: other requests are answered on
    dist.barrier()
    assert store.get("switch") == b"on"


def test_clone_of_a_store(place):
    """It has the same keys, and a timeout of its own; PyTorch's prefixes use it, too."""
    rank, size = place
    store = dist.distributed_c10d._get_default_store()
    clone = store.clone()
    gc.collect()
    clone.set(f"cloned {rank}", "here")
    dist.barrier()
    assert all(store.get(f"cloned {other}") == b"here" for other in range(size))
    own = mpidist.torch.rendezvous._store
    twin = own.clone()
    twin.set_timeout(timedelta(seconds=1))
    assert twin.timeout != own.timeout and twin.num_keys() > 0
    assert sum(key.endswith(f"cloned {rank}") for key in twin.list_keys()) == 1
    results = queue.SimpleQueue()
    threads = [
        threading.Thread(target=lambda s=s: results.put([s.add("calls", 1) for _ in range(20)]))
        for s in (twin, own)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(SECONDS)
    numbers = [*results.get(timeout=1), *results.get(timeout=1)]
    assert len(set(numbers)) == 40
    dist.barrier()
    assert own.add("calls", 0) == 40 * size
    dist.barrier()
    own.delete_key("calls")


# -- reductions -----------------------------------------------------------------------------------


def values(rank, dtype, count=7):
    """Small numbers that every dtype has; True on odd ranks for bool."""
    if dtype is torch.bool:
        return torch.tensor([rank % 2 == 1, True, False, rank == 0])
    x = (torch.arange(count) + rank) % 3 + 1
    return x.to(dtype) + (1j * rank if dtype.is_complex else 0)


def combined(name, every):
    """The result of torch's own operation on one process."""
    stack = torch.stack(every)
    if stack.dtype is torch.bool:
        return stack.any(0) if name in ("SUM", "MAX", "BOR") else stack.all(0)
    wide = stack.to(torch.float64) if stack.dtype.is_floating_point else stack
    if name == "SUM":
        return wide.sum(0).to(stack.dtype)
    if name == "PRODUCT":
        return wide.prod(0).to(stack.dtype)
    if name == "AVG":
        total = wide.sum(0)
        if stack.dtype.is_floating_point or stack.dtype.is_complex:
            return (total / len(every)).to(stack.dtype)
        return total.to(stack.dtype).div(len(every), rounding_mode="trunc").to(stack.dtype)
    return stack.amax(0) if name == "MAX" else stack.amin(0)


def operations(dtype):
    if dtype is torch.bool:
        return ("SUM", "MAX", "BOR", "PRODUCT", "MIN", "BAND")
    return ("SUM", "AVG") if dtype.is_complex else ("SUM", "PRODUCT", "AVG", "MAX", "MIN")


@pytest.mark.parametrize("dtype", DTYPES, ids=name_of)
def test_all_reduce(place, dtype):
    rank, size = place
    every = [values(r, dtype) for r in range(size)]
    for name in operations(dtype):
        x = every[rank].clone()
        dist.all_reduce(x, op=getattr(dist.ReduceOp, name))
        torch.testing.assert_close(x, combined(name, every), msg=lambda m, n=name: f"{n}: {m}")
        y = every[rank].clone()
        dist.reduce(y, size - 1, op=getattr(dist.ReduceOp, name))
        if rank == size - 1:
            torch.testing.assert_close(y, combined(name, every))


@pytest.mark.parametrize("dtype", INTS, ids=name_of)
def test_bits(place, dtype):
    rank, size = place
    every = [torch.tensor([r, 5, r % 4 + 1], dtype=dtype) for r in range(size)]
    for name, combine in (("BAND", torch.bitwise_and), ("BOR", torch.bitwise_or)):
        x, wanted = every[rank].clone(), every[0]
        for other in every[1:]:
            wanted = combine(wanted, other)
        dist.all_reduce(x, op=getattr(dist.ReduceOp, name))
        assert torch.equal(x, wanted)
    x, wanted = every[rank].clone(), every[0]
    for other in every[1:]:
        wanted = wanted ^ other
    dist.all_reduce(x, op=dist.ReduceOp.BXOR)
    assert torch.equal(x, wanted)


@pytest.mark.parametrize("async_op", [False, True])
@pytest.mark.parametrize("count", [0, 1, 1000, 300_000])
def test_lengths(place, count, async_op):
    """New tensors on new memory, the same again, and views of it."""
    rank, size = place
    memory = torch.empty(count)
    for turn in range(4):
        x = memory.view(-1) if turn % 2 else memory
        x.fill_(rank + turn)
        work = dist.all_reduce(x, async_op=async_op)
        if async_op:
            assert work.wait() is True
        assert (memory == size * (size - 1) / 2 + turn * size).all()


def test_not_contiguous(place):
    rank, size = place
    every = [torch.arange(12.0).view(3, 4) * (r + 1) for r in range(size)]
    total = sum(every)
    x = every[rank].t().clone(memory_format=torch.contiguous_format).t()
    assert not x.is_contiguous()
    dist.all_reduce(x)
    assert torch.equal(x, total)
    wide = torch.zeros(6, 8)
    part = wide[::2, 1:5]
    part.copy_(every[rank])
    dist.broadcast(part, size - 1)
    assert torch.equal(part, every[-1]) and wide[1::2].abs().sum() == 0 and (wide[:, 0] == 0).all()
    part.copy_(every[rank])
    dist.reduce(part, 0)
    assert torch.equal(part, total) or rank
    into = torch.zeros(4, 3 * size).t()
    dist.all_gather_into_tensor(into, every[rank].t().contiguous().t())
    assert torch.equal(into, torch.cat(every))
    if size > 1:
        if rank == 0:
            dist.send(every[0].t(), 1)
        elif rank == 1:
            column = torch.zeros(4, 6)[:, ::2]
            dist.recv(column, 0)
            assert torch.equal(column, every[0].t())
    z = torch.full((3,), 1 + 2j * (rank + 1)).conj()
    dist.group.WORLD.allreduce([z]).wait()
    assert torch.equal(z.resolve_conj(), torch.full((3,), size - 1j * size * (size + 1)))


def test_requires_grad(place):
    _, size = place
    x = torch.ones(3, requires_grad=True)
    dist.all_reduce(x.data)
    with torch.no_grad():
        dist.all_reduce(x)
    assert (x == size * size).all() and x.requires_grad


def test_all_reduce_coalesced(place):
    rank, size = place
    some = [torch.full((k + 1, 2), float(rank)) for k in range(3)]
    dist.all_reduce_coalesced(some)
    assert all((x == size * (size - 1) / 2).all() for x in some)
    with dist._coalescing_manager():
        for x in some:
            dist.all_reduce(x.fill_(1))
    assert all((x == size).all() for x in some)


def test_sparse(place):
    rank, size = place
    x = torch.sparse_coo_tensor([[rank, size, rank]], [1.0, 2.0, 3.0], (size + 1,))
    dist.all_reduce(x)
    wanted = torch.full((size + 1,), 4.0)
    wanted[size] = 2.0 * size
    assert x.is_sparse and torch.equal(x.to_dense(), wanted)
    rows = torch.sparse_coo_tensor([[0]], [[1.0, rank]], (3, 2))
    empty = torch.sparse_coo_tensor(torch.empty(1, 0, dtype=torch.int64), torch.empty(0, 2), (3, 2))
    y = rows if rank == 0 else empty
    dist.all_reduce(y)
    assert torch.equal(y.to_dense(), torch.tensor([[1.0, 0.0], [0, 0], [0, 0]]))


def test_sparse_gradients_of_torch_ddp(place):
    """DistributedDataParallel averages those of an embedding; each rank uses other rows."""
    rank, size = place
    words = torch.nn.Embedding(size + 1, 2, sparse=True)
    model = torch.nn.parallel.DistributedDataParallel(words)
    for _ in range(2):
        words.weight.grad = None
        model(torch.tensor([rank, size])).sum().backward()
        wanted = torch.full((size + 1, 2), 1 / size)
        wanted[size] = 1
        assert words.weight.grad.is_sparse
        assert torch.allclose(words.weight.grad.to_dense(), wanted)


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


@pytest.mark.parametrize("wrong", ("short", "dtype", "shape"))
def test_wrong_tensors_are_named(place, wrong):
    """In a list or by themselves: call, rank, argument, value, what is allowed; the group works."""
    rank, size = place
    group, last = dist.group.WORLD, size - 1
    x = torch.ones(2)
    kind = torch.int64 if wrong == "dtype" else torch.float32

    def some():
        rows = [torch.ones(2, dtype=kind if k == rank else x.dtype) for k in range(size)]
        if wrong == "shape":
            rows[rank] = torch.ones(3)
        return rows[:-1] if wrong == "short" else rows

    def one():
        less = 2 * size - 1 if wrong != "dtype" else 2 * size
        return torch.ones(less, dtype=kind)

    entries = rf" has {last} entries, expected {size}, one for each member of group '.*'"
    listed = {
        "short": entries,
        "dtype": rf"\[{rank}\] is torch.int64, expected torch.float32, as .* is",
        "shape": rf"\[{rank}\] has shape \(3,\), expected 2 elements: .* of shape \(2,\)",
    }[wrong]
    single = rf" has shape \({2 * size - 1},\), expected {2 * size} elements: .* of shape \(2,\)"
    if wrong == "dtype":
        single = " is torch.int64, expected torch.float32, as .* is"
    calls = {
        "all_gather: tensor_list" + listed: lambda: group.allgather([some()], [x]),
        "all_gather_into_tensor: output" + single: lambda: group.all_gather_single(one(), x),
        "reduce_scatter: input_list" + listed: lambda: group.reduce_scatter([x], [some()]),
        "reduce_scatter_tensor: input" + single: lambda: group.reduce_scatter_single(x, one()),
        "all_to_all: output_tensor_list" + listed: lambda: group.alltoall(some(), [x] * size),
        "gather: gather_list" + listed: lambda: group.gather([some()] * (rank == last), [x], last),
    }
    for text, call in calls.items():
        if text.startswith("gather") and rank != last:  # they know nothing of the root's list
            call().wait()
        else:
            with pytest.raises(InvalidArgument, match=f"^rank {rank}: {text}"):
                call().wait()
        y = torch.full((3,), rank + 1.0)
        dist.all_reduce(y)
        assert (y == size * (size + 1) / 2).all()
    if rank == last:  # before anything is sent: the others do not call
        with pytest.raises(InvalidArgument, match=f"^rank {rank}: scatter: scatter_list{listed}"):
            group.scatter([torch.empty(2)], [some()], last)
    dist.barrier()
    if wrong == "dtype":
        with pytest.raises(InvalidArgument, match=f"^rank {rank}: all_to_all_single: output is"):
            group.all_to_all_single(torch.ones(size), torch.ones(size, dtype=kind), [], [])


@pytest.mark.parametrize("factor", (0.5, 3))
@pytest.mark.parametrize("dtype", FLOATS, ids=name_of)
def test_premul_sum(place, dtype, factor):
    """The factor multiplies each term; inputs of other calls than all_reduce stay as they are."""
    rank, size = place
    by = torch.tensor([float(factor)]) if factor == 3 else factor
    op = dist._make_nccl_premul_sum(by)
    total = factor * size * (size + 1) / 2
    x = torch.full((4,), rank + 1.0, dtype=dtype)
    dist.all_reduce(x, op=op)
    assert (x == total).all()
    x = torch.full((4,), rank + 1.0, dtype=dtype)
    dist.reduce(x, 0, op=op)
    assert (x == (total if rank == 0 else rank + 1)).all()
    whole, part = torch.full((size, 2), rank + 1.0, dtype=dtype), torch.empty(2, dtype=dtype)
    dist.reduce_scatter_tensor(part, whole, op=op)
    assert (part == total).all() and (whole == rank + 1).all()
    dist.reduce_scatter(part.zero_(), list(whole), op=op, async_op=True).wait()
    assert (part == total).all() and (whole == rank + 1).all()
    some = [torch.full((2,), rank + 1.0, dtype=dtype) for _ in range(2)]
    dist.all_reduce_coalesced(some, op=op)
    assert all((y == total).all() for y in some)


def test_premul_sum_refuses(place):
    rank, _ = place
    op = dist._make_nccl_premul_sum(2.0)
    with pytest.raises(InvalidArgument, match=f"rank {rank}: PREMUL_SUM of torch.int32: expected"):
        dist.all_reduce(torch.ones(2, dtype=torch.int32), op=op)


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


@pytest.mark.parametrize("dtype", DTYPES[1:3] + DTYPES[-1:], ids=name_of)
def test_small_tensors_at_new_addresses(place, dtype):
    """They pass through memory of the group; symmetric ones, and repeated ones, do not."""
    rank, size = place
    alive, shared = [], mpidist.torch.empty(40, dtype=dtype)
    for k in range(6):
        every = [values(r + k, dtype, 4) for r in range(size)]
        for x in (every[rank].clone(), shared[k : k + 4].copy_(every[rank])):
            for _ in range(2):  # the second time its address is known
                x.copy_(every[rank])
                dist.all_reduce(x)
                assert torch.equal(x, combined("SUM", every))
            alive.append(x)
        own, out = every[rank], torch.empty(4 * size, dtype=dtype)
        dist.all_gather_into_tensor(out, own)
        assert torch.equal(out, torch.cat(every))
        outs = [torch.empty(2, 2, dtype=dtype).t() for _ in range(size)]  # not contiguous
        dist.all_gather(outs, own.view(2, 2))
        assert all(torch.equal(o, x.view(2, 2)) for o, x in zip(outs, every))
        x = every[rank].clone()
        dist.broadcast(x, size - 1)
        assert torch.equal(x, every[-1])
        alive += [x, own, out]


# -- moving ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", DTYPES, ids=name_of)
def test_moves(place, dtype):
    """Broadcast, all_gather, gather, scatter, all_to_all and messages keep every bit."""
    rank, size = place
    every = [values(r, dtype) for r in range(size)]
    for root in {0, size - 1}:
        x = every[rank].clone()
        dist.broadcast(x, root)
        assert torch.equal(x, every[root])
        outs = [torch.empty_like(x) for _ in range(size)] if rank == root else None
        dist.gather(every[rank], outs, dst=root)
        assert outs is None or all(map(torch.equal, outs, every))
        x = torch.empty_like(every[0])
        dist.scatter(x, every if rank == root else None, src=root)
        assert torch.equal(x, every[rank])
    outs = [torch.empty_like(x) for _ in range(size)]
    dist.all_gather(outs, every[rank])
    assert all(map(torch.equal, outs, every))
    joined = torch.empty_like(torch.cat(every))
    dist.all_gather_into_tensor(joined, every[rank])
    assert torch.equal(joined, torch.cat(every))
    right, left = (rank + 1) % size, (rank - 1) % size
    if size > 1:
        got = torch.empty_like(x)
        for work in dist.batch_isend_irecv(
            [dist.P2POp(dist.irecv, got, left), dist.P2POp(dist.isend, every[rank], right)]
        ):
            work.wait()
        assert torch.equal(got, every[left])
    outs = [torch.empty_like(x) for _ in range(size)]
    dist.all_to_all(outs, [values(rank + 10 * d, dtype) for d in range(size)])
    assert all(torch.equal(o, values(s + 10 * rank, dtype)) for s, o in enumerate(outs))


def test_gather_uneven(place):
    rank, size = place
    for _ in range(2):
        outs = [torch.empty(r, 2) for r in range(size)]
        dist.all_gather(outs, torch.full((rank, 2), float(rank)))
        assert all((out == r).all() and out.shape == (r, 2) for r, out in enumerate(outs))
        out = torch.empty(rank + 1)
        dist.reduce_scatter(out, [torch.full((r + 1,), float(rank)) for r in range(size)])
        assert (out == size * (size - 1) / 2).all()


def test_in_place(place):
    """All-gather from the own part of the result, reduce-scatter into the own part of the input."""
    rank, size = place
    whole = torch.zeros(size, 3)
    whole[rank] = rank
    dist.all_gather_into_tensor(whole, whole[rank])
    assert torch.equal(whole, torch.arange(float(size))[:, None].expand(size, 3))
    dist.reduce_scatter_tensor(whole[rank], whole)
    assert (whole[rank] == rank * size).all()
    same = torch.arange(float(size)) + 10 * rank
    dist.all_to_all_single(same, same)
    assert torch.equal(same, torch.arange(float(size)) * 10 + rank)


def test_reduce_scatter(place):
    rank, size = place
    parts = [torch.full((2, 2), float(rank + d)) for d in range(size)]
    wanted = size * (size - 1) / 2 + size * rank
    out = torch.empty(2, 2)
    dist.reduce_scatter(out, parts)
    assert (out == wanted).all()
    for op, value in ((dist.ReduceOp.SUM, wanted), (dist.ReduceOp.AVG, wanted / size)):
        out.zero_()
        work = dist.reduce_scatter_tensor(out, torch.cat(parts), op=op, async_op=True)
        assert work.wait() and torch.allclose(out, torch.full((2, 2), value))


def test_coalesced(place):
    rank, size = place
    outs = [torch.empty(size * k) for k in (1, 2, 3)]
    with dist._coalescing_manager():
        for k, out in enumerate(outs):
            dist.all_gather_into_tensor(out, torch.full((k + 1,), float(rank)))
    wanted = torch.arange(float(size))
    assert all(torch.equal(out, wanted.repeat_interleave(k + 1)) for k, out in enumerate(outs))
    parts = [torch.empty(k) for k in (1, 2)]
    with dist._coalescing_manager(async_ops=True) as works:
        for k, part in enumerate(parts):
            dist.reduce_scatter_tensor(part, torch.ones(size * (k + 1)))
    works.wait()
    assert all((part == size).all() for part in parts)
    group = dist.group.WORLD
    lists = [[torch.empty(2), torch.empty(3)] for _ in range(size)]
    mine = [torch.full((2,), float(rank)), torch.full((3,), 10.0 + rank)]
    group.allgather_coalesced(lists, mine).wait()
    assert all((a == r).all() and (b == 10 + r).all() for r, (a, b) in enumerate(lists))


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


def test_all_to_all_splits(place):
    """Rank r sends d + 1 rows to rank d."""
    rank, size = place
    sends, gets = [d + 1 for d in range(size)], [rank + 1] * size
    x = torch.full((sum(sends), 2), float(rank))
    out = torch.empty(sum(gets), 2)
    dist.all_to_all_single(out, x, gets, sends)
    wanted = torch.arange(float(size)).repeat_interleave(rank + 1)
    assert torch.equal(out, wanted[:, None].expand(-1, 2))
    with pytest.raises(ValueError, match=f"rank {rank}: all_to_all_single: input_split_sizes"):
        dist.all_to_all_single(out, x, gets, [n + 1 for n in sends])
    outs = [torch.empty(rank + 1) for _ in range(size)]
    dist.all_to_all(outs, [torch.full((d + 1,), float(rank)) for d in range(size)])
    assert all((out == s).all() for s, out in enumerate(outs))
    even = torch.arange(2.0 * size) + 100 * rank
    out = torch.empty_like(even)
    dist.all_to_all_single(out, even)
    assert torch.equal(out.view(size, 2)[:, 0], 100.0 * torch.arange(size) + 2 * rank)


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


# -- messages -------------------------------------------------------------------------------------


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


# -- works ----------------------------------------------------------------------------------------


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


def test_a_waiter_performs_what_has_not_begun(place, monkeypatch):
    """Nobody serves the group's queue here, as if its thread had not come to it yet."""
    rank, size = place
    group = dist.new_group()
    monkeypatch.setattr("mpidist.torch.process_group._THREADS.start", lambda _: None)
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
    until = time.monotonic() + 10
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


def test_threads_serve_again(place):
    def futures(count):
        return [
            dist.all_reduce(torch.ones(2), async_op=True).get_future().then(lambda f: f.value()[0])
            for _ in range(count)
        ]

    _, size = place
    assert all((future.wait() == size).all() for future in futures(3))
    before = threading.active_count()
    for _ in range(5):
        assert all((future.wait() == size).all() for future in futures(10))
    assert threading.active_count() <= before + 2  # one may run callbacks while one serves


def test_works_are_performed_in_order(place):
    """The ranks wait in orders of their own; operations out of order would differ in length."""
    rank, size = place
    chosen = random.Random(rank)
    for _ in range(30):
        tensors = [torch.full((k % 5 + 1,), float(k)) for k in range(8)]
        works = [dist.all_reduce(x, async_op=True) for x in tensors]
        for k in chosen.sample(range(8), 8):
            assert works[k].wait() and (tensors[k] == k * size).all()


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


# -- threads --------------------------------------------------------------------------------------


def in_threads(*acts):
    """Run functions in a thread each; return a function that waits for them, and raises."""
    failed = []

    def run(act):
        try:
            act()
        except BaseException as error:
            failed.append(error)

    threads = [threading.Thread(target=run, args=[act]) for act in acts]
    for thread in threads:
        thread.start()

    def joined():
        for thread in threads:
            thread.join(2 * SECONDS)
            assert not thread.is_alive()
        for error in failed:
            raise error

    return joined


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


def test_a_refused_wait_loses_no_message(place):
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


# -- groups and deadlines -------------------------------------------------------------------------


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


def test_a_root_that_is_no_rank(place):
    """Raised by the call, also by one that nobody waits for; nothing is sent."""
    rank, size = place
    group, x, rows = dist.group.WORLD, torch.ones(2), [torch.ones(2)] * size
    for call in (
        lambda root: dist.broadcast(x, src=root, async_op=True),
        lambda root: group.broadcast(x, root),
        lambda root: group.reduce(x, root),
        lambda root: group.gather([rows], [x], root),
        lambda root: group.scatter([x], [rows], root),
    ):
        for root in (-1, size):
            with pytest.raises(InvalidRank, match=f"rank {rank}: root={root} .*0 … {size - 1}"):
                call(root)
    dist.all_reduce(x)
    assert (x == size).all()


def forms_of_c10d():
    """Yield (method, names of its arguments) for each form that c10d's docstrings list."""
    kind = torch._C._distributed_c10d.ProcessGroup
    for name in dir(kind):
        text = getattr(kind, name).__doc__ or ""
        for given in re.findall(rf"\b{name}\(self: [^,]*, (.*)\) -> c10d::Work", text):
            words = re.findall(r"(?:^|, )(\w+): ", given)
            if words[0] != "arg0" and name not in ("_end_coalescing", "reconfigure"):
                yield name, words


def test_names_of_arguments(place):
    """Every form of c10d's methods, by the names of its arguments, and its result."""
    rank, size = place
    group, tried = dist.group.WORLD, set()
    ranks, total = [r + 1.0 for r in range(size)], size * (size + 1) / 2
    for name, words in forms_of_c10d():
        x, y, wide = torch.tensor([rank + 1.0]), torch.zeros(1), torch.full((size,), rank + 1.0)
        rows, blank = list(wide.clone().chunk(size)), list(torch.zeros(size).chunk(size))
        gathers, scatters = "gather" in name, "scatter" in name
        lists = "output_tensors" in words and "opts" in words and name != "alltoall"
        outs, given = (blank, [x]) if gathers else (([y], rows) if scatters else (blank, rows))
        if lists:
            outs, given = ([outs], given) if gathers else (outs, [given])
        values = {"tensors": [x], "tensor": x, "root": 0, "op": dist.ReduceOp.SUM, "tag": 4}
        values |= {"dstRank": (rank + 1) % size, "srcRank": (rank - 1) % size}
        values |= {"timeout": timedelta(seconds=SECONDS)}
        values |= {"output_split_sizes": [], "input_split_sizes": [], "input_list": [x]}
        values |= {"output_lists": [[b] for b in blank], "output_tensor": y, "input_tensor": x}
        values |= {"output_tensors": outs, "input_tensors": given}
        if name == "reduce_scatter":
            values |= {"output": y, "input": rows}
        else:
            output, input_ = (torch.zeros(size), x) if gathers else ((y, wide))
            if "to_all" in name or "toall" in name:
                output = torch.zeros(size)
            values |= {"output": output, "input": input_, "outputTensor": y, "inputTensor": wide}
            values |= {"outputs": [output], "inputs": [input_]}
        if name in ("gather", "scatter") and rank:
            values["output_tensors" if name == "gather" else "input_tensors"] = []
        if name in ("send", "recv"):
            continue  # below
        getattr(group, name)(**{word: values[word] for word in words if word != "opts"}).wait()
        tried.add(name)
        at_root = name in ("gather", "gather_single", "gather_into_tensor", "reduce")
        if name == "barrier" or (at_root and rank):
            continue
        got = {"broadcast": x, "reduce": x, "allreduce": x, "allreduce_coalesced": x}.get(name)
        if got is None and scatters:
            got = y
        if got is None:
            got = torch.cat(blank)
            got = values["output"] if not got.any() else got
        want = ranks if gathers or "all_to" in name or "alltoall" in name else [total]
        want = [1.0] if name in ("broadcast", "scatter") else want
        assert got.tolist() == want, (name, words)
    assert len(tried) > 15
    x, y = torch.tensor([rank + 1.0]), torch.zeros(1)
    works = [
        group.send(tensors=[x], dstRank=(rank + 1) % size, tag=4),
        group.recv(tensors=[y], srcRank=(rank - 1) % size, tag=4),
    ]
    for work in works:
        work.wait()
    assert y.item() == (rank - 1) % size + 1
    with pytest.raises(TypeError, match=r"broadcast\(tensor, opts, root\)"):
        group.broadcast(tensor=x, opts=None, root=0)


def test_a_profiler_sees_the_calls(place):
    """Collectives and messages, each once; a blocking collective with the time that it takes."""
    rank, size = place
    x, y = torch.ones(2), torch.zeros(2)
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
        [f"mpidist:{name}" for name in ("all_reduce", "broadcast", "send", "recv", "barrier")], 1
    )
    assert rank == 0 or found["mpidist:barrier"].cpu_time_total > 1e5  # µs


def test_gather_single(place):
    """A tensor on the root, flat or stacked; a wrong one is an error of the root alone."""
    rank, size = place
    group, opts, last = dist.group.WORLD, dist.GatherOptions(), size - 1
    opts.rootRank = last
    for shape in ((2 * size,), (size, 2)):
        out = torch.zeros(shape)
        group.gather_single(out, torch.full((2,), rank + 1.0), opts).wait()
        want = torch.arange(1.0, size + 1).repeat_interleave(2) if rank == last else out * 0
        assert out.reshape(-1).tolist() == want.reshape(-1).tolist()
    said = f"rank {rank}: gather_single: output has shape .*expected {2 * size} elements"
    with pytest.raises(InvalidArgument, match=said) if rank == last else contextlib.nullcontext():
        group.gather_single(torch.zeros(2 * size + 1), torch.ones(2), opts).wait()
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


def test_deadline(place):
    """A call of some members ends in time; the error has the call and the missing rank."""
    rank, size = place
    need(size, 2)
    group = dist.new_group(timeout=timedelta(seconds=SECONDS))
    slow = dist.new_group(timeout=timedelta(seconds=0.4))
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
        late = dist.new_group([0, 1], timeout=timedelta(seconds=0.3))
        with pytest.raises(dist.DistBackendError, match="recv from rank 1 .*Timed out"):
            dist.recv(torch.ones(1), 1, group=late)
    elif rank == 1:
        dist.new_group([0, 1], timeout=timedelta(seconds=0.3))
    else:
        dist.new_group([0, 1])
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
    group = dist.new_group(timeout=timedelta(seconds=0.2))
    assert (group.comm.timeout, group.messages.timeout) == (0.2, 0.2)
    dist.destroy_process_group(group)
    dist.barrier()
    dist.new_group()  # frees it


def test_after_a_message_that_did_not_come(place):
    """Which breaks a communicator on one rank: the group is not freed, on no rank."""
    rank, size = place
    need(size, 2)
    group = dist.new_group(timeout=timedelta(seconds=0.2))
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


def test_broadcast_of_an_expanded_tensor(place):
    """The root only reads: its tensor need not be writable."""
    rank, _ = place
    x = torch.ones(1).expand(4) if rank == 0 else torch.zeros(4)
    dist.broadcast(x, 0)
    assert x.tolist() == [1.0] * 4


@pytest.mark.parametrize("how", ("expand", "unfold"))
def test_outputs_whose_elements_share_memory(place, how):
    """They are refused by name, on the ranks that write them; the group stays usable."""
    rank, size = place

    def shared(count):
        base = torch.ones(count)
        return base[:1].expand(count) if how == "expand" else base.unfold(0, count // 2 + 1, 1)

    x, every = shared(4), shared(4 * size)
    own, mine = torch.ones(x.shape), torch.ones(every.numel() // size)
    list_, owns, root = [x] * size, [own] * size, rank == 0
    calls = {
        "all_reduce: tensor": lambda: dist.all_reduce(x),
        "all_reduce: tensor ": lambda: dist.all_reduce(x, async_op=True),
        "reduce: tensor": lambda: dist.reduce(x, 0),
        "broadcast: tensor": lambda: dist.broadcast(x, 0),
        "all_gather: tensor_list[0]": lambda: dist.all_gather(list_, own),
        "gather: gather_list[0]": lambda: dist.gather(own, list_ if root else None),
        "scatter: tensor": lambda: dist.scatter(x, owns if root else None),
        "reduce_scatter: output": lambda: dist.reduce_scatter(x, owns),
        "reduce_scatter_tensor: output": lambda: dist.reduce_scatter_tensor(
            x, torch.ones(size * x.numel())
        ),
        "all_to_all: output_tensor_list[0]": lambda: dist.all_to_all(list_, owns),
        "recv: tensor": lambda: dist.recv(x, (rank + 1) % size),
    }
    if every.numel() % size == 0:
        calls |= {
            "all_gather_into_tensor: output": lambda: dist.all_gather_into_tensor(every, mine),
            "all_to_all_single: output": lambda: dist.all_to_all_single(
                every, torch.ones(every.shape)
            ),
        }
    writers = {
        "reduce: tensor": root,
        "gather: gather_list[0]": root,
        "broadcast: tensor": not root,
    }
    for what, call in calls.items():
        if writers.get(what, True):
            with pytest.raises(InvalidArgument) as caught:
                call()
            wrong = every if "_single" in what or "_into" in what else x
            words = f"{tuple(wrong.shape)} and strides {wrong.stride()}, with which elements share"
            assert f"rank {rank}: {what.strip()} has shape {words}" in str(caught.value)
        else:
            call()
        dist.all_reduce(sum_ := torch.ones(1))
        assert sum_ == size and (x == 1).all(), what


# -- tensors that are not the memory they show ----------------------------------------------------


def every_call(rank, size, wait):
    """Yield (name, call): ``call(make)`` returns what a call gives, of tensors ``make(rows)``.

    Each is on tensors of `make` in every place, inputs, outputs and lists; `wait` ends a call.
    """

    def plain(x):
        return x.tolist()

    def results(outputs):
        return [plain(x) for x in outputs]

    def in_place(call):
        def act(make):
            x = make(size)
            wait(call(x))
            return plain(x)

        return act

    def into(call, rows):
        def act(make):
            out = make(rows)
            wait(call(out, make(size)))
            return plain(out)

        return act

    def into_list(call):
        def act(make):
            outs = [make(size) for _ in range(size)]
            wait(call(outs, make))
            return results(outs)

        return act

    def chunks(make):
        return [make(1) for _ in range(size)]

    root, how = size - 1, {"async_op": wait is not done}
    yield "all_reduce", in_place(lambda x: dist.all_reduce(x, **how))
    yield "broadcast", in_place(lambda x: dist.broadcast(x, root, **how))
    yield "reduce", in_place(lambda x: dist.reduce(x, root, **how))
    yield "all_gather", into_list(lambda outs, make: dist.all_gather(outs, make(size), **how))
    yield (
        "gather",
        into_list(
            lambda outs, make: dist.gather(make(size), outs if rank == root else None, root, **how)
        ),
    )
    yield "into_tensor", into(lambda o, x: dist.all_gather_into_tensor(o, x, **how), size * size)
    yield "reduce_scatter_tensor", into(lambda o, x: dist.reduce_scatter_tensor(o, x, **how), 1)
    yield "all_to_all_single", into(lambda o, x: dist.all_to_all_single(o, x, **how), size)

    def reduce_scatter(make):
        out = make(1)
        wait(dist.reduce_scatter(out, chunks(make), **how))
        return plain(out)

    def all_to_all(make):
        outs = chunks(make)
        wait(dist.all_to_all(outs, chunks(make), **how))
        return results(outs)

    def coalesced(make):
        x, y = make(size), make(1)
        wait(dist.all_reduce_coalesced([x, y], **how))
        return results([x, y])

    def manager(make):
        x, y = make(size), make(1)
        with dist._coalescing_manager(async_ops=how["async_op"]) as block:
            dist.all_reduce(x)
            dist.all_reduce(y)
        wait(block if how["async_op"] else None)
        return results([x, y])

    def messages(make):
        out, to, source = make(size), (rank + 1) % size, (rank - 1) % size
        if how["async_op"]:
            works = [dist.irecv(out, source), dist.isend(make(size), to)]
        else:
            operations = [
                dist.P2POp(dist.irecv, out, source),
                dist.P2POp(dist.isend, make(size), to),
            ]
            works = dist.batch_isend_irecv(operations)
        for work in works:
            work.wait()
        return plain(out)

    def blocking_messages(make):
        out, x = make(size), make(size)
        if rank:  # around the ring, so that every rank makes both calls
            dist.recv(out, rank - 1)
        dist.send(x, (rank + 1) % size)
        if not rank:
            dist.recv(out, size - 1)
        return plain(out)

    def scatter(make):
        out = make(size)
        given = [make(size) for _ in range(size)]
        wait(dist.scatter(out, given if rank == root else None, root, **how))
        return plain(out)

    yield "scatter", scatter
    yield "reduce_scatter", reduce_scatter
    yield "all_to_all", all_to_all
    yield "all_reduce_coalesced", coalesced
    yield "coalescing_manager", manager
    if size > 1:
        yield "messages", messages
        yield "blocking_messages", blocking_messages


def done(work):
    assert work is None


def wait_for(work):
    work.wait()


ENDS = [done, wait_for]


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("wait", ENDS, ids=["blocking", "async"])
def test_unfinished_results_are_waited_for(place, wait):
    """An AsyncCollectiveTensor in every place of every call gives what a plain tensor gives."""
    rank, size = place
    functional = torch.distributed._functional_collectives

    def plain(rows):
        return torch.full((rows,), 1.0 + rank)

    def pending(rows):
        own = [rows if r == rank else 0 for r in range(size)]
        made = functional.all_to_all_single(plain(rows), own, own, dist.group.WORLD)
        assert type(made) is functional.AsyncCollectiveTensor
        return made

    def parameter(rows):
        return torch.nn.Parameter(plain(rows), requires_grad=False)

    for name, call in every_call(rank, size, wait):
        want = call(plain)
        for make in (pending, parameter, lambda rows: plain(rows).as_subclass(Named)):
            assert call(make) == want, name


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("wait", ENDS, ids=["blocking", "async"])
def test_tensors_that_are_not_their_memory(place, wait):
    """Refused by every call, alike on all ranks, with the type and what to do; none is sent."""
    rank, size = place
    kinds = [words for _, *words in odd_tensors(2)]
    for name, call in every_call(rank, size, wait):
        for k, words in enumerate(kinds):
            if words[0] == "a lazy parameter":  # PyTorch's own functions refuse it
                continue
            errors = InvalidArgument, NotImplementedError, RuntimeError
            with pytest.raises(errors) as caught:
                call(lambda rows, k=k: odd_tensors(max(rows, 2))[k][0])
            text = str(caught.value)
            if type(caught.value) is not RuntimeError:  # PyTorch's own, of tensors of transforms
                said = words[0], "without memory", " has shape", "layout"
                assert f"rank {rank}: " in text and any(s in text for s in said), (name, text)
    x = torch.ones(1)
    dist.all_reduce(x)
    assert x.item() == size


# -- what PyTorch's own code asks of a backend ----------------------------------------------------


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
