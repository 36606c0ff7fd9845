"""PyTorch's own wrapper over MPI: mpidist run -n 2 examples/torch_backend.py"""

import time

import torch
import torch.distributed as dist

import mpidist.torch  # registers the backend; MPI is not started yet

dist.init_process_group("mpidist")  # rank and size from MPI; no MASTER_ADDR
torch.manual_seed(dist.get_rank())  # other data on each rank
model = torch.nn.Linear(4, 1)
# All ranks start with the weights of rank 0.
model = torch.nn.parallel.DistributedDataParallel(model)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
x = torch.randn(64, 4)

begin = time.perf_counter()
for epoch in range(1, 51):
    optimizer.zero_grad()
    loss = (model(x) - x.sum(1, keepdim=True)).square().mean()
    loss.backward()
    optimizer.step()
    if epoch % 10 == 0:
        mean = loss.detach()
        dist.all_reduce(mean, dist.ReduceOp.AVG)
        if dist.get_rank() == 0:
            print(f"epoch {epoch}: loss {mean:.1e}")
seconds = time.perf_counter() - begin

if dist.get_rank() == 0:
    ranks = dist.get_world_size()
    print(f"{ranks} ranks: loss {mean:.1e}, {seconds:.1f} s")
dist.destroy_process_group()
