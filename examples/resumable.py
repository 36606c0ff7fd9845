"""Training that resumes where it was killed.

mpidist run -n 4 examples/resumable.py [FOLDER]
"""

import sys
import tempfile

import mpidist as md
from mpidist.demo.digits import load_digits
from mpidist.nn import Adam, CrossEntropy, Linear, ReLU, Sequential

comm = md.init()
folder = sys.argv[1] if len(sys.argv) > 1 else tempfile.mkdtemp()
folder = comm.broadcast_object(folder)
digits = load_digits("float32")
net = Sequential(Linear(64, 64), ReLU(), Linear(64, 10))
model = md.DDP(net, comm)
optimizer = md.ZeroOptimizer(Adam, model, learning_rate=3e-3)
criterion = CrossEntropy()
numbers = range(len(digits.train_labels))
samples = md.shard(numbers, comm, shuffle=True)
checkpoint = md.Checkpoint(folder, comm, keep=2)

# Restored bit for bit, on any number of ranks.
state = {"model": model, "optimizer": optimizer, "samples": samples}
found = checkpoint.load(**state)
begin = 0 if found is None else found["step"]
for epoch in range(begin, begin + 3):
    mine = list(samples)
    for start in range(0, len(mine), 16):
        part = mine[start : start + 16]
        guesses = model(digits.train_images[part])
        criterion(guesses, digits.train_labels[part])
        model.backward(criterion.backward())
        optimizer.clip_gradients(5.0)
        optimizer.step()
        optimizer.zero_grad()
    checkpoint.save(epoch + 1, **state)

if comm.rank == 0:
    kept = checkpoint.steps()
    print(f"{comm.size} ranks: epochs {begin + 1} to {epoch + 1}, kept {kept}")
