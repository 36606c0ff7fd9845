"""A pipeline with a planted fault, for tests of mpidist check.

FAULT [library=torch|array] [schedule=NAME] [stages=partition|hand|traced] [pipe=RANKS]
[optimizer=sgd|adam|zero|groups] [tied=yes]
"""

import sys

import numpy as np

import mpidist as md

fault = sys.argv[1]
words = dict(word.split("=") for word in sys.argv[2:])
schedule = words.get("schedule", "1f1b")
chunks = 2 if schedule in ("interleaved", "zb-v") else 1
comm = md.init()
grid = md.Grid(comm, pipe=int(words.get("pipe", comm.size)))
rank, size = grid.pipe_index, grid.pipe.size
source = np.random.default_rng(3)
x, y = source.normal(size=(96, 12)).astype("f4"), source.integers(0, 5, 96)
array = words.get("library") == "array"
alike = fault != "seed"

if array:
    from mpidist import nn

    seeds = iter(range(rank * (not alike), 100))

    def linear(*shape):
        return nn.Linear(*shape, seed=next(seeds))

    layers = [linear(12, 16), nn.ReLU()]
    for _ in range(6):
        layers += [linear(16, 16), nn.ReLU()]
    model = nn.Sequential(*layers, linear(16, 5))
    loss_fn = nn.CrossEntropy()
else:
    import torch
    from torch.nn import functional

    torch.set_num_threads(1)
    torch.manual_seed(0 if alike else rank)
    x, y = torch.from_numpy(x), torch.from_numpy(y)

    class Block(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.inner, self.norm = torch.nn.Linear(16, 16), torch.nn.LayerNorm(16)

        def forward(self, x):
            return x + torch.tanh(self.inner(self.norm(x)))

    layers = [torch.nn.Linear(12, 16)]
    for k in range(6):
        layers += [Block()]
        if fault == "batchnorm" and k == 3:
            layers += [torch.nn.BatchNorm1d(16)]
    if words.get("tied"):
        layers[6].inner.weight = layers[1].inner.weight
    model = torch.nn.Sequential(*layers, torch.nn.Linear(16, 5))
    loss_fn = functional.cross_entropy
    if fault == "summed":

        def loss_fn(scores, labels, reduction="sum"):  # which it is not
            return functional.cross_entropy(scores, labels)


if words.get("stages") == "hand":
    # Each rank builds its own layers only.
    if array:
        mine = nn.Linear(16, 5, seed=8) if rank else nn.Linear(12, 16, seed=7)
        stage = nn.Sequential(mine, nn.ReLU()) if rank == 0 else mine
    else:
        torch.manual_seed(rank)
        stage = torch.nn.Sequential(torch.nn.Linear(16, 5) if rank else torch.nn.Linear(12, 16))
    mine = [stage]
else:
    if words.get("stages") == "traced":

        class Whole(torch.nn.Module):
            def __init__(self):
                super().__init__()
                self.blocks = torch.nn.ModuleList(model)

            def forward(self, x):
                for block in self.blocks:
                    x = block(x)
                return x

        parts = md.partition(Whole(), size, example=x[:8], verbose=False)
    else:
        parts = md.partition(model, chunks * size, verbose=False)
    if chunks == 1:
        mine = [parts[rank]]
    else:
        mine = [parts[rank], parts[2 * size - 1 - rank if schedule == "zb-v" else rank + size]]
held = [p for stage in mine for p in stage.parameters()]
zero = words.get("optimizer") == "zero"
if grid.shape[0] > 1 or zero:
    mine = [md.DDP(stage, grid.data) for stage in mine]
pipe = md.Pipeline(mine, grid.pipe, num_microbatches=4, schedule=schedule)
if fault == "two":
    md.Pipeline(mine, grid.pipe, num_microbatches=4, schedule=schedule)
if fault == "first stage" and size > 1:  # the optimizer of all ranks is made of its parameters
    held = list(parts[0].parameters())
rate = 0.05 if fault == "rate" and rank == 1 else 0.1
if zero:
    optimizer = md.ZeroOptimizer(torch.optim.Adam, mine[0], lr=0.01)
elif array:
    optimizer = nn.SGD(held, rate, momentum=0.9)
elif words.get("optimizer") == "groups":
    optimizer = torch.optim.SGD([{"params": [p]} for p in held], rate)
elif words.get("optimizer") == "adam":
    optimizer = torch.optim.Adam(held, 0.1 * rate)
else:
    optimizer = torch.optim.SGD(held, rate, momentum=0.9)

order = np.random.default_rng(rank if fault == "order" else 0)
if fault == "singles":
    singles = iter(md.shard(range(len(x)), grid.data))
for _ in range(4):
    rows = order.permutation(len(x))[:32]
    rows = rows[grid.data_index :: grid.shape[0]]
    if fault == "singles":
        rows = [next(singles) for _ in range(8)]
    inputs, targets = x[rows], y[rows]
    if fault == "targets" and rank == size - 1 > 0:
        targets = targets[::-1] if array else targets.flip(0)
    if fault == "halves":
        outputs = pipe.forward(inputs)
        pipe.backward([np.ones_like(each) for each in outputs] if outputs else None)
    elif fault == "apart":
        pipe.step(*((inputs,) if rank == 0 else (None, targets, loss_fn)))
    else:
        pipe.step(inputs, targets, loss_fn)
    if fault == "clipped":
        torch.nn.utils.clip_grad_norm_(held, 0.05)
    elif fault == "clean" and not array and not zero:
        pipe.clip_gradients(0.5)
    if fault != "skipped" or rank == 0:
        optimizer.step()
    if fault != "kept" or rank == 0:
        optimizer.zero_grad()
