"""Training that resumes when interrupted: mpidist run -n 2 slurm/requeued.py FOLDER [EPOCHS]"""

import sys
from itertools import islice

import mpidist as md
from mpidist.demo.digits import load_digits
from mpidist.demo.training import fingerprint
from mpidist.nn import Adam, CrossEntropy, Linear, ReLU, Sequential

EVERY = 20  # steps between checkpoints: at most these are lost if the job is killed
comm = md.init()
stop = md.StopRequest(comm)  # SIGUSR1, which SLURM sends before the time limit
folder, epochs = sys.argv[1], int(sys.argv[2]) if len(sys.argv) > 2 else 20
digits = load_digits("float32")
model = md.DDP(Sequential(Linear(64, 64), ReLU(), Linear(64, 10)), comm)
optimizer, criterion = md.ZeroOptimizer(Adam, model, learning_rate=3e-3), CrossEntropy()
samples = md.shard(range(len(digits.train_labels)), comm, shuffle=True)
checkpoint = md.Checkpoint(folder, comm, keep=2)


def say(text):
    if comm.rank == 0:
        print(text, flush=True)


found = checkpoint.load(model=model, optimizer=optimizer, samples=samples)
step = 0 if found is None else found["step"]
say(f"{comm.size} ranks: from step {step} on")
while samples.order.epoch < epochs:
    mine = iter(samples)  # the remaining samples of the epoch
    while part := list(islice(mine, 16)):
        criterion(model(digits.train_images[part]), digits.train_labels[part])
        model.backward(criterion.backward())
        optimizer.step()
        optimizer.zero_grad()
        step += 1
        leaving = stop.requested()
        if leaving or step % EVERY == 0:
            checkpoint.save(step, model=model, optimizer=optimizer, samples=samples)
            say(f"saved step {step}")
        if leaving:
            stop.leave()
    say(f"epoch {samples.order.epoch} of {epochs}")
say(f"{step} steps, parameters {fingerprint(model.module)}")
