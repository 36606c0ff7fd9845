"""Handwritten digits with PyTorch on all ranks: mpirun -n 4 python examples/digits_torch.py"""

import torch
from torch.utils.data import DataLoader, TensorDataset

import mpidist as md
from mpidist.demo.digits import load_digits

comm = md.init()
torch.set_num_threads(1)  # the ranks share the cores
digits = load_digits("float32")
data = TensorDataset(torch.from_numpy(digits.train_images), torch.from_numpy(digits.train_labels))
loader = md.shard(DataLoader(data, batch_size=16, shuffle=True), comm, seed=1)

net = torch.nn.Sequential(torch.nn.Linear(64, 128), torch.nn.ReLU(), torch.nn.Linear(128, 10))
model = md.DDP(net, comm)  # all ranks start with the weights of rank 0
optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
for _ in range(5):
    for images, labels in loader:
        # backward() ends with the averaging of the gradients over the ranks.
        torch.nn.functional.cross_entropy(model(images), labels).backward()
        optimizer.step()
        optimizer.zero_grad()

with torch.no_grad():
    guesses = model(torch.from_numpy(digits.test_images)).argmax(dim=1).numpy()
if comm.rank == 0:
    right = (guesses == digits.test_labels).mean()
    print(f"{comm.size} ranks: more than 90 % of the digits right: {right > 0.90}")
