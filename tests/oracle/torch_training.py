"""A training of PyTorch with a planted fault, for tests of mpidist check: FAULT [WRAPPER]."""

import sys

import torch
from torch.nn import functional
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

import mpidist as md

fault = sys.argv[1]
wrapper = sys.argv[2] if len(sys.argv) > 2 else "ddp"

if wrapper == "stock":
    import torch.distributed as dist

    dist.init_process_group("mpidist")
    rank, size = dist.get_rank(), dist.get_world_size()
else:
    comm = md.init()
    rank, size = comm.rank, comm.size
torch.set_num_threads(1)

source = torch.Generator().manual_seed(3)
count = 90 if fault == "uneven" else 256
x = torch.randn(count, 12, generator=source)
y = torch.randint(0, 5, (count,), generator=source)
data = TensorDataset(x, y)


class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.body = torch.nn.Linear(12, 20)
        self.norm = torch.nn.BatchNorm1d(20) if fault == "batchnorm" else torch.nn.Identity()
        self.drop = torch.nn.Dropout(0.5 if fault == "dropout" else 0.0)
        self.head = torch.nn.Linear(20, 5)

    def forward(self, x):
        h = self.drop(torch.tanh(self.norm(self.body(x))))
        if fault == "zero" and rank >= 0 and size > 1:
            h = h.detach()
        return self.head(h)


net = Net()
if fault == "bfloat16":
    net = net.bfloat16()
if wrapper == "stock":
    if fault == "start":
        torch.manual_seed(rank)
    sampler = DistributedSampler(data, seed=4, shuffle=True)
    if fault == "same":
        sampler = DistributedSampler(data, num_replicas=size, rank=0, seed=4)
    if fault == "order" and rank == 1:
        sampler.set_epoch(1)
    loader = DataLoader(data, 16, sampler=sampler)
    model = torch.nn.parallel.DistributedDataParallel(net)
else:
    part = comm
    if fault == "same" and rank == 1:
        part = type("Part", (), {"rank": 0, "size": size})()
    seed = 5 if fault == "order" and rank == 1 else 4
    batch = 13 if fault == "uneven" else 16
    loader = md.shard(DataLoader(data, batch, shuffle=True), part, seed=seed, uneven="keep")
    options = {"init_sync": fault != "start"}
    if fault == "halves":
        options["hook"] = md.parallel.hooks.Compress("float16")
    model = md.DDP(net, comm, **options)
if fault == "start" and rank == 1 and wrapper == "stock":
    with torch.no_grad():
        net.head.bias.add_(0.25)
if fault == "replaced":
    new = torch.nn.Linear(20, 5)
    new.load_state_dict(net.head.state_dict())
    net.head = new

parameters = list(model.parameters())
if fault == "state" and rank == 1:
    parameters = parameters[:-1]
if wrapper == "zero":
    optimizer = md.ZeroOptimizer(torch.optim.Adam, model, lr=0.01)
else:
    optimizer = torch.optim.SGD(parameters, lr=0.1, momentum=0.9)

step = 0
for _ in range(3):
    for images, labels in loader:
        step += 1
        if fault == "bfloat16":
            images = images.bfloat16()
        scores = model(images) if fault != "alone" else net(images)
        loss = functional.cross_entropy(
            scores.float(), labels, reduction="sum" if fault == "sum" else "mean"
        )
        if fault == "contrastive":
            loss = functional.cross_entropy(scores @ scores.T, torch.arange(len(scores)))
        if fault == "loss N":
            loss = loss * size
        if fault == "loss 1/N":
            loss = loss / size
        if fault == "unsynchronised":
            with model.no_sync():
                loss.backward()
        else:
            loss.backward()
        for p in model.parameters():
            if p.grad is None:
                continue
            if fault == "N":
                p.grad *= size
            if fault == "1/N":
                p.grad /= size
            if fault == "N2":
                p.grad *= size**2
            if fault == "one rank" and size > 1:
                with torch.no_grad():
                    if step == 1:
                        own = [torch.autograd.grad(
                            functional.cross_entropy(net(images), labels), list(net.parameters())
                        )]
        if fault == "one rank" and size > 1 and step == 1:
            for p, g in zip(net.parameters(), own[0]):
                p.grad.copy_(torch.from_numpy(comm.broadcast(g.numpy(), root=1)))
        if fault == "lr" and rank == 1:
            optimizer.param_groups[0]["lr"] = 0.05
        if not (fault == "skipped" and rank == 1 and step == 2):
            optimizer.step()
        optimizer.zero_grad()
