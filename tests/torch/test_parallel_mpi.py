"""What stands on torch.distributed, with the backend "mpidist", on 4 ranks beside one process.

Each model is trained for some steps on the whole batch by one process, which every rank is, and in
parallel on a part of it; losses and parameters must be the same within rounding.
"""

import copy
from contextlib import nullcontext
from datetime import timedelta

import pytest

from tests.support.training_kits import NEEDS_TORCH, torch

pytestmark = [
    pytest.mark.skipif(torch is None, reason=NEEDS_TORCH),
    pytest.mark.filterwarnings("ignore"),
]
if torch is not None:
    import torch.distributed as dist
    from torch import nn

    import mpidist.torch  # noqa: F401

RANKS, STEPS, BATCH, WIDTH = 4, 4, 16, 8


@pytest.fixture
def world():
    dist.init_process_group("mpidist", timeout=timedelta(seconds=40))
    yield
    dist.destroy_process_group()


@pytest.fixture
def rank(world):
    if dist.get_world_size() != RANKS:
        pytest.skip(f"needs exactly {RANKS} ranks")
    return dist.get_rank()


def net():
    torch.manual_seed(3)
    layers = [nn.Linear(WIDTH, 3 * WIDTH), nn.Tanh(), nn.Linear(3 * WIDTH, WIDTH), nn.Tanh()]
    return nn.Sequential(*layers, nn.Linear(WIDTH, WIDTH)).double()


def batches():
    made = torch.Generator().manual_seed(5)
    shape = (STEPS, BATCH, WIDTH)
    x = torch.randn(*shape, generator=made, dtype=torch.float64)
    return x, torch.randn(*shape, generator=made, dtype=torch.float64)


def part(x, rank, parts=RANKS):
    return x[rank * BATCH // parts : (rank + 1) * BATCH // parts]


def train(model, mine=lambda x: x, optimizer=None, steps=range(STEPS)):
    """Train; return the losses of this rank's parts."""
    optimizer = optimizer or torch.optim.AdamW(model.parameters(), lr=0.01)
    x, y = batches()
    losses = []
    for step in steps:
        loss = (model(mine(x[step])) - mine(y[step])).pow(2).mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def alone(steps=range(STEPS)):
    """Parameters by name, and losses, of one process."""
    model = net()
    losses = train(model, steps=steps)
    return dict(model.named_parameters()), losses


def same(found, wanted, tolerance=1e-12):
    found = dict(found)
    assert set(found) == set(wanted)
    for name, value in wanted.items():
        torch.testing.assert_close(
            found[name], value, rtol=tolerance, atol=tolerance, msg=lambda m, n=name: f"{n}: {m}"
        )


def mean(losses):
    every = torch.tensor(losses, dtype=torch.float64)
    dist.all_reduce(every, op=dist.ReduceOp.AVG)
    return every.tolist()


# -- data parallel --------------------------------------------------------------------------------


@pytest.mark.parametrize("views", [False, True])
def test_ddp(rank, views):
    wanted, losses = alone()
    model = nn.parallel.DistributedDataParallel(
        net(), gradient_as_bucket_view=views, bucket_cap_mb=0.001
    )
    found = train(model, lambda x: part(x, rank))
    same(model.module.named_parameters(), wanted)
    assert mean(found) == pytest.approx(losses, rel=1e-12)


def test_ddp_as_over_gloo(rank):
    """Two ranks' sums are the same bits in any order; four are alike within rounding."""
    ended = []
    for group in (None, dist.new_group(backend="gloo")):
        model = nn.parallel.DistributedDataParallel(net().float(), process_group=group)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
        train(model, lambda x: part(x, rank).float(), optimizer)
        ended.append(dict(model.module.named_parameters()))
    same(ended[0], ended[1], 1e-5)


@pytest.mark.parametrize("options", [{}, {"find_unused_parameters": True}])
def test_ddp_accumulates(rank, options):
    """A backward within no_sync() only adds; the next one averages the sum of both."""
    wanted, model = net(), nn.parallel.DistributedDataParallel(net(), **options)
    x, y = batches()
    for step in (0, 1):
        (wanted(x[step]) - y[step]).pow(2).mean().backward()
        with nullcontext() if step else model.no_sync():
            (model(part(x[step], rank)) - part(y[step], rank)).pow(2).mean().backward()
    for p, q in zip(wanted.parameters(), model.parameters()):
        torch.testing.assert_close(q.grad, p.grad, rtol=1e-12, atol=1e-12)


def test_comm_hooks(rank):
    """The hook of PyTorch that averages in float16, and PowerSGD, whose callbacks communicate."""
    from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook

    for hook, state in (
        (default_hooks.fp16_compress_hook, None),
        (
            powerSGD_hook.powerSGD_hook,
            powerSGD_hook.PowerSGDState(None, matrix_approximation_rank=2, start_powerSGD_iter=2),
        ),
    ):
        model = nn.parallel.DistributedDataParallel(net().float())
        model.register_comm_hook(state, hook)
        losses = mean(train(model, lambda x: part(x, rank).float()))
        assert losses == pytest.approx(alone()[1], rel=0.05)
        every = [torch.empty_like(p) for p in model.parameters() for _ in range(RANKS)]
        for k, p in enumerate(model.parameters()):
            some = every[k * RANKS : (k + 1) * RANKS]
            dist.all_gather(some, p.data)
            assert all(torch.equal(other, some[0]) for other in some)


def test_zero_redundancy(rank):
    from torch.distributed.optim import ZeroRedundancyOptimizer

    wanted, _ = alone()
    model = nn.parallel.DistributedDataParallel(net())
    optimizer = ZeroRedundancyOptimizer(model.parameters(), torch.optim.AdamW, lr=0.01)
    train(model, lambda x: part(x, rank), optimizer)
    same(model.module.named_parameters(), wanted)


def test_uneven_inputs(rank):
    """join(): rank r has r batches."""
    model = nn.parallel.DistributedDataParallel(net())
    x, _ = batches()
    with model.join():
        for step in range(rank):
            model(part(x[step], rank)).sum().backward()
    every = [torch.empty(1, dtype=torch.float64) for _ in range(RANKS)]
    dist.all_gather(every, next(model.parameters()).sum().detach().reshape(1))
    assert all(torch.equal(other, every[0]) for other in every)


# -- sharded --------------------------------------------------------------------------------------


def sharded(mesh):
    from torch.distributed.fsdp import fully_shard

    model = net()
    for layer in model:
        if isinstance(layer, nn.Linear):
            fully_shard(layer, mesh=mesh)
    return fully_shard(model, mesh=mesh)


def whole(model):
    return {name: p.full_tensor() for name, p in model.named_parameters()}


def test_fsdp2(rank):
    from torch.distributed.device_mesh import init_device_mesh

    wanted, losses = alone()
    model = sharded(init_device_mesh("cpu", (RANKS,)))
    found = train(model, lambda x: part(x, rank))
    same(whole(model), wanted)
    assert mean(found) == pytest.approx(losses, rel=1e-12)
    total = nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    assert total == 0 or total.full_tensor() >= 0


def test_fsdp2_in_symmetric_memory(rank):
    """Its staging buffers come from the group, a few that are used again."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import FSDPModule

    wanted, losses = alone()
    mesh = init_device_mesh("cpu", (RANKS,))
    model = sharded(mesh)
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.set_allocate_memory_from_process_group_for_comm(True)
    found = train(model, lambda x: part(x, rank))
    same(whole(model), wanted)
    assert mean(found) == pytest.approx(losses, rel=1e-12)
    group = mesh.get_group()
    if group.supports_tensor_alloc(torch.device("cpu")):
        x = group.allocate_tensor(40, dtype=torch.float64, device=torch.device("cpu"))
        assert x.shape == (40,) and x.dtype == torch.float64
        first = x.data_ptr()
        y = group.allocate_tensor(40, dtype=torch.float64, device=torch.device("cpu"))
        assert y.data_ptr() != first
        if rank:  # rank 0 still has it
            del x
        z = group.allocate_tensor(40, dtype=torch.float64, device=torch.device("cpu"))
        assert z.data_ptr() not in (first, y.data_ptr())
        if not rank:
            del x
        again = group.allocate_tensor(40, dtype=torch.float64, device=torch.device("cpu"))
        assert again.data_ptr() == first


def test_hsdp(rank):
    from torch.distributed.device_mesh import init_device_mesh

    wanted, losses = alone()
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    model = sharded(mesh)
    found = train(model, lambda x: part(x, rank))
    same(whole(model), wanted)
    assert mean(found) == pytest.approx(losses, rel=1e-12)


def test_fsdp1(rank):
    from torch.distributed.fsdp import FullyShardedDataParallel

    wanted, losses = alone()
    model = FullyShardedDataParallel(net(), device_id=torch.device("cpu"), use_orig_params=True)
    found = train(model, lambda x: part(x, rank))
    assert mean(found) == pytest.approx(losses, rel=1e-12)
    with FullyShardedDataParallel.summon_full_params(model):
        same(model.module.named_parameters(), wanted)


# -- tensors --------------------------------------------------------------------------------------


def test_dtensor(rank):
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Partial, Replicate, Shard, distribute_tensor

    mesh = init_device_mesh("cpu", (RANKS,))
    a = torch.arange(48.0, dtype=torch.float64).view(6, 8)
    b = torch.arange(40.0, dtype=torch.float64).view(8, 5)
    for places in ((Shard(0), Replicate()), (Shard(1), Shard(0)), (Replicate(), Shard(1))):
        x, y = distribute_tensor(a, mesh, [places[0]]), distribute_tensor(b, mesh, [places[1]])
        assert torch.equal((x @ y).full_tensor(), a @ b)
        assert torch.equal(x.redistribute(mesh, [Shard(1)]).full_tensor(), a)
        assert torch.equal(x.redistribute(mesh, [Shard(0)]).full_tensor(), a)
    assert isinstance(
        (
            distribute_tensor(a, mesh, [Shard(1)]) @ distribute_tensor(b, mesh, [Shard(0)])
        ).placements[0],
        Partial,
    )
    uneven = distribute_tensor(torch.arange(5.0), mesh, [Shard(0)])
    assert uneven.sum().full_tensor() == 10


def test_tensor_parallel(rank):
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor.parallel import (
        ColwiseParallel,
        RowwiseParallel,
        parallelize_module,
    )

    wanted, losses = alone()
    plan = {"0": ColwiseParallel(), "2": RowwiseParallel()}
    model = parallelize_module(net(), init_device_mesh("cpu", (RANKS,)), plan)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, foreach=False)
    assert train(model, optimizer=optimizer) == pytest.approx(losses, rel=1e-12)
    found = {
        name: p.full_tensor() if hasattr(p, "full_tensor") else p
        for name, p in model.named_parameters()
    }
    same(found, wanted)


def test_two_dimensions(rank):
    """Tensor parallel within pairs, FSDP2 between them."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.tensor.parallel import (
        ColwiseParallel,
        RowwiseParallel,
        parallelize_module,
    )

    wanted, losses = alone()
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "tensor"))
    plan = {"0": ColwiseParallel(), "2": RowwiseParallel()}
    model = parallelize_module(net(), mesh["tensor"], plan)
    # What is not divided among the pair must be a DTensor of it too.
    model = fully_shard(model, mesh=mesh["data"], ignored_params=set(model[4].parameters()))
    for p in model[4].parameters():
        p.requires_grad_(False)
    optimizer = torch.optim.AdamW(
        [p for p in model.parameters() if p.requires_grad], lr=0.01, foreach=False
    )
    reference = net()
    for p in reference[4].parameters():
        p.requires_grad_(False)
    losses = train(
        reference,
        optimizer=torch.optim.AdamW(
            [p for p in reference.parameters() if p.requires_grad], lr=0.01
        ),
    )
    found = train(model, lambda x: part(x, rank // 2, 2), optimizer)
    assert mean(found) == pytest.approx(losses, rel=1e-10)


# -- pipelines ------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["ScheduleGPipe", "Schedule1F1B", "ScheduleInterleaved1F1B"])
def test_pipelining(rank, kind):
    from torch.distributed import pipelining

    torch.manual_seed(3)
    per_rank = 2 if kind == "ScheduleInterleaved1F1B" else 1
    count, microbatches = per_rank * RANKS, 4
    layers = [nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()).double() for _ in range(count)]
    x, y = batches()
    model = nn.Sequential(*copy.deepcopy(layers))
    mse = nn.MSELoss()
    loss = mse(model(x[0]), y[0])
    loss.backward()
    mine = range(rank, count, RANKS)
    stages = [pipelining.PipelineStage(layers[k], k, count, torch.device("cpu")) for k in mine]
    made = getattr(pipelining, kind)
    schedule = made(stages if per_rank > 1 else stages[0], microbatches, loss_fn=mse)
    losses = []
    arguments = (x[0],) if rank == 0 else ()
    if rank == RANKS - 1:
        schedule.step(*arguments, target=y[0], losses=losses)
        total = torch.stack(losses).mean().item()
        assert total == pytest.approx(loss.item(), rel=1e-12)
    else:
        schedule.step(*arguments)
    for k in mine:
        for p, q in zip(model[k].parameters(), layers[k].parameters()):
            torch.testing.assert_close(q.grad, p.grad, rtol=1e-12, atol=1e-12)


# -- checkpoints ----------------------------------------------------------------------------------


def test_checkpoint_on_another_size(rank, tmp_path_factory):
    """Sharded by 4, written by torch.distributed.checkpoint, read by 2, and by one."""
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint.state_dict import get_model_state_dict, set_model_state_dict
    from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

    told = [str(tmp_path_factory.mktemp("dcp")) if rank == 0 else None]
    dist.broadcast_object_list(told, src=0)
    (folder,) = told
    wanted, _ = alone(range(2))
    model = sharded(init_device_mesh("cpu", (RANKS,)))
    train(model, lambda x: part(x, rank), steps=range(2))
    dcp.save({"model": get_model_state_dict(model)}, checkpoint_id=folder)
    halves = dist.new_group([0, 1])
    if rank < 2:
        other = sharded(DeviceMesh("cpu", [0, 1]))
        state = {"model": get_model_state_dict(other)}
        dcp.load(state, checkpoint_id=folder, process_group=halves)
        set_model_state_dict(other, state["model"])
        same(whole(other), wanted)
    dist.barrier()
    plain = net()
    state = {"model": plain.state_dict()}
    dcp.load(state, checkpoint_id=folder, no_dist=True)
    plain.load_state_dict(state["model"])
    same(plain.named_parameters(), wanted)


def test_asynchronous_checkpoint(rank, tmp_path_factory):
    """Its thread communicates by a group of gloo beside, which meets in the store over MPI."""
    import torch.distributed.checkpoint as dcp

    told = [str(tmp_path_factory.mktemp("async")) if rank == 0 else None]
    dist.broadcast_object_list(told, src=0)
    group = dist.new_group(backend="gloo")
    state = {"x": torch.arange(10.0)}
    dcp.async_save(state, checkpoint_id=told[0], process_group=group).result()
    read = {"x": torch.zeros(10)}
    dcp.load(read, checkpoint_id=told[0], process_group=group)
    assert torch.equal(read["x"], state["x"])


@pytest.mark.long
def test_compile(rank):
    """torch.compile on what communicates, without a compiler of C++."""
    wanted, losses = alone()
    model = torch.compile(nn.parallel.DistributedDataParallel(net()), backend="aot_eager")
    found = train(model, lambda x: part(x, rank))
    assert mean(found) == pytest.approx(losses, rel=1e-12)
    assert len(wanted) == 6
