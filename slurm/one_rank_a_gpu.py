"""Training with one rank per GPU, or on the host: mpidist run -n 2 slurm/one_rank_a_gpu.py"""

import importlib.util
import os
import socket

import numpy as np

import mpidist as md
from mpidist.demo import train
from mpidist.demo.digits import load_digits

EPOCHS = 5
comm = md.init()


def find_device():
    """Return the device of this rank, by its local rank, or None and the reason."""
    granted = f"SLURM grants {os.environ.get('SLURM_GPUS_ON_NODE', 'no')} GPU(s)"
    if importlib.util.find_spec("torch") is None:
        return None, f"{granted}, but PyTorch is not installed"
    import torch

    if not torch.cuda.is_available():
        return None, f"{granted}, but no device answers"
    return torch.device("cuda", comm.topology.local_rank % torch.cuda.device_count()), ""


def train_on(device):
    """Train on the device, averaging gradients in host memory; return the accuracy."""
    import torch

    digits = load_digits("float32")
    images, labels = torch.from_numpy(digits.train_images), torch.from_numpy(digits.train_labels)
    torch.manual_seed(0)  # the same weights on every rank
    net = torch.nn.Sequential(torch.nn.Linear(64, 128), torch.nn.ReLU(), torch.nn.Linear(128, 10))
    net.to(device)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)
    staged = comm.empty(sum(p.numel() for p in net.parameters()), "float32")
    samples = md.shard(range(len(labels)), comm, shuffle=True, seed=1)
    for _ in range(EPOCHS):
        mine = list(samples)
        for start in range(0, len(mine), 16):
            part = mine[start : start + 16]
            scores = net(images[part].to(device))
            torch.nn.functional.cross_entropy(scores, labels[part].to(device)).backward()
            flat = torch.nn.utils.parameters_to_vector([p.grad for p in net.parameters()])
            staged[:] = flat.cpu().numpy()
            comm.allreduce(staged, op="mean", out=staged)
            flat.copy_(torch.from_numpy(np.asarray(staged)))
            torch.nn.utils.vector_to_parameters(flat, [p.grad for p in net.parameters()])
            optimizer.step()
            optimizer.zero_grad()
    with torch.no_grad():
        guesses = net(torch.from_numpy(digits.test_images).to(device)).argmax(dim=1).cpu().numpy()
    return float((guesses == digits.test_labels).mean())


device, why = find_device()
every = comm.allgather_object((socket.gethostname(), str(device or "host"), why))
if comm.rank == 0:
    for rank, (host, place, reason) in enumerate(every):
        print(f"rank {rank} on {host}: {place}{reason and f' ({reason})'}", flush=True)
if any(place == "host" for _, place, _ in every):  # then on all: a mix is as slow
    accuracy, place = train(comm, epochs=EPOCHS, reference=False).accuracy, "host"
else:
    accuracy, place = train_on(device), "devices, gradients staged through host memory"
if comm.rank == 0:
    print(f"{comm.size} ranks on the {place}: more than 85 % right: {accuracy > 0.85}")
