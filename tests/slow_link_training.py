"""How much of the communication is hidden behind a backward that leaves the cores free.

Each rank is on a node of its own; backward waits on a timer before each gradient.  Prints
(Tsync - Toverlap) / min(Tcommunication, Tbackward) in percent.
"""

import sys
import time

import numpy as np

import mpidist
from mpidist.nn import Module, Parameter
from mpidist.parallel import DDP

LAYERS, ELEMENTS, SECONDS, STEPS = 40, 25_000, 4e-3, 8
OVERLAPS = ("polls", "thread")


class Slow(Module):
    """Layers whose gradients take a given time, and no core."""

    def __init__(self, seconds):
        self.seconds = seconds
        self.weights = [Parameter(np.zeros(ELEMENTS, np.float32)) for _ in range(LAYERS)]
        self.gradient = np.ones(ELEMENTS, np.float32)

    def parameters(self):
        return self.weights

    def named_parameters(self):
        return [(str(k), p) for k, p in enumerate(self.weights)]

    def forward(self, x):
        return x

    def backward(self, grad):
        for p in reversed(self.weights):
            time.sleep(self.seconds)
            p.accumulate(self.gradient)
        return grad


def make(comm, overlap, seconds):
    """A function that makes one step, and gives its seconds on the slowest rank."""
    nbytes = 4 * ELEMENTS
    model = DDP(Slow(seconds), comm, nbytes, nbytes, overlap=overlap)

    def step():
        model.zero_grad()
        comm.barrier()
        began = time.perf_counter()
        model.backward(model.forward(1))
        model.sync_gradients()
        taken = time.perf_counter() - began
        assert len(model.buckets) == LAYERS
        assert (model.module.weights[3].grad == 1).all()
        return float(comm.allreduce(np.array([taken]), op="max")[0])

    return step


def main():
    comm = mpidist.init(timeout=30.0)
    assert comm.topology.num_nodes == comm.size == 2
    steps = {
        "communication": make(comm, "none", 0.0),
        "synchronous": make(comm, "none", SECONDS),
        **{overlap: make(comm, overlap, SECONDS) for overlap in OVERLAPS},
    }
    taken = [{name: step() for name, step in steps.items()} for _ in range(STEPS)]
    # In turns, and the least of each: other work on this machine disturbs all of them alike.
    least = {name: min(step[name] for step in taken[2:]) for name in steps}
    backward = least["synchronous"] - least["communication"]
    bound = min(least["communication"], backward)
    hidden = [f"{way} {100 * (least['synchronous'] - least[way]) / bound:.0f}" for way in OVERLAPS]
    if comm.rank == 0:
        communication = f"communication {1e3 * least['communication']:.1f} ms"
        print(
            f"{communication}, backward {1e3 * backward:.1f} ms; hidden in %: {', '.join(hidden)}"
        )


if __name__ == "__main__":
    sys.exit(main())
