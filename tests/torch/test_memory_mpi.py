"""The memory of tensors in calls of the backend "mpidist": any strides, small ones, views."""

import pytest

from mpidist.errors import InvalidArgument
from tests.support.torch_groups import DTYPES, combined, name_of, values
from tests.support.training_kits import NEEDS_TORCH, torch

pytestmark = pytest.mark.skipif(torch is None, reason=NEEDS_TORCH)
if torch is not None:
    import torch.distributed as dist

    import mpidist.torch


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
