"""Collectives of the backend "mpidist", by closed forms."""

import contextlib

import pytest

from mpidist.errors import InvalidArgument, InvalidRank
from tests.support.torch_groups import DTYPES, FLOATS, INTS, combined, name_of, values
from tests.support.training_kits import NEEDS_TORCH, torch

pytestmark = pytest.mark.skipif(torch is None, reason=NEEDS_TORCH)
if torch is not None:
    import torch.distributed as dist


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
