"""A pipeline of mpidist.nn on all ranks: mpirun -n 3 python examples/pipeline_nn.py"""

import numpy as np

import mpidist as md
from mpidist.nn import SGD, CrossEntropy, Linear, ReLU, Sequential

comm = md.init()
random = np.random.default_rng(0)
x = random.normal(size=(240, 8)).astype(np.float32)
labels = (x[:, 0] * x[:, 1] > 0).astype(int)

layers = [Linear(8, 64, seed=1), ReLU()]
for seed in (2, 3, 4):
    layers += [Linear(64, 64, seed=seed), ReLU()]
stages = md.partition(Sequential(*layers, Linear(64, 2, seed=5)), comm.size)

stage = stages[comm.rank]  # each rank runs one stage
pipe = md.Pipeline(stage, comm, num_microbatches=8, schedule="zb-h1")
optimizer = SGD(stage.parameters(), learning_rate=0.3, momentum=0.9)
losses = []
for _ in range(200):
    # The first rank uses x, the last rank the labels; all ranks receive the loss.
    losses.append(pipe.step(x, labels, CrossEntropy()))
    optimizer.step()
    optimizer.zero_grad()

stats = pipe.stats()
if comm.rank == 0:
    print(f"{comm.size} stages: the loss has fallen to a tenth: {losses[-1] < losses[0] / 10}")
    print(f"alive at a time: {stats.peak_live}, as the schedule says: {stats.predicted_live}")
