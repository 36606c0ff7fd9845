"""A pipeline of mpidist.nn: mpidist run -n 3 examples/pipeline_nn.py"""

import time

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
model = Sequential(*layers, Linear(64, 2, seed=5))
stage = md.partition(model, comm.size)[comm.rank]  # each rank runs one stage

pipe = md.Pipeline(stage, comm, num_microbatches=8, schedule="zb-h1")
optimizer = SGD(stage.parameters(), learning_rate=0.3, momentum=0.9)
begin = time.perf_counter()
for epoch in range(1, 201):
    # The first rank uses x, the last rank the labels; all receive the loss.
    loss = pipe.step(x, labels, CrossEntropy())
    optimizer.step()
    optimizer.zero_grad()
    if comm.rank == 0 and epoch % 50 == 0:
        print(f"epoch {epoch}: loss {loss:.4f}")
seconds = time.perf_counter() - begin

stats = pipe.stats()
if comm.rank == 0:
    print(f"{comm.size} stages: loss {loss:.4f}, {seconds:.1f} s")
    print(f"microbatches in memory: at most {stats.peak_live}, ", end="")
    print(f"predicted {stats.predicted_live}")
