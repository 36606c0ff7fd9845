"""What all ranks learn of a step: promises that were not kept, and the counts of halves."""

import sys

import numpy as np
import pytest

import mpidist
from mpidist.backends.null import NullBackend
from mpidist.bench.pipelines import no_loss
from mpidist.errors import CommunicatorBroken, InvalidArgument, RankFailed, ScheduleError
from mpidist.nn import Identity, Linear, Sequential
from tests.support.pipeline_kits import COUNT, ROWS, WIDTH, Keeping, plain_squares


def promise_nothing(pipe):
    """Have the plan of a pipeline promise that no activation is ever alive."""
    plan = pipe._executor.plan
    pipe._executor.plan = type(plan)(plan.name, plan.placement, plan.steps, (0, 0))


def test_exceeded_peak_raises_on_all_ranks():
    """More activations alive than the plan says, on one rank."""

    def job(comm):
        pipe = mpidist.Pipeline(Keeping(), comm, COUNT, "gpipe")
        x = np.ones((ROWS, WIDTH))
        if comm.rank == 1:
            promise_nothing(pipe)
        told = r"\b4 .*\b0 after .*\bmost 0, and 0, .*\bgpipe\b"
        kind = ScheduleError if comm.rank == 1 else RankFailed
        with pytest.raises(kind, match=f"rank 1.*{told}"):
            pipe.step(x, x, plain_squares)
        with pytest.raises(CommunicatorBroken, match="pipeline step"):
            pipe.step(x, x, plain_squares)
        comm.barrier()

    mpidist.run_simulated(2, job)


def test_missing_gradient_raises_on_all_ranks():
    """DDP finds it after the last action; ranks of other stages would wait in the next step."""

    class Idle(Linear):
        saved = ("_input",)

        def forward(self, x):
            self._input = x
            return x

        def backward(self, grad):
            return grad

    def job(comm):
        grid = mpidist.Grid(comm, data=2)
        layer = Linear(WIDTH, WIDTH, dtype=np.float64)
        if grid.pipe_index == 0:
            layer = Sequential(layer, Idle(WIDTH, WIDTH, dtype=np.float64))
        model = mpidist.DDP(layer, grid.data, unused="error")
        pipe, x = mpidist.Pipeline(model, grid.pipe, COUNT), np.ones((ROWS, WIDTH))
        kind, told = InvalidArgument, "1.weight"
        if grid.pipe_index == 1:
            kind, told = (
                RankFailed,
                r"rank 0 .*InvalidArgument.*\b1\.weight",
            )
        with pytest.raises(kind, match=told):
            pipe.step(x, x, plain_squares)
        with pytest.raises(CommunicatorBroken, match="pipeline step"):
            pipe.step(x, x, plain_squares)

    mpidist.run_simulated(4, job)


def test_halves_are_counted_as_a_step_is(tmp_path):
    """Times, peaks and the trace of forward() and backward(), whatever was between and after."""

    def job(comm):
        pipe = mpidist.Pipeline(Keeping(), comm, COUNT, "gpipe")
        x = np.ones((ROWS, WIDTH))
        outputs = pipe.forward(x)
        with pytest.raises(InvalidArgument, match=r"trace\('.*run\.json'\)"):
            pipe.trace(tmp_path / "run.json")
        assert pipe.stats().steps == 0
        pipe.backward(np.concatenate(outputs) if outputs else None)
        stats, trace = pipe.stats(), pipe.trace(tmp_path / "run.json")
        assert stats.steps == 1 and stats.seconds >= stats.span >= stats.busy > 0
        assert stats.bubble == pytest.approx(1 - stats.busy / stats.span)
        assert stats.peak_live == stats.predicted_live == COUNT
        assert all(len(part) == 2 * COUNT for part in trace.measured.spans)
        pipe.forward(x)
        again = pipe.stats()
        assert (again.peak_live, again.steps) == (stats.peak_live, 1)
        assert pipe.trace(tmp_path / "run.json").measured.spans == trace.measured.spans

    mpidist.run_simulated(2, job)


def test_abandoned_forward_is_not_counted():
    """What a forward() without its backward() has saved is freed before the next step."""

    def job(comm):
        pipe = mpidist.Pipeline(Keeping(), comm, COUNT, "1f1b")
        x = np.ones((ROWS, WIDTH))
        pipe.forward(x)
        pipe.step(x, x, plain_squares)
        stats = pipe.stats()
        assert stats.peak_live == stats.predicted_live == min(comm.size - comm.rank, COUNT)

    mpidist.run_simulated(2, job)


def test_first_error_is_reported():
    """Of the rank that has it, not the echo on a lower one."""

    def job(comm):
        pipe = mpidist.Pipeline(Keeping(), comm, COUNT, "gpipe")
        x = np.ones((ROWS, WIDTH))
        if comm.rank == 1:
            promise_nothing(pipe)
        pipe.step(x, x, plain_squares)

    with pytest.raises(ScheduleError, match="^rank 1: "):
        mpidist.run_simulated(2, job)


MOST_CALLS = 110  # 60 µs of Python: 67 calls are usual, with split backward 81


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b", "zb-h1"])
def test_the_engine_does_little(schedule):
    """Calls of Python functions for each microbatch and stage: no clock, which load would slow."""
    pipe = mpidist.Pipeline(Identity(), mpidist.Communicator(NullBackend(2)), 8, schedule)
    x, calls = np.ones((8, 16)), 0

    def count(frame, event, argument):
        nonlocal calls
        calls += event == "call"

    for _ in range(3):  # the messages' headers are sent in the first steps only
        pipe.step(x, x, no_loss)
    before = sys.getprofile()
    sys.setprofile(count)
    try:
        pipe.step(x, x, no_loss)
    finally:
        sys.setprofile(before)
    pipe.close()
    assert 0 < calls / 8 <= MOST_CALLS


class Failing(Identity):
    saved = ()

    def forward(self, x):
        raise ArithmeticError("this stage cannot")


def test_stage_that_raises_breaks_the_pipeline():
    """It is that error which is reported; the others hear of it, and the pipeline stays broken."""

    def job(comm):
        pipe = mpidist.Pipeline(Failing() if comm.rank == 1 else Identity(), comm, 2)
        try:
            pipe.step(np.ones((2, 2)), np.ones((2, 2)), no_loss)
        except (ArithmeticError, RankFailed) as error:
            with pytest.raises(mpidist.CommunicatorBroken, match="pipeline step"):
                pipe.step(np.ones((2, 2)))
            raise error

    with pytest.raises(ArithmeticError, match="rank 1: this stage cannot"):
        mpidist.run_simulated(3, job)
