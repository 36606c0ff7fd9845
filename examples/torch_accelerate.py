"""A loop of Accelerate over MPI: mpidist run -n 2 examples/torch_accelerate.py"""

import torch
import torch.distributed as dist
from accelerate import Accelerator

import mpidist.torch  # noqa: F401  registers the backend

dist.init_process_group("mpidist")  # Accelerate uses the group that is there
accelerator = Accelerator(cpu=True)  # without cpu=True each rank trains alone where there is no GPU
torch.manual_seed(0)
model = torch.nn.Linear(4, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
x = torch.randn(64, 4)
loader = torch.utils.data.DataLoader(x, batch_size=32, shuffle=True)
model, optimizer, loader = accelerator.prepare(model, optimizer, loader)

for _ in range(50):
    for batch in loader:
        optimizer.zero_grad()
        loss = (model(batch) - batch.sum(1, keepdim=True)).square().mean()
        accelerator.backward(loss)
        optimizer.step()

loss = accelerator.reduce(loss.detach(), "mean").item()
accelerator.print(f"{accelerator.num_processes} ranks: loss below 0.01: {loss < 0.01}")
accelerator.end_training()
