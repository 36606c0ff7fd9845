"""Two stages, each on two ranks: mpidist run -n 4 examples/pipeline_torch.py"""

import time

import torch

import mpidist as md

comm = md.init()
grid = md.Grid(comm, pipe=2)  # two stages; the other ranks hold their replicas
torch.set_num_threads(1)  # the ranks share the cores
torch.manual_seed(0)

embedding = torch.nn.Embedding(12, 32)
body, head = torch.nn.Linear(32, 32), torch.nn.Linear(32, 12, bias=False)
if grid.pipe_index == 0:
    stage = torch.nn.Sequential(embedding, body, torch.nn.Tanh())
    shared = embedding.weight
else:
    stage = torch.nn.Sequential(body, torch.nn.Tanh(), head)
    shared = head.weight

model = md.DDP(stage, grid.data)  # the replicas average their gradients
pipe = md.Pipeline(model, grid.pipe, num_microbatches=4, tied={"words": shared})
optimizer = torch.optim.Adam(stage.parameters(), lr=0.01)

# Each replica trains on its own rows: the next word is the number plus 1.
words = torch.arange(grid.data_index, 48, grid.shape[0]) % 12
begin = time.perf_counter()
for epoch in range(1, 61):
    loss = pipe.step(words, (words + 1) % 12, torch.nn.functional.cross_entropy)
    optimizer.step()
    model.zero_grad()
    if comm.rank == 0 and epoch % 20 == 0:
        print(f"epoch {epoch}: loss {loss:.4f}")
seconds = time.perf_counter() - begin

sums = grid.pipe.allgather_object(shared.detach().sum().item())
if comm.rank == 0:
    print(f"{grid}: loss {loss:.4f}, {seconds:.1f} s")
    print(f"the tied weights differ by {max(sums) - min(sums):g}")
