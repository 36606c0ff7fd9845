"""PyTorch's own DistributedDataParallel over MPI: mpidist run -n 2 examples/torch_backend.py"""

import torch
import torch.distributed as dist

import mpidist.torch  # noqa: F401  registers the backend; MPI is not started yet

dist.init_process_group("mpidist")  # rank and size from MPI; no MASTER_ADDR, no port
torch.manual_seed(dist.get_rank())  # other data on each rank; the weights are those of rank 0
model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(4, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
x = torch.randn(64, 4)

for _ in range(50):
    optimizer.zero_grad()
    loss = (model(x) - x.sum(1, keepdim=True)).square().mean()
    loss.backward()
    optimizer.step()

loss = loss.detach()
dist.all_reduce(loss, dist.ReduceOp.AVG)
if dist.get_rank() == 0:
    print(f"{dist.get_world_size()} ranks: loss below 0.01: {bool(loss < 0.01)}")
dist.destroy_process_group()
