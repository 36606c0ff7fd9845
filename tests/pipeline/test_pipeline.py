"""Pipelines: a step is that of the whole model, and what they refuse."""

from dataclasses import replace

import numpy as np
import pytest

import mpidist
from mpidist import run_simulated
from mpidist.errors import InvalidArgument, ScheduleError, Unsupported
from mpidist.nn import Linear
from mpidist.pipeline.schedules import B, F, as_schedule, find_schedule, schedules
from tests.support.pipeline_kits import KITS, Run, usable
from tests.support.rounds import rounds

ALL = [schedule.name for schedule in schedules()]


def serves(schedule, size, microbatches):
    return as_schedule(schedule).unsupported(size, microbatches) is None


THREE_CHUNKS = replace(find_schedule("interleaved"), name="three chunks", chunks=3)


def equals_unsplit(comm, kit, schedule, microbatches, rows, **options):
    """Twice: with the forms announced, and with receives posted ahead."""
    run = Run(comm, kit, schedule, microbatches, rows, **options)
    run.check(run.step())
    run.check(run.step(), steps=2)
    stats = run.pipe.stats()
    assert stats.peak_live == stats.predicted_live > 0
    run.pipe.close()


@pytest.mark.ranks(2, 3, 4)
@pytest.mark.mpi(min_size=2)
@pytest.mark.parametrize("kit", KITS)
@pytest.mark.parametrize("schedule", [*ALL, pytest.param(THREE_CHUNKS, id="three")])
def test_pipeline_equals_the_unsplit_model(comm, kit, schedule):
    for microbatches, rows in zip(range(1, 9), (1, 7, 11, 4, 24, 13, 16, 19)):
        if serves(schedule, comm.size, microbatches):
            equals_unsplit(comm, kit, schedule, microbatches, rows)


@pytest.mark.ranks(2)
@pytest.mark.mpi(min_size=2)
@pytest.mark.parametrize("kit", KITS)
@pytest.mark.parametrize("schedule", ("1f1b", "zb-h1", "interleaved", "zb-v"))
def test_checkpointed_pipeline_equals_the_unsplit_model(comm, kit, schedule):
    microbatches = 4 if serves(schedule, comm.size, 4) else comm.size
    equals_unsplit(comm, kit, schedule, microbatches, 11, checkpoint=True)


@pytest.mark.ranks(3)
@pytest.mark.mpi(min_size=2)
@pytest.mark.parametrize("kit", KITS)
@pytest.mark.parametrize("schedule", ("gpipe", "1f1b", "zb-v"))
def test_forward_and_backward_equal_the_unsplit_model(comm, kit, schedule):
    """forward(), then backward(), twice; a forward whose backward never comes leaves nothing."""
    run = Run(comm, kit, schedule, 4, 11)
    x = kit.tensor(run.x) if run.first else None
    run.pipe.forward(x)
    for steps in (1, 2):
        outputs = run.pipe.forward(x)
        assert len(outputs) == (4 if run.last else 0)
        run.pipe.backward(kit.gradient_of_outputs(outputs, run.labels) if run.last else None)
        run.check(steps=steps)
    run.pipe.close()


@pytest.mark.ranks(2, 4)
@pytest.mark.mpi(min_size=2)
@pytest.mark.parametrize("kit", KITS)
def test_user_schedule_runs_or_is_refused(comm, kit):
    """A generator function is a schedule at once; one that cannot run is refused, on all ranks."""

    def one_at_a_time(rank, size, microbatches):
        for microbatch in range(microbatches):
            yield F(microbatch)
            yield B(microbatch)

    def backwards(rank, size, microbatches):
        yield B(0)
        yield F(0)

    def endless(rank, size, microbatches):
        while True:
            yield F(0)

    def fails_on_rank_1(rank, size, microbatches):
        if comm.rank == 1:
            raise ArithmeticError("not here")
        yield from one_at_a_time(rank, size, microbatches)

    equals_unsplit(comm, kit, one_at_a_time, 3, 7)
    stage = kit.join(kit.layers())
    for wrong, message in (
        (backwards, "stage"),
        (endless, r"rank 0, stage 0, step 6: .*\b6 actions"),
        (fails_on_rank_1, "not here" if comm.rank == 1 else "fails on rank 1: .*not here"),
    ):
        with pytest.raises((ScheduleError, InvalidArgument, ArithmeticError), match=message):
            mpidist.Pipeline(stage, comm, 1, wrong)


@pytest.mark.ranks(2, 4)
@pytest.mark.mpi(min_size=2)
@pytest.mark.parametrize("kit", KITS)
def test_pipeline_wrong_arguments_are_refused(comm, kit):
    """By every rank, also where only one has the wrong argument: so none waits for the others.

    At the end a pipeline is made of the same communicator, and makes a step.
    """
    stage, make = kit.join(kit.layers()), mpidist.Pipeline
    for number in (0, -1, 2.0, True, None, np.int64(0)):
        with pytest.raises(InvalidArgument, match=f"rank {comm.rank}: .*num_microbatches.* > 0"):
            make(stage, comm, number)
    with pytest.raises(InvalidArgument, match="'1f1c'.*'1f1b'"):
        make(stage, comm, 2, "1f1c")
    with pytest.raises(InvalidArgument, match="comm=None: expected a communicator"):
        make(stage, None, 2)
    with pytest.raises(Unsupported, match="chunks=2"):
        make([stage, stage], comm, 2, "1f1b")
    with pytest.raises(InvalidArgument, match="checkpoint=1"):
        make(stage, comm, 2, checkpoint=1)
    with pytest.raises(InvalidArgument, match="rank 1 has .* where rank 0 has"):
        make(stage, comm, 2 + comm.rank, "gpipe")
    with pytest.raises(InvalidArgument, match="schedule='gpipe'"):
        make(stage, comm, 2, "gpipe" if comm.rank else "1f1b")
    for cap in (0, "2", [2] * (comm.size + 1)):
        with pytest.raises(InvalidArgument, match=f"rank {comm.rank}: Pipeline: max_live="):
            make(stage, comm, 2, "auto", max_live=cap)
    usable(make(stage, comm, 2), stage)


@pytest.mark.ranks(2, 4)
@pytest.mark.mpi(min_size=2)
@pytest.mark.parametrize("kit", KITS)
def test_pipeline_wrong_calls_are_refused(comm, kit):
    """Of a pipeline that is well; it stays so."""
    stage, make = kit.join(kit.layers()), mpidist.Pipeline
    pipe = make(stage, comm, np.int64(2))
    with pytest.raises(InvalidArgument, match=r"backward\(\).*forward\(\)"):
        pipe.backward()
    with pytest.raises(InvalidArgument, match=r"trace\('never\.json'\)"):
        pipe.trace("never.json")
    if comm.rank == 0:
        x = kit.tensor(np.ones((1, 6)))
        for given, message in (
            (None, "rank 0: x=None: "),
            (kit.tensor(np.ones(())), "rank 0: x .*dimensions"),
            (x, "rank 0: x has 1 rows .*num_microbatches=2"),
            ((x, kit.tensor(np.ones((3, 6)))), r"rank 0: x .*\[1, 3\] rows"),
            ("text", "rank 0: x .*no tensor"),
            ({1}, r"rank 0: x .*\bset\b"),
        ):
            with pytest.raises(InvalidArgument, match=message):
                pipe.step(given)
    usable(pipe, stage)


def test_pipeline_of_one_rank_is_refused(comm):
    alone = comm.split(comm.rank)
    with pytest.raises(InvalidArgument, match=r"\bsize 1: .*>= 2"):
        mpidist.Pipeline(Linear(1, 1), alone, 2)
    alone.free()


@pytest.mark.ranks(2, 4)
@pytest.mark.mpi(min_size=2)
@pytest.mark.parametrize("kit", KITS)
def test_pipeline_settings_that_differ_are_named(comm, kit):
    """What differs between ranks is named on all of them, before anything is measured."""
    first = comm.rank == 0
    unlike = (
        ("schedule='auto' where|has schedule='1f1b'", {"schedule": "auto" if first else "1f1b"}),
        ("max_live", {"schedule": "auto", "max_live": 8 if first else 2}),
        ("num_microbatches", {"num_microbatches": 2 if first else 4}),
        ("checkpoint", {"checkpoint": first}),
    )
    for told, given in unlike:
        stage = kit.linear(np.ones((4, 4)))
        with pytest.raises(InvalidArgument, match=told):
            mpidist.Pipeline(stage, comm, **{"num_microbatches": 2, **given})

    for name, value, told in (
        ("num_microbatches", 0, "rank 0: Pipeline: num_microbatches=0: .*> 0"),
        ("stage", 3, r"rank 0: chunk 0 .*\bint\b"),
        ("schedule", 3, "schedule"),
    ):
        given = {"num_microbatches": 2, "stage": kit.linear(np.ones((4, 4)))}
        told = told if first else f"Pipeline: .*rank 0: .*{told}"
        with pytest.raises(InvalidArgument, match=told):
            mpidist.Pipeline(comm=comm, **(given | {name: value} if first else given))


@pytest.mark.parametrize(
    ("schedule", "second"), (("1f1b", "allgather_object"), ("auto", "broadcast_object"))
)
def test_pipeline_is_made_in_two_rounds(schedule, second, monkeypatch):
    """What each rank can say by itself, then the plan."""
    with rounds(monkeypatch) as called:
        run_simulated(3, lambda comm: mpidist.Pipeline(Linear(3, 3), comm, 4, schedule).close())
    for rank in range(3):
        assert [name for r, name in called if r == rank] == ["allgather_object", second]
