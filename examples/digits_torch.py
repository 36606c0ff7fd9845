"""Handwritten digits with PyTorch: mpidist run -n 4 examples/digits_torch.py"""

import time

import torch
from torch.utils.data import DataLoader, TensorDataset

import mpidist as md
from mpidist.demo.digits import load_digits

comm = md.init()
torch.set_num_threads(1)  # the ranks share the cores
digits = load_digits("float32")
images, labels = digits.train_images, digits.train_labels
data = TensorDataset(torch.from_numpy(images), torch.from_numpy(labels))
loader = DataLoader(data, batch_size=16, shuffle=True)
loader = md.shard(loader, comm, seed=1)  # each rank its part of every epoch

net = torch.nn.Sequential(
    torch.nn.Linear(64, 128), torch.nn.ReLU(), torch.nn.Linear(128, 10)
)
model = md.DDP(net, comm)  # all ranks start with the weights of rank 0
optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
begin = time.perf_counter()
for epoch in range(1, 6):
    losses = []
    for images, labels in loader:
        loss = torch.nn.functional.cross_entropy(model(images), labels)
        loss.backward()  # ends with the averaging of the gradients
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.detach())
    loss = comm.allreduce(torch.stack(losses).mean(), op="mean")
    if comm.rank == 0:
        print(f"epoch {epoch}: loss {loss:.3f}")
seconds = time.perf_counter() - begin

with torch.no_grad():
    guesses = model(torch.from_numpy(digits.test_images)).argmax(dim=1)
if comm.rank == 0:
    accuracy = (guesses.numpy() == digits.test_labels).mean()
    print(f"{comm.size} ranks: accuracy {accuracy:.1%}, {seconds:.1f} s")
