"""A training of PyTorch with a planted fault, for tests of mpidist check.

FAULT [wrapper=ddp|stock|zero] [model=mlp|cnn|gpt] [dtype=DTYPE] [optimizer=sgd|adam]
"""

import sys
from contextlib import nullcontext

import torch
from torch.nn import functional
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

import mpidist as md

fault = sys.argv[1]
words = dict(word.split("=") for word in sys.argv[2:])
wrapper = words.get("wrapper", "ddp")  # or "stock", "zero"
kind = words.get("model", "mlp")  # or "cnn", "gpt"
dtype = getattr(torch, words.get("dtype", "float32"))
adam = words.get("optimizer") == "adam"

if wrapper == "stock":
    import torch.distributed as dist

    dist.init_process_group("mpidist")
    rank, size = dist.get_rank(), dist.get_world_size()
else:
    comm = md.init()
    rank, size = comm.rank, comm.size
torch.set_num_threads(1)

source = torch.Generator().manual_seed(3)
count = 29 if fault == "uneven" else 256
shape = {"mlp": (12,), "cnn": (1, 8, 8), "gpt": (6,)}[kind]
x = torch.randn(count, *shape, generator=source).to(dtype)
if kind == "gpt":
    x = torch.randint(0, 11, (count, 6), generator=source)
y = torch.randint(0, 5, (count,), generator=source)
data = TensorDataset(x, y)


class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        if kind == "mlp":
            self.body = torch.nn.Linear(12, 20)
        elif kind == "cnn":
            pool = torch.nn.MaxPool2d(2)
            self.body = torch.nn.Sequential(
                torch.nn.Conv2d(1, 5, 3, padding=1), pool, torch.nn.Flatten(), torch.nn.ReLU()
            )
            self.body.append(torch.nn.Linear(80, 20))
        else:
            self.words = torch.nn.Embedding(11, 16)
            layer = torch.nn.TransformerEncoderLayer(16, 2, 32, dropout=0.0, batch_first=True)
            self.body = torch.nn.Sequential(layer, torch.nn.Linear(16, 20))
        self.norm = torch.nn.BatchNorm1d(20) if fault == "batchnorm" else torch.nn.Identity()
        self.drop = torch.nn.Dropout(0.5 if fault == "dropout" else 0.0)
        self.head = torch.nn.Linear(20, 5)

    def forward(self, x):
        h = self.body(self.words(x)).mean(1) if kind == "gpt" else self.body(x)
        h = self.drop(torch.tanh(self.norm(h)))
        if fault == "zero" and size > 1:
            h = h.detach()
        return self.head(h)


net = Net().to(dtype)
if wrapper == "stock":
    sampler = DistributedSampler(data, seed=4, shuffle=True)
    if fault == "same":
        sampler = DistributedSampler(data, num_replicas=size, rank=0, seed=4)
    if fault == "order" and rank == 1:
        sampler.set_epoch(1)
    loader = DataLoader(data, 16, sampler=sampler)
    model = torch.nn.parallel.DistributedDataParallel(
        net, find_unused_parameters=fault == "replaced"
    )
else:
    part = comm
    if fault == "same" and rank == 1:
        part = type("Part", (), {"rank": 0, "size": size})()
    seed = 5 if fault == "order" and rank == 1 else 4
    batch = 8 if fault == "uneven" else 16
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
if wrapper == "zero" and not adam:
    optimizer = md.ZeroOptimizer(torch.optim.SGD, model, lr=0.1, momentum=0.9)
elif wrapper == "zero":
    optimizer = md.ZeroOptimizer(torch.optim.Adam, model, lr=0.01)
elif adam:
    optimizer = torch.optim.Adam(parameters, lr=0.01)
else:
    optimizer = torch.optim.SGD(parameters, lr=0.1, momentum=0.9)


def train(images, labels, step):
    scores = model(images).float()
    loss = functional.cross_entropy(scores, labels, reduction="sum" if fault == "sum" else "mean")
    if fault == "contrastive":
        loss = functional.cross_entropy(scores @ scores.T, torch.arange(len(scores)))
    loss = loss * {"loss_N": size, "loss_1/N": 1 / size}.get(fault, 1.0)
    loss.backward()
    for p in model.parameters():
        if p.grad is None:
            continue
        p.grad *= {"N": size, "1/N": 1 / size, "N2": size**2}.get(fault, 1)
        if fault == "one_rank" and size > 1:
            own = p.grad.clone()
            if wrapper == "stock":
                dist.broadcast(own, size - 1)
            else:
                own = torch.from_numpy(comm.broadcast(own.numpy(), root=size - 1))
            p.grad.copy_(own)
    if fault == "lr" and rank == 1:
        optimizer.param_groups[0]["lr"] = 0.05
    if fault == "closure":  # as Lightning does
        optimizer.step(loss.detach)
    elif not (fault == "skipped" and rank == 1 and step == 2):
        optimizer.step()
    optimizer.zero_grad()


alone = fault in ("unsynchronised", "one_rank")
step = 0
for _ in range(3):
    for images, labels in loader:
        step += 1
        with model.no_sync() if alone else nullcontext():
            train(images, labels, step)
