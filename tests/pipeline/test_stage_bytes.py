"""The bytes that microbatches keep, in closed forms for stacks of linear layers."""

import weakref

import numpy as np
import pytest

import mpidist
from mpidist.nn import Linear, ReLU, Sequential
from mpidist.pipeline.stage import Recomputing, Sizes, stage_of
from tests.support.training_kits import NEEDS_TORCH, torch

ROWS, COUNT, WIDE, NARROW = 2, 5, 6, 4
ENTRY, MIDDLE, OUT = (ROWS * width * 8 for width in (NARROW, WIDE, NARROW))


def stage(kind):
    """4 → 6 → 4 numbers a row."""
    if kind == "torch":
        net = torch.nn
        made = net.Sequential(net.Linear(NARROW, WIDE), net.Tanh(), net.Linear(WIDE, NARROW))
        return made.double()
    return Sequential(
        Linear(NARROW, WIDE, dtype=np.float64), ReLU(), Linear(WIDE, NARROW, dtype=np.float64)
    )


def squares(kind):
    if kind == "torch":
        return lambda y, t: ((y - t) ** 2).sum(dim=1).mean()
    return lambda y, t: (float(((y - t) ** 2).sum(axis=1).mean()), 2 * (y - t) / len(y))


def sizes(kind, last, first):
    """What a microbatch keeps after F, and after I.

    After F: what came from the rank before (the user's own batch does not count), the input of the
    second layer, for ReLU which were positive, and for the loss the differences or its gradient.
    After I: the gradients of the outputs of both layers as well.
    """
    entry, loss = (0 if first else ENTRY), (OUT if last else 0)
    if kind == "torch":  # with nothing to send upstream, I leaves all to W, and the gradient
        forward = entry + MIDDLE + loss
        return forward, forward + (0 if first and last else OUT if first else MIDDLE + OUT)
    forward = entry + MIDDLE + ROWS * WIDE + loss
    return forward, forward - loss + MIDDLE + OUT


def predicted(actions, forward, halfway, kept):
    """The most bytes over a rank's actions; with `kept` < forward, B and I compute it again."""
    held, most = {}, 0
    for action in actions:
        key = action.microbatch
        if action.kind == "F":
            held[key] = kept
        elif action.kind == "W":
            del held[key]
        else:
            held[key] = forward
            most = max(most, sum(held.values()))
            if action.kind == "B":
                del held[key]
            else:
                held[key] = halfway
        most = max(most, sum(held.values()))
    return most


KINDS = [
    "plain",
    pytest.param("torch", marks=pytest.mark.skipif(torch is None, reason=NEEDS_TORCH)),
]


class Whole:
    """A stage whose backward is not in halves."""

    def __init__(self):
        self.inner = stage("plain")
        self.modules, self.parameters = self.inner.modules, self.inner.parameters
        self.forward, self.backward = self.inner.forward, self.inner.backward


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("checkpoint", (False, True))
@pytest.mark.parametrize("schedule", ("gpipe", "1f1b", "zb-h1", "zb-h1 in whole"))
def test_closed_forms(kind, checkpoint, schedule, monkeypatch):
    schedule, _, whole = schedule.partition(" ")
    if whole and kind == "torch":
        monkeypatch.setattr("mpidist.torch.stage.can_halve", lambda: False)

    def job(comm):
        held = Whole() if whole and kind == "plain" else stage(kind)
        pipe = mpidist.Pipeline(held, comm, COUNT, schedule, checkpoint=checkpoint)
        x = np.random.default_rng(0).normal(size=(COUNT * ROWS, NARROW))
        x = torch.from_numpy(x) if kind == "torch" else x
        for _ in range(3):
            pipe.step(x, x, squares(kind))
        actions = [step.action for step in pipe._runner.plan.steps[comm.rank]]
        first, last = comm.rank == 0, comm.rank == comm.size - 1
        forward, halfway = sizes(kind, last, first)
        halfway = 0 if whole else halfway
        assert pipe.stats().splits == (not whole,)
        kept = (0 if first else ENTRY) if checkpoint else forward
        live = pipe._runner._executor.live
        assert (live.count, live.nbytes) == (0, 0)
        return pipe.stats().peak_bytes, predicted(actions, forward, halfway, kept)

    for found, expected in mpidist.run_simulated(3, job):
        assert found == expected


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("checkpoint", (False, True))
def test_nothing_is_kept_for_a_half_that_has_nothing_to_do(kind, checkpoint, monkeypatch):
    """I of a stage that cannot be split leaves no memory for W, in numbers and indeed."""
    if kind == "torch":
        monkeypatch.setattr("mpidist.torch.stage.can_halve", lambda: False)
    worker = stage_of(stage(kind) if kind == "torch" else Whole(), "")
    worker = Recomputing(worker) if checkpoint else worker
    x = worker.tensors.tensor(np.ones(ENTRY // 8), ("float64", (ROWS, NARROW), True))
    output, saved = worker.forward(x, "tensor", [x], True)
    worker.finish(saved, "tensor", [output])
    assert worker.nbytes(saved) >= ENTRY
    form = "float64", (ROWS, NARROW), False
    there, grad = weakref.ref(x), worker.tensors.tensor(np.ones(OUT // 8), form)
    del x, output
    worker.backward_input(saved, [grad])
    assert worker.nbytes(saved) == 0 and there() is None
    worker.backward_weight(saved)


@pytest.mark.skipif(torch is None, reason=NEEDS_TORCH)
def test_a_measured_microbatch_is_freed():
    """What is noted of a graph keeps none of it alive, and double backward still works."""
    import gc

    from mpidist.torch.stage import stage as make

    net = torch.nn.Sequential(torch.nn.Linear(3, 3), torch.nn.Tanh())
    worker, x = make(net, net, ""), torch.randn(2, 3)
    gc.collect()
    gc.disable()
    try:
        output, saved = worker.forward(x, None, [], True)
        worker.finish(saved, "tensor", [output])
        assert worker.nbytes(saved) == output.nbytes
        noted = saved.noted._saved
        assert [memory() is None for memory in noted].count(False) >= 1
        del output, saved
        assert all(memory() is None for memory in noted)
    finally:
        gc.enable()
    outputs = [worker.forward(x, None, [], True)[0] for _ in range(2)]
    worker._sizes = Sizes()
    outputs.append(worker.forward(x, None, [], True)[0])
    found = []
    for output in outputs:
        grad = torch.autograd.grad(output.sum(), net[0].weight, create_graph=True)[0]
        found.append(torch.autograd.grad((grad**2).sum(), net[0].weight)[0])
    assert torch.equal(found[0], found[2])


def test_sizes_do_not_fill_the_memory():
    sizes = Sizes()
    for key in range(3 * Sizes.LIMIT):
        assert sizes.of(key) is sizes.of(key)
        assert len(sizes) <= Sizes.LIMIT
