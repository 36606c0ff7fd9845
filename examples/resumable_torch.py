"""PyTorch training that is killed, and resumed on another number of ranks.

mpidist run -n 2 examples/resumable_torch.py FOLDER [STEP]

At STEP rank 1 is killed.
"""

import os
import signal
import sys

import torch
from torch.utils.data import DataLoader, TensorDataset

import mpidist as md
from mpidist.demo.digits import load_digits

comm = md.init()
torch.set_num_threads(1)  # the ranks share the cores
digits = load_digits("float32")
images = torch.from_numpy(digits.train_images)
data = TensorDataset(images, torch.from_numpy(digits.train_labels))
loader = DataLoader(data, batch_size=16, shuffle=True)
loader = md.shard(loader, comm, seed=1)

net = torch.nn.Sequential(
    torch.nn.Linear(64, 128), torch.nn.ReLU(), torch.nn.Linear(128, 10)
)
model = md.DDP(net, comm)
optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
checkpoint = md.Checkpoint(sys.argv[1], comm, keep=2)

# Sets model, optimizer and loader; None if there is no checkpoint yet.
state = {"model": model, "optimizer": optimizer, "loader": loader}
found = checkpoint.load(**state)
step = 0 if found is None else found["step"]
killed = int(sys.argv[2]) if len(sys.argv) > 2 else None
if comm.rank == 0:
    at = f"step {step}, in epoch {loader.epoch}"
    print(f"{comm.size} ranks: {at}", flush=True)

while loader.epoch < 4:
    for images, labels in loader:  # after a load: the rest of that epoch
        loss = torch.nn.functional.cross_entropy(model(images), labels)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        step += 1
        if step % 20 == 0:
            checkpoint.save(step, **state)
        if step == killed and comm.rank == 1:
            os.kill(os.getpid(), signal.SIGKILL)

with torch.no_grad():
    guesses = model(torch.from_numpy(digits.test_images)).argmax(dim=1)
if comm.rank == 0:
    accuracy = (guesses.numpy() == digits.test_labels).mean()
    print(f"{comm.size} ranks: done at step {step}, accuracy {accuracy:.0%}")
