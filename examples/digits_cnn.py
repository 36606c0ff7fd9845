"""A small convolutional network with PyTorch; the optimizer's state is sharded over the ranks.

mpirun -n 4 python examples/digits_cnn.py
"""

import torch
from torch.utils.data import DataLoader, TensorDataset

import mpidist as md
from mpidist.demo.digits import load_digits

comm = md.init()
torch.set_num_threads(1)  # the ranks share the cores
digits = load_digits("float32")
pictures = torch.from_numpy(digits.train_images).view(-1, 1, 8, 8)
data = TensorDataset(pictures, torch.from_numpy(digits.train_labels))
loader = md.shard(DataLoader(data, batch_size=16, shuffle=True), comm, seed=1)

net = torch.nn.Sequential(
    torch.nn.Conv2d(1, 16, 3, padding=1),
    torch.nn.BatchNorm2d(16),
    torch.nn.ReLU(),
    torch.nn.MaxPool2d(2),
    torch.nn.Flatten(),
    torch.nn.Linear(256, 10),
)
model = md.DDP(net, comm, buffers="average")  # averages BatchNorm's running statistics
optimizer = md.ZeroOptimizer(torch.optim.Adam, model, lr=3e-3)
for _ in range(3):
    for images, labels in loader:
        torch.nn.functional.cross_entropy(model(images), labels).backward()
        optimizer.clip_gradients(5.0)
        optimizer.step()
        optimizer.zero_grad()

model.eval()
with torch.no_grad():
    guesses = model(torch.from_numpy(digits.test_images).view(-1, 1, 8, 8)).argmax(dim=1)
if comm.rank == 0:
    right = (guesses.numpy() == digits.test_labels).mean()
    print(f"{comm.size} ranks: more than 90 % of the digits right: {right > 0.90}")
