"""What a program does with the backend "mpidist", on each rank: run with any PyTorch it allows."""

import tempfile

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
import torch.distributed.checkpoint as saved
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.nn.parallel import DistributedDataParallel

import mpidist

dist.init_process_group("mpidist")  # by the name alone, without an import of mpidist.torch
RANK, SIZE = dist.get_rank(), dist.get_world_size()
SUM = SIZE * (SIZE + 1) // 2


def collectives():
    x = torch.full((4,), RANK + 1.0)
    dist.all_reduce(x)
    assert (x == SUM).all()
    assert dist.all_reduce(x, async_op=True).wait() and (x == SUM * SIZE).all()
    parts = [torch.zeros(2) for _ in range(SIZE)]
    dist.all_gather(parts, torch.full((2,), float(RANK)))
    assert [part[0].item() for part in parts] == list(range(SIZE))
    every, own = torch.zeros(2 * SIZE), torch.zeros(2)
    dist.all_gather_into_tensor(every, parts[RANK])
    dist.reduce_scatter_tensor(own, every)
    assert (own == SIZE * RANK).all()
    dist.all_to_all_single(every, torch.full((2 * SIZE,), float(RANK)))
    assert every.tolist() == [float(k // 2) for k in range(2 * SIZE)]
    assert (functional.all_reduce(torch.ones(2), "sum", dist.group.WORLD) == SIZE).all()
    dist.monitored_barrier()


def messages():
    x, y = torch.full((3,), float(RANK)), torch.zeros(3)
    right, left = (RANK + 1) % SIZE, (RANK - 1) % SIZE
    both = [dist.P2POp(dist.isend, x, right), dist.P2POp(dist.irecv, y, left)]
    assert all(work.wait() for work in dist.batch_isend_irecv(both)) and (y == left).all()


def groups_and_objects():
    told = [None] * SIZE
    dist.all_gather_object(told, {"rank": RANK})
    assert told == [{"rank": rank} for rank in range(SIZE)]
    pair, x = dist.new_group([0, 1]), torch.ones(1)
    dist.all_reduce(x, group=pair)
    assert x.item() == (2 if RANK < 2 else 1)
    assert init_device_mesh("cpu", (SIZE,)).size() == SIZE


def trained(wrap, optimizer=torch.optim.SGD):
    """Train a layer with inputs that differ between ranks; its weights must not."""
    torch.manual_seed(RANK)
    model = wrap(torch.nn.Linear(8, 8))
    steps = optimizer(model.parameters(), lr=0.1)
    for _ in range(3):
        steps.zero_grad()
        model(torch.randn(4, 8)).sum().backward()
        steps.step()
    return model


def same(model):
    sums = [None] * SIZE
    dist.all_gather_object(sums, sum(p.sum().item() for p in model.parameters()))
    assert len(set(sums)) == 1, sums


def training():
    same(trained(DistributedDataParallel))
    same(trained(lambda layer: mpidist.DDP(layer, mpidist.init())))
    same(
        trained(
            DistributedDataParallel,
            lambda p, lr: ZeroRedundancyOptimizer(p, torch.optim.Adam, lr=lr),
        )
    )
    trained(lambda layer: FullyShardedDataParallel(layer, device_id=torch.device("cpu")))
    trained(lambda layer: fully_shard(layer) or layer)


def checkpoint():
    folder = [tempfile.mkdtemp()]
    dist.broadcast_object_list(folder, 0)
    saved.save({"w": torch.full((3,), 2.0)}, checkpoint_id=folder[0])
    state = {"w": torch.zeros(3)}
    saved.load(state, checkpoint_id=folder[0])
    assert (state["w"] == 2).all()


for step in (collectives, messages, groups_and_objects, training, checkpoint):
    step()
    if RANK == 0:
        print(f"PyTorch {torch.__version__}: {step.__name__} ok", flush=True)
dist.destroy_process_group()
