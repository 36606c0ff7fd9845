"""Handwritten digits on all ranks, without a framework: mpirun -n 4 python examples/digits.py"""

import mpidist as md
from mpidist.demo.digits import load_digits
from mpidist.nn import SGD, CrossEntropy, Linear, ReLU, Sequential

comm = md.init()
digits = load_digits("float32")
net = Sequential(Linear(64, 128, seed=comm.rank), ReLU(), Linear(128, 10, seed=comm.rank))
model = md.DDP(net, comm)  # all ranks start with the weights of rank 0
optimizer, criterion = SGD(model.parameters(), 0.1, momentum=0.9), CrossEntropy()
samples = md.shard(range(len(digits.train_labels)), comm, shuffle=True, seed=1)

for _ in range(10):
    mine = list(samples)  # this rank's samples of the epoch
    for start in range(0, len(mine), 16):
        part = mine[start : start + 16]
        criterion(model(digits.train_images[part]), digits.train_labels[part])
        model.backward(criterion.backward())  # averages the gradients over the ranks
        optimizer.step()
        optimizer.zero_grad()

guesses = model(digits.test_images).argmax(axis=1)
if comm.rank == 0:
    right = (guesses == digits.test_labels).mean()
    print(f"{comm.size} ranks: more than 93 % of the digits right: {right > 0.93}")
