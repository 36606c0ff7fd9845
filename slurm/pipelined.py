"""A model in two stages, each with replicas: mpidist run -n 4 slurm/pipelined.py"""

import mpidist as md
from mpidist.demo.digits import load_digits
from mpidist.nn import SGD, CrossEntropy, Linear, ReLU, Sequential

EPOCHS, BATCH, MICROBATCHES = 4, 64, 4
comm = md.init()
grid = md.Grid(comm, pipe=2)  # replicas of a stage share a node; stages are on different nodes
digits = load_digits("float32")
layers = Sequential(
    Linear(64, 128, seed=1), ReLU(), Linear(128, 64, seed=2), ReLU(), Linear(64, 10, seed=3)
)
stage = md.DDP(md.partition(layers, 2)[grid.pipe_index], grid.data)
pipe = md.Pipeline(stage, grid.pipe, MICROBATCHES)
optimizer = SGD(stage.parameters(), 0.1, momentum=0.9)
samples = md.shard(range(len(digits.train_labels)), grid.data, shuffle=True, seed=1)
first, last = grid.pipe_index == 0, grid.pipe_index == 1

for _ in range(EPOCHS):
    mine = list(samples)
    for start in range(0, len(mine), BATCH):
        part = mine[start : start + BATCH]
        pipe.step(
            digits.train_images[part] if first else None,
            digits.train_labels[part] if last else None,
            CrossEntropy() if last else None,
        )
        optimizer.step()
        optimizer.zero_grad()

outputs = pipe.forward(digits.test_images if first else None)
guesses = [row.argmax() for output in outputs for row in output]
right = sum(g == label for g, label in zip(guesses, digits.test_labels)) / len(digits.test_labels)
right = comm.broadcast_object(right, root=grid.data.size)  # the first rank of the last stage
if comm.rank == 0:
    print(f"{comm.size} ranks, {grid.shape[0]} x 2 stages: more than 85 % right: {right > 0.85}")
