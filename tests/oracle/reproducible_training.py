"""A training with ``DDP(reproducible=6)``, for tests of mpidist check: FAULT array|torch."""

import sys
from contextlib import nullcontext

import numpy as np

import mpidist as md

fault, library = sys.argv[1:]
comm = md.init()
source = np.random.default_rng(3)
x, y = source.normal(size=(96, 12)).astype("f4"), source.integers(0, 5, 96)
if library == "torch":
    import torch
    from torch.utils.data import DataLoader, TensorDataset

    torch.set_num_threads(1)
    torch.manual_seed(0)
    net = torch.nn.Sequential(torch.nn.Linear(12, 20), torch.nn.Tanh(), torch.nn.Linear(20, 5))
    optimizer = torch.optim.Adam(net.parameters(), 0.01)
    data = DataLoader(TensorDataset(torch.from_numpy(x), torch.from_numpy(y)), 4, shuffle=True)
else:
    from mpidist import nn

    net = nn.Sequential(nn.Linear(12, 20, seed=1), nn.ReLU(), nn.Linear(20, 5, seed=2))
    optimizer = nn.Adam(net.parameters(), 0.01)
    data = [(x[k : k + 4], y[k : k + 4]) for k in range(0, 96, 4)]
    md.shard(data[:6], comm)  # of an evaluation
model = md.DDP(net, comm, reproducible=6)
each = 6 // comm.size
if fault == "beside":  # another model, of which nothing is promised
    other = md.DDP(torch.nn.Linear(12, 5), comm)
    md.shard(data, comm)
    descent = torch.optim.SGD(other.parameters(), 0.1)
for number, (a, b) in enumerate(md.shard(data, comm, shuffle=True, microbatches=6)):
    if fault == "beside":
        with nullcontext() if number % each == each - 1 else other.no_sync():
            scores = model(a), other(a)
            sum(torch.nn.functional.cross_entropy(z, b) for z in scores).backward()
    elif library == "torch":
        torch.nn.functional.cross_entropy(model(a), b).backward()
    else:
        criterion = nn.CrossEntropy()
        criterion(model(a), b)
        model.backward(criterion.backward())
    if number % each == each - 1:
        if fault == "bits" and comm.size > 1:
            first = next(iter(net.parameters()))
            first.grad *= 1.0000002
        optimizer.step()
        optimizer.zero_grad()
        if fault == "beside":
            for p in other.parameters():
                p.grad /= each
            descent.step()
            descent.zero_grad()
