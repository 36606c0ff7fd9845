"""A loop of Accelerate: mpidist run -n 2 examples/torch_accelerate.py"""

import time

import torch
import torch.distributed as dist
from accelerate import Accelerator

import mpidist.torch  # registers the backend

dist.init_process_group("mpidist")  # Accelerate uses the group that is there
# Without cpu=True each rank trains alone where there is no GPU.
accelerator = Accelerator(cpu=True)
torch.manual_seed(0)
model = torch.nn.Linear(4, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
x = torch.randn(64, 4)
loader = torch.utils.data.DataLoader(x, batch_size=32, shuffle=True)
model, optimizer, loader = accelerator.prepare(model, optimizer, loader)

begin = time.perf_counter()
for epoch in range(1, 51):
    for batch in loader:
        optimizer.zero_grad()
        loss = (model(batch) - batch.sum(1, keepdim=True)).square().mean()
        accelerator.backward(loss)
        optimizer.step()
    mean = accelerator.reduce(loss.detach(), "mean").item()
    if epoch % 10 == 0:
        accelerator.print(f"epoch {epoch}: loss {mean:.1e}")
seconds = time.perf_counter() - begin

ranks = accelerator.num_processes
accelerator.print(f"{ranks} ranks: loss {mean:.1e}, {seconds:.1f} s")
accelerator.end_training()
