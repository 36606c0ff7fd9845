"""Training that resumes where it was killed: mpirun -n 4 python examples/resumable.py [FOLDER]"""

import sys
import tempfile

import mpidist as md
from mpidist.demo.digits import load_digits
from mpidist.nn import Adam, CrossEntropy, Linear, ReLU, Sequential

comm = md.init()
folder = comm.broadcast_object(sys.argv[1] if len(sys.argv) > 1 else tempfile.mkdtemp())
digits = load_digits("float32")
model = md.DDP(Sequential(Linear(64, 64), ReLU(), Linear(64, 10)), comm)
optimizer, criterion = md.ZeroOptimizer(Adam, model, learning_rate=3e-3), CrossEntropy()
samples = md.shard(range(len(digits.train_labels)), comm, shuffle=True)
checkpoint = md.Checkpoint(folder, comm, keep=2)

# Restores model, optimizer and position bit for bit, on any number of ranks.
found = checkpoint.load(model=model, optimizer=optimizer, samples=samples)
begin = 0 if found is None else found["step"]
for epoch in range(begin, begin + 3):
    mine = list(samples)
    for start in range(0, len(mine), 16):
        part = mine[start : start + 16]
        criterion(model(digits.train_images[part]), digits.train_labels[part])
        model.backward(criterion.backward())
        optimizer.clip_gradients(5.0)
        optimizer.step()
        optimizer.zero_grad()
    checkpoint.save(epoch + 1, model=model, optimizer=optimizer, samples=samples)

if comm.rank == 0:
    print(f"{comm.size} ranks: epochs {begin + 1} to {epoch + 1}, kept {checkpoint.steps()}")
