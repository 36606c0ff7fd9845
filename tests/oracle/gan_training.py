"""Two models, of which one computes samples of the other, for tests of mpidist check: FAULT."""

import sys

import torch
from torch.nn.functional import binary_cross_entropy_with_logits
from torch.utils.data import DataLoader, TensorDataset

import mpidist as md

(fault,) = sys.argv[1:]
comm = md.init()
torch.set_num_threads(1)
torch.manual_seed(0)
data = TensorDataset(torch.randn(96, 10), torch.randn(96, 3))
makes = torch.nn.Sequential(torch.nn.Linear(10, 16), torch.nn.ReLU(), torch.nn.Linear(16, 3))
judges = torch.nn.Sequential(torch.nn.Linear(3, 16), torch.nn.ReLU(), torch.nn.Linear(16, 1))
one, other = md.DDP(makes, comm), md.DDP(judges, comm)
optimizers = [torch.optim.Adam(model.parameters(), 0.01) for model in (makes, judges)]
for noise, real in md.shard(DataLoader(data, 8, shuffle=True), comm):
    if fault != "kept" or comm.rank != 1:
        optimizers[1].zero_grad()
    labels = torch.cat([torch.ones(len(real), 1), torch.zeros(len(real), 1)])
    scores = other(torch.cat([real, one(noise).detach()]))
    binary_cross_entropy_with_logits(scores, labels).backward()
    optimizers[1].step()
    optimizers[0].zero_grad()
    judges.requires_grad_(False)
    binary_cross_entropy_with_logits(judges(one(noise)), labels[: len(real)]).backward()
    judges.requires_grad_(True)
    optimizers[0].step()
