"""Two stages of PyTorch, each on two ranks: mpirun -n 4 python examples/pipeline_torch.py"""

import torch

import mpidist as md

comm = md.init()
grid = md.Grid(comm, pipe=2)  # two stages; the other ranks hold replicas of them
torch.set_num_threads(1)  # the ranks share the cores
torch.manual_seed(0)

embedding = torch.nn.Embedding(12, 32)
if grid.pipe_index == 0:
    stage = torch.nn.Sequential(embedding, torch.nn.Linear(32, 32), torch.nn.Tanh())
else:
    head = torch.nn.Linear(32, 12, bias=False)
    stage = torch.nn.Sequential(torch.nn.Linear(32, 32), torch.nn.Tanh(), head)
shared = embedding.weight if grid.pipe_index == 0 else head.weight

model = md.DDP(stage, grid.data)  # the replicas average their gradients
pipe = md.Pipeline(model, grid.pipe, num_microbatches=4, schedule="1f1b", tied={"words": shared})
optimizer = torch.optim.Adam(stage.parameters(), lr=0.01)

words = torch.arange(grid.data_index, 48, grid.shape[0]) % 12  # each replica trains on its own rows
for _ in range(150):
    loss = pipe.step(words, (words + 1) % 12, torch.nn.functional.cross_entropy)
    optimizer.step()
    model.zero_grad()

same = grid.pipe.allgather_object(shared.detach().sum().item())
if comm.rank == 0:
    print(f"{grid}: the loss is below 0.1: {loss < 0.1}")
    print(f"the tied weights are equal: {len(set(same)) == 1}")
