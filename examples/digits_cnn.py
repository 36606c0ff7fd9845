"""A convolutional network, its optimizer sharded over the ranks.

mpidist run -n 4 examples/digits_cnn.py
"""

import time

import torch
from torch.utils.data import DataLoader, TensorDataset

import mpidist as md
from mpidist.demo.digits import load_digits

comm = md.init()
torch.set_num_threads(1)  # the ranks share the cores
digits = load_digits("float32")
pictures = torch.from_numpy(digits.train_images).view(-1, 1, 8, 8)
data = TensorDataset(pictures, torch.from_numpy(digits.train_labels))
loader = DataLoader(data, batch_size=16, shuffle=True)
loader = md.shard(loader, comm, seed=1)

net = torch.nn.Sequential(
    torch.nn.Conv2d(1, 16, 3, padding=1),
    torch.nn.BatchNorm2d(16),
    torch.nn.ReLU(),
    torch.nn.MaxPool2d(2),
    torch.nn.Flatten(),
    torch.nn.Linear(256, 10),
)
model = md.DDP(net, comm, buffers="average")  # BatchNorm's running statistics
optimizer = md.ZeroOptimizer(torch.optim.Adam, model, lr=3e-3)
begin = time.perf_counter()
for epoch in range(1, 4):
    losses = []
    for images, labels in loader:
        loss = torch.nn.functional.cross_entropy(model(images), labels)
        loss.backward()
        optimizer.clip_gradients(5.0)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.detach())
    loss = comm.allreduce(torch.stack(losses).mean(), op="mean")
    if comm.rank == 0:
        print(f"epoch {epoch}: loss {loss:.3f}")
seconds = time.perf_counter() - begin

model.eval()
with torch.no_grad():
    pictures = torch.from_numpy(digits.test_images).view(-1, 1, 8, 8)
    guesses = model(pictures).argmax(dim=1)
if comm.rank == 0:
    accuracy = (guesses.numpy() == digits.test_labels).mean()
    print(f"{comm.size} ranks: accuracy {accuracy:.1%}, {seconds:.1f} s")
