"""Calls and a training whose arrays are on a device, compared with the same on the host."""

from __future__ import annotations

import inspect
import os

import numpy as np
import pytest

from mpidist import Pipeline
from mpidist.device.find import find_device, why_no_device
from mpidist.nn import SGD, Adam, Linear, ReLU, Sequential
from mpidist.parallel import DDP, ZeroOptimizer

# Files of tests on a real GPU are imported without one too: a wrong name in them is seen anywhere.
WHY_NO_GPU = why_no_device()
NEEDS_GPU = pytest.mark.skipif(WHY_NO_GPU is not None, reason=f"needs a GPU: {WHY_NO_GPU}")

if WHY_NO_GPU is None:
    import cupy
elif os.environ.get("MPIDIST_TEST_GPU") == "needed":  # by `make test-gpu`, which is to test one
    raise RuntimeError(f"no GPU can be used: {WHY_NO_GPU}")
else:
    cupy = None


def torch_for_gpu():
    """Return PyTorch; the test is skipped without it, or if it sees no GPU."""
    found = pytest.importorskip("torch", reason="needs PyTorch")
    if not found.cuda.is_available():
        pytest.skip(f"needs PyTorch for this GPU: {found.__version__} sees none")
    return found


class OnDevice:
    """A communicator whose calls have their arrays on the device.

    By it the cases for host memory are those for the device, too.  What is returned is the host's
    array exactly if the call returned the device's array that stands for it.
    """

    def __init__(self, comm, background=False):
        self.comm, self.rank, self.size, self.backend = comm, comm.rank, comm.size, comm.backend
        self.topology, self.background = comm.topology, background
        self.device = find_device()

    def __getattr__(self, name):
        method = getattr(self.comm, ("i" if self.background else "") + name)

        def call(*arguments, **options):
            bound = inspect.signature(method).bind(*arguments, **options)
            hosts = {k: bound.arguments.get(k) for k in ("x", "out")}
            hosts = {k: np.asarray(v) for k, v in hosts.items() if v is not None}
            there = self._bring(hosts)
            bound.arguments.update(there)
            result = method(*bound.args, **bound.kwargs)
            if self.background:
                result = result.wait()
            for k, mine in hosts.items():
                mine[...] = there[k].get()
            if result is None:
                return None
            same = [hosts[k] for k in ("out", "x") if there.get(k) is result]
            return same[0] if same else result.get()

        return call

    def _bring(self, hosts):
        """Make device arrays that share memory as those of the host do."""
        if not hosts:
            return {}
        longest = max(hosts.values(), key=lambda a: a.size)
        whole = self.device.array(longest)
        there = {}
        for k, mine in hosts.items():
            if mine is longest:
                there[k] = whole
            elif np.may_share_memory(mine, longest):
                start = (address(mine) - address(longest)) // longest.itemsize
                there[k] = whole[start : start + mine.size]
            else:
                there[k] = self.device.array(mine)
        return there


def address(x):
    return x.__array_interface__["data"][0]


STEPS, ROWS = 5, 4
SIZES = (6, 9, 7, 3)
BUCKETS = {"bucket_bytes": 300, "first_bucket_bytes": 100}


def net(place=np.asarray, seed=3):
    """Layers on the host or, with `place`, where that puts their arrays."""
    random = np.random.default_rng(seed)
    layers = []
    for a, b in zip(SIZES, SIZES[1:]):
        layers += [Linear(a, b, seed=random, dtype=np.float64), ReLU()]
    made = Sequential(*layers[:-1])
    for p in made.parameters():
        p.data = place(p.data)
    return made


def batch(step, rows):
    """Inputs and wanted outputs, of whole numbers that float64 adds without loss."""
    random = np.random.default_rng(step)
    return random.normal(size=(rows, SIZES[0])), random.normal(size=(rows, SIZES[-1]))


def optimizer(how, parameters):
    if "adam" in how:
        return Adam(parameters, learning_rate=0.01)
    return SGD(parameters, learning_rate=0.05, momentum=0.9)


def train(comm, how, place=None):
    """Train on this rank's rows; give the parameters as the host sees them, and the DDP."""
    place = place or find_device().array
    model = net(place, seed=3 + comm.rank)  # they begin with rank 0's
    ddp = DDP(model, comm, overlap="polls" if how == "polls" else "auto", **BUCKETS)
    if "zero" in how:
        kind, options = SGD, {"learning_rate": 0.05, "momentum": 0.9}
        if "adam" in how:
            kind, options = Adam, {"learning_rate": 0.01}
        optimize = ZeroOptimizer(kind, ddp, **options)
    else:
        optimize = optimizer(how, ddp.parameters())
    for step in range(STEPS):
        x, wanted = (half[comm.rank :: comm.size] for half in batch(step, ROWS * comm.size))
        parts = 2 if how == "accumulate" else 1
        for k in range(parts):
            inputs, goals = place(x[k::parts].copy()), place(wanted[k::parts].copy())
            if k < parts - 1:
                with ddp.no_sync():
                    ddp.backward((ddp(inputs) - goals) * (2 / ROWS))
            else:
                ddp.backward((ddp(inputs) - goals) * (2 / ROWS))
        ddp.sync_gradients()
        norm = (optimize if "zero" in how else ddp).clip_gradients(1.5)
        assert norm > 0
        optimize.step()
        optimize.zero_grad()
    return [p.data.get() for p in model.parameters()], ddp


def train_alone(size, how):
    """Train on all rows on the host."""
    model = net()
    optimize = optimizer(how, model.parameters())
    for step in range(STEPS):
        x, wanted = batch(step, ROWS * size)
        model.backward((model(x) - wanted) * (2 / ROWS / size))
        norm = np.sqrt(sum((p.grad**2).sum() for p in model.parameters()))
        for p in model.parameters():
            p.grad *= min(1.0, 1.5 / norm)
        optimize.step()
        optimize.zero_grad()
    return [p.data for p in model.parameters()]


def squares(output, wanted, reduction="mean"):
    """The loss, and its gradient with respect to the output."""
    off = output - wanted
    return (off * off).sum() * (1 / off.size), off * (2 / off.size)


def train_pipeline(comm, schedule, checkpoint=False, place=None):
    """Train in stages on a device, one of them without parameters; give the stage's arrays."""
    place = place or find_device().array
    layers = net(place).layers
    cuts = [len(layers) * r // comm.size for r in range(comm.size + 1)]
    stage = Sequential(*layers[cuts[comm.rank] : cuts[comm.rank + 1]])
    pipe = Pipeline(stage, comm, 3, schedule, checkpoint=checkpoint)
    first, last = comm.rank == 0, comm.rank == comm.size - 1
    optimize, losses = optimizer("sgd", stage.parameters()), []
    for step in range(STEPS):
        x, wanted = batch(step, 7)
        target = place(wanted) if last else None
        losses.append(pipe.step(place(x) if first else None, target, squares if last else None))
        optimize.step()
        optimize.zero_grad()
    output = pipe.forward(place(batch(0, 7)[0]) if first else None)
    pipe.close()
    return losses, [p.data for p in stage.parameters()], output


def compare_pipeline(comm, schedule, checkpoint, place=None):
    """The same losses, parameters and outputs as on the host; bit for bit if numpy computes."""
    near = 1e-9 if place else 0
    losses, arrays, output = train_pipeline(comm, schedule, checkpoint, place)
    expected = train_pipeline(comm, schedule, checkpoint, np.array)
    assert len(set(losses)) == STEPS
    np.testing.assert_allclose(losses, expected[0], rtol=near)
    for mine, there in zip((*arrays, *(output or ())), (*expected[1], *(expected[2] or ()))):
        np.testing.assert_allclose(mine.get(), there, rtol=near, atol=near)


def compare_replicas(comm, arrays):
    """All ranks have the same bits."""
    for array in arrays:
        mine = np.ascontiguousarray(array).reshape(-1).view(np.uint8)
        every = comm.allgather(mine[None])
        assert (every == every[0]).all()
