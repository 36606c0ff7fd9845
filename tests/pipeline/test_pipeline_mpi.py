"""Pipelines under mpiexec: the times of a step, and what simulated ranks share."""

import time
from functools import cache

import numpy as np
import pytest

import mpidist
from mpidist.errors import InvalidArgument
from mpidist.nn import Module
from mpidist.pipeline.schedules import Costs, as_schedule, pipeline_schedule, schedules, simulate
from mpidist.pipeline.schedules.schedule import unregister_schedule
from tests.support.pipeline_kits import mean
from tests.support.training_kits import needs_torch, torch


@pytest.mark.mpi(min_size=2)
def test_schedule_that_only_some_ranks_know_is_refused(comm):
    """An error everywhere, and nobody waits for those who do not know it."""
    if comm.rank == 0:
        pipeline_schedule("of rank 0")(as_schedule("1f1b").function)
    told = "(rank 1[, 0-9]*: UnknownName: |^)unknown pipeline schedule"
    with pytest.raises(InvalidArgument, match=told):
        mpidist.Pipeline(Waiting(), comm, 2, "of rank 0")
    unregister_schedule("of rank 0")


class Waiting(Module):
    """Takes a fixed time and no core, so that 4 stages fit on 2 cores."""

    saved = ()
    seconds = 0.02

    def wait(self, times=1):
        time.sleep(times * self.seconds)

    def forward(self, x):
        self.wait()
        return x

    def backward(self, grad):
        self.wait(2)
        return grad

    def backward_input(self, grad):
        self.wait()
        return grad

    def backward_weight(self):
        self.wait()


@cache
def measured(comm, schedule, microbatches=4):
    """The shortest of a few steps of waiting stages, measured, with the same one predicted.

    On a busy machine a step takes longer; one that is near what is predicted ends the series.
    """
    known, second = as_schedule(schedule), Waiting.seconds
    stages = [Waiting() for _ in range(known.chunks)]
    pipe = mpidist.Pipeline(stages, comm, microbatches, schedule)
    predicted = simulate(schedule, comm.size, microbatches, costs=Costs(second, second, second))
    x, best = np.ones((microbatches, 4)), None
    pipe.step(x, x, no_loss)
    for _ in range(5):
        pipe.step(x, x, no_loss)
        trace, stats = pipe.trace("/dev/null"), pipe.stats()
        assert trace.peak == predicted.peak and stats.peak_live == predicted.peak[comm.rank]
        if best is None or trace.measured.makespan < best.makespan:
            best = trace.measured
        if best.makespan < 1.02 * predicted.makespan:
            break
    pipe.close()
    return best, predicted


@mean
def no_loss(y, target):
    return 0.0, y


@pytest.mark.long
@pytest.mark.parametrize("schedule", [schedule.name for schedule in schedules()])
def test_measured_is_predicted(comm, schedule):
    """The bubble within 5 percentage points, the order of actions and the peaks exactly."""
    if comm.size != 4:
        pytest.skip("needs exactly 4 ranks")
    found, predicted = measured(comm, schedule)
    assert abs(found.bubble - predicted.bubble) < 0.05
    actions = [[[span.action for span in part] for part in it.spans] for it in (found, predicted)]
    assert actions[0] == actions[1]


@pytest.mark.long
def test_zero_bubble_is_shorter(comm):
    """By 2 (p - 1) W: the bubbles are (p - 1)(F + I + W) and (p - 1)(F + I - W)."""
    if comm.size != 4:
        pytest.skip("needs exactly 4 ranks")
    longer, shorter = (measured(comm, name) for name in ("1f1b", "zb-h1"))
    saved = 2 * (comm.size - 1) * Waiting.seconds
    assert longer[1].makespan - shorter[1].makespan == pytest.approx(saved)
    found = longer[0].makespan - shorter[0].makespan
    assert abs(found - saved) < 0.05 * longer[1].makespan


@needs_torch
@pytest.mark.mpi(min_size=2)
@pytest.mark.parametrize("schedule", ["1f1b", "zb-h1"])
def test_module_with_a_forward_of_its_own_equals_one_rank(comm, schedule):
    """Skips over stages, a mask, tied weights and batch norm: as on one rank."""
    if comm.size > 4:
        pytest.skip("needs at most 4 ranks")
    from tests.support.traced_models import loss_fn, make

    rank, last = comm.rank, comm.size - 1
    alone, (model, ids, mask, labels) = make()[0], make()
    parts = mpidist.partition(model, last + 1, example=(ids[:3], mask[:3]), verbose=False)
    pipe = mpidist.Pipeline(parts[rank], comm, 4, schedule)
    for _ in range(2):
        loss = pipe.step((ids, mask), labels, loss_fn if rank == last else None)
        expected = 0.0
        for k in range(0, 12, 3):
            part = loss_fn(alone(ids[k : k + 3], mask[k : k + 3]), labels[k : k + 3]) / 4
            part.backward()
            expected += part.item()
        assert abs(loss - expected) < 1e-12
    own = dict(alone.named_parameters(remove_duplicate=False))
    for name, p in parts[rank].named_parameters():
        torch.testing.assert_close(p.grad, own[name].grad, rtol=0, atol=1e-12)
    for name, x in parts[rank].named_buffers():
        torch.testing.assert_close(x, alone.get_buffer(name), rtol=0, atol=1e-12)
    pipe.close()
