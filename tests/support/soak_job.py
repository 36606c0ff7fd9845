"""A job that goes on from its last checkpoint: soak_job.py FOLDER SECONDS VICTIM SEED.

Collectives, messages, groups, memory and checkpoints by chance; every result is checked.  SECONDS
after its first checkpoint rank VICTIM is killed, wherever it is.  With VICTIM -1 the job ends by
itself, and what it holds must not have grown since its first quarter.
"""

import gc
import os
import random
import signal
import sys
import threading
import time

import numpy as np

import mpidist
from mpidist import Checkpoint

LONGEST = 30_000
ROUND = 20  # steps between two checkpoints
GROWTH = 8 << 20  # bytes: allocators and MPI libraries take 1 to 4 MB before they take no more


def held():
    """Return the bytes, descriptors and threads of this process."""
    gc.collect()
    with open("/proc/self/statm", encoding="ascii") as file:
        pages = int(file.read().split()[1])
    return pages * 4096, len(os.listdir("/proc/self/fd")), len(os.listdir("/proc/self/task"))


def collective(comm, n, draw):
    name = draw.choice(("auto", "ring", "native", "linear"))
    assert (comm.allreduce(np.full(n, comm.rank), algorithm=name) == sum(range(comm.size))).all()
    root = draw.randrange(comm.size)
    assert (comm.broadcast(np.full(n, comm.rank), root=root) == root).all()
    assert (comm.allgather(np.full(n, comm.rank)) == np.repeat(np.arange(comm.size), n)).all()


def objects(comm, n, _):
    assert comm.allgather_object("x" * n + str(comm.rank))[-1][n:] == str(comm.size - 1)


def background(comm, n, _):
    for work in [comm.iallreduce(np.full(n, k)) for k in range(4)]:
        assert work.wait()[0] % comm.size == 0


def messages(comm, n, _):
    before, there = (comm.rank - 1) % comm.size, np.empty(n, int)
    request = comm.irecv(there, before)
    comm.isend(np.full(n, comm.rank), (comm.rank + 1) % comm.size).wait()
    request.wait()
    assert (there == before).all()


def groups(comm, n, _):
    group = comm.split(comm.rank % 2)
    assert (group.allreduce(np.ones(n)) == group.size).all()
    group.free()


def memory(comm, n, _):
    x = comm.empty(n)
    x[:] = 1
    assert (comm.allreduce(x, out=x) == comm.size).all()
    comm.free(x)


ACTS = (collective, collective, objects, background, messages, groups, memory)


def main(folder, seconds, victim, seed):
    comm = mpidist.init(timeout=60)
    checkpoint = Checkpoint(folder, comm, keep=2)
    found = checkpoint.load() or {"step": 0, "w": np.zeros(LONGEST, int)}
    first = step = found["step"]
    w, unit = found["w"], np.arange(LONGEST)
    assert (w == step * unit).all()
    for act in ACTS:  # the longest once, so that buffers have their size
        act(comm, LONGEST, random.Random(0))
    begun, early, share = time.monotonic(), None, 0.0
    while int(victim) >= 0 or share < 1 or step < first + 8 * ROUND:
        draw = random.Random(f"{seed} {step}")
        draw.choice(ACTS)(comm, draw.randrange(1, LONGEST), draw)
        w, step = w + unit, step + 1
        if step % ROUND == 0:
            checkpoint.save(step, w=w)
            if step == first + ROUND and comm.rank == int(victim):
                threading.Timer(float(seconds), os.kill, (os.getpid(), signal.SIGKILL)).start()
            passed = (time.monotonic() - begun) / float(seconds)
            share = comm.broadcast(np.array([passed]))[0]
            if early is None and share > 0.25 and step > first + 2 * ROUND:
                early = held()
    late = held()
    grown = [b - a for a, b in zip(early, late)]
    print(f"steps {first} to {step}; bytes, files, threads: {early} to {late}", flush=True)
    assert grown[0] <= GROWTH and grown[1:] == [0, 0], f"rank {comm.rank} has grown by {grown}"


main(*sys.argv[1:])
