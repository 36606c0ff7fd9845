"""A training of mpidist.nn with a planted fault, for tests of mpidist check: FAULT [OPTIMIZER]."""

import sys
from contextlib import nullcontext

import numpy as np

import mpidist as md
from mpidist.nn import SGD, Adam, CrossEntropy, Linear, ReLU, Sequential

fault = sys.argv[1]
which = sys.argv[2] if len(sys.argv) > 2 else "sgd"  # or "adam", "zero", "double"
comm = md.init()
source = np.random.default_rng(3)
if fault == "random":
    source = np.random.default_rng()
dtype = np.float64 if which == "double" else np.float32
x = source.normal(size=(240, 12)).astype(dtype)
y = source.integers(0, 5, 240)
if fault == "fails":
    raise RuntimeError("no data set")
if fault == "leaves":
    sys.exit("no data set")

seed = comm.rank
net = Sequential(Linear(12, 20, seed=seed, dtype=dtype), ReLU(), Linear(20, 5, seed=9, dtype=dtype))
hook = md.parallel.hooks.Compress("float16") if fault == "halves" else None
model = md.DDP(net, comm, init_sync=fault != "start", hook=hook)
if fault == "replaced":
    net.layers[2] = Linear(20, 5, seed=9, dtype=dtype)
if which == "zero":
    optimizer = md.ZeroOptimizer(Adam, model, learning_rate=0.01)
elif which == "adam":
    optimizer = Adam(net.parameters(), 0.01)
else:
    optimizer = SGD(net.parameters(), 0.1, momentum=0.9)
if fault == "state" and comm.rank == 1:
    for p in optimizer.parameters:
        optimizer.state_of(p)["velocity"] = np.ones_like(p.data)
if fault == "list" and comm.rank == 1:
    optimizer.parameters.pop()
criterion = CrossEntropy("sum" if fault == "sum" else "mean")
numbers = range(len(y))
if fault == "same" and comm.rank == 1:
    first = type("Part", (), {"rank": 0, "size": comm.size})()
    samples = md.shard(numbers, first, shuffle=True, seed=1)
elif fault == "order" and comm.rank == 1:
    samples = md.shard(numbers, comm, shuffle=True, seed=7)
else:
    samples = md.shard(numbers, comm, shuffle=True, seed=1)

step = 0
for _ in range(0 if fault == "nothing" else 3):
    mine = list(samples)
    for start in range(0, len(mine), 16):
        part = mine[start : start + 16]
        step += 1
        if fault == "rare" and step == 2:
            comm.barrier()  # all have recorded the first step
        if fault == "rare" and step == 2 and comm.rank == 1:
            raise RuntimeError("a rare mistake")
        if fault == "exits" and step == 2:
            sys.exit(0)
        scores = model(x[part])
        criterion(scores, y[part])
        scale = {"loss_N": comm.size, "loss_1/N": 1 / comm.size}.get(fault, 1.0)
        alone = fault in ("unsynchronised", "one_rank")
        with model.no_sync() if alone else nullcontext():
            model.backward(criterion.backward(scale))
            for p in net.parameters():
                factor = {"N": comm.size, "1/N": 1 / comm.size, "N2": comm.size**2}.get(fault, 1)
                if p.grad is not None and factor != 1:
                    p.grad *= factor
                if fault == "one_rank":
                    p.grad[...] = comm.broadcast(np.array(p.grad), root=comm.size - 1)
            if fault == "zero" and comm.size > 1:
                net.layers[2].bias.grad[...] = 0
            if fault == "late" and step == 2 and comm.rank == 1:
                raise RuntimeError("a late mistake\nin two lines")
            if fault != "skipped" or comm.rank != 1 or step != 2:
                optimizer.step()
        optimizer.zero_grad()
