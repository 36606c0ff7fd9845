"""A script for torchrun, with another backend's name: MODE; the ranks write what they found."""

import os
import sys
import time
from datetime import timedelta
from types import SimpleNamespace

import torch
import torch.distributed as dist

import mpidist.torch  # noqa: F401
from tests.support.failure_jobs import say, stay

mode = sys.argv[1]

local = int(os.environ["LOCAL_RANK"])  # before anything has started MPI
dist.init_process_group("mpidist")
rank, size = dist.get_rank(), dist.get_world_size()
assert (rank, size) == (int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"]))
if mode == "raise":
    dist.destroy_process_group()
    if rank == 1:
        stay([0], "late:")
        raise ZeroDivisionError("the rank that is to blame")
    try:
        dist.init_process_group("mpidist", timeout=timedelta(seconds=0.5))
    except dist.DistBackendError as late:
        say(SimpleNamespace(rank=rank), f"late: {late}")
    time.sleep(600)  # the other one ends the job, or its limit does
x = torch.tensor([2.0**rank])
dist.all_reduce(x)
say(SimpleNamespace(rank=rank), f"sum {x.item():g}")
if mode == "leave":  # without destroy_process_group, and something pending, a callback among it
    dist.all_reduce(x, async_op=True).get_future().then(lambda _: time.sleep(0.5))
    dist.irecv(torch.empty(10), (rank + 1) % size)
    sys.exit()
dist.destroy_process_group()
