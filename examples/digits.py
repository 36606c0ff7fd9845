"""Handwritten digits in numpy: mpidist run -n 4 examples/digits.py"""

import time

import numpy as np

import mpidist as md
from mpidist.demo.digits import load_digits
from mpidist.nn import SGD, CrossEntropy, Linear, ReLU, Sequential

comm = md.init()
digits = load_digits("float32")
first, last = Linear(64, 128, seed=comm.rank), Linear(128, 10, seed=comm.rank)
net = Sequential(first, ReLU(), last)
model = md.DDP(net, comm)  # all ranks start with the weights of rank 0
optimizer = SGD(model.parameters(), 0.1, momentum=0.9)
criterion = CrossEntropy()
numbers = range(len(digits.train_labels))
samples = md.shard(numbers, comm, shuffle=True, seed=1)

begin = time.perf_counter()
for epoch in range(1, 11):
    mine = list(samples)  # this rank's samples of the epoch
    losses = []
    for start in range(0, len(mine), 16):
        part = mine[start : start + 16]
        guesses = model(digits.train_images[part])
        losses.append(criterion(guesses, digits.train_labels[part]))
        model.backward(criterion.backward())  # averages the gradients
        optimizer.step()
        optimizer.zero_grad()
    loss = comm.allreduce(np.mean(losses), op="mean")
    if comm.rank == 0:
        print(f"epoch {epoch}: loss {loss:.3f}")
seconds = time.perf_counter() - begin

guesses = model(digits.test_images).argmax(axis=1)
if comm.rank == 0:
    accuracy = (guesses == digits.test_labels).mean()
    print(f"{comm.size} ranks: accuracy {accuracy:.1%}, {seconds:.1f} s")
