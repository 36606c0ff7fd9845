"""What pipelines do and which arguments they refuse, on any communicator: called on every rank."""

from __future__ import annotations

import numpy as np
import pytest

import mpidist
from mpidist.errors import InvalidArgument, ScheduleError, Unsupported
from mpidist.nn import Linear, Module
from mpidist.pipeline.schedules import B, F, as_schedule, schedules
from tests.support.pipeline_kits import chunks_of, data

ALL = [schedule.name for schedule in schedules()]
TOLERANCE = 1e-12


def serves(schedule, size, microbatches):
    return as_schedule(schedule).unsupported(size, microbatches) is None


class Run:
    """A pipeline over the blocks of a kit, and what the whole model gives."""

    def __init__(self, comm, kit, schedule, microbatches, rows, **options):
        self.comm, self.kit = comm, kit
        self.x, self.labels = data(rows)
        placement = as_schedule(schedule).place(comm.size)
        self.layers = kit.layers()
        self.ranges = chunks_of(self.layers, placement, comm.rank)
        self.chunks = [kit.join(self.layers[a:b]) for a, b in self.ranges]
        self.first = placement.owner(0)[0] == comm.rank
        self.last = placement.owner(placement.stages - 1)[0] == comm.rank
        stage = self.chunks if len(self.chunks) > 1 else self.chunks[0]
        self.pipe = mpidist.Pipeline(stage, comm, microbatches, schedule, **options)

    def step(self, x=None, labels=None):
        x, labels = self.x if x is None else x, self.labels if labels is None else labels
        return self.pipe.step(
            self.kit.tensor(x) if self.first else None,
            self.kit.tensor(labels) if self.last else None,
            self.kit.loss() if self.last else None,
        )

    def forget(self):
        for chunk in self.chunks:
            for p in chunk.parameters():
                p.grad = None

    def check(self, loss=None, steps=1):
        """Loss and every gradient are those of the unsplit model."""
        layers = self.kit.layers()
        expected, _ = self.kit.unsplit(self.kit.join(layers), self.x, self.labels)
        if loss is not None:
            assert abs(loss - expected) < TOLERANCE
        for (a, b), chunk in zip(self.ranges, self.chunks):
            whole = self.kit.gradients(self.kit.join(layers[a:b]))
            found = self.kit.gradients(chunk)
            assert len(found) == len(whole)
            for one, other in zip(found, whole):
                assert np.abs(one - steps * other).max() < TOLERANCE


def equals_unsplit(comm, kit, schedule, microbatches, rows, **options):
    """Twice: with the forms announced, and with receives posted ahead."""
    run = Run(comm, kit, schedule, microbatches, rows, **options)
    run.check(run.step())
    run.check(run.step(), steps=2)
    stats = run.pipe.stats()
    assert stats.peak_live == stats.predicted_live > 0
    run.pipe.close()


def halves_equal_unsplit(comm, kit, schedule, microbatches, rows):
    """forward(), then backward(), twice; a forward whose backward never comes leaves nothing."""
    run = Run(comm, kit, schedule, microbatches, rows)
    x = kit.tensor(run.x) if run.first else None
    run.pipe.forward(x)
    for steps in (1, 2):
        outputs = run.pipe.forward(x)
        assert len(outputs) == (microbatches if run.last else 0)
        run.pipe.backward(kit.gradient_of_outputs(outputs, run.labels) if run.last else None)
        run.check(steps=steps)
    run.pipe.close()


def forms_may_change(comm, kit):
    """Other batch sizes are announced, once for each microbatch and edge; the old ones too."""
    run, told = Run(comm, kit, "1f1b", 3, 11), []
    for rows in (11, 11, 7, 7, 11):
        run.x, run.labels = data(rows)
        run.forget()
        run.check(run.step())
        told.append(run.pipe.stats().announced)
    edges = (comm.rank < comm.size - 1) + (comm.rank > 0)
    changes = np.diff([0, *told]) / (3 * edges)
    assert changes.tolist() == [1, 0, 1, 0, 1]


def user_schedule(comm, kit):
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


def live_is_what_1f1b_promises(comm, kit):
    for microbatches in (1, 2, 8):
        run = Run(comm, kit, "1f1b", microbatches, 16)
        run.step()
        stats = run.pipe.stats()
        assert stats.peak_live == min(comm.size - comm.rank, microbatches)
        with pytest.raises(InvalidArgument, match=r"rank 0: trace\('/none/a\.json'\)"):
            run.pipe.trace("/none/a.json")
        run.pipe.close()


def a_small_communicator_is_refused(comm):
    alone = comm.split(comm.rank)
    with pytest.raises(InvalidArgument, match=r"\bsize 1: .*>= 2"):
        mpidist.Pipeline(Linear(1, 1), alone, 2)
    alone.free()


def tied_parameters(comm, kit):
    """The same weights at both ends: as if one parameter were used twice.

    With zb-v one rank has both ends.
    """
    for schedule in ("1f1b", "zb-v"):
        TiedRun(comm, kit, schedule).check()


def tied_replicas(comm, kit, schedule):
    """Gradients go into their mean over the replicas and into the sum over the stages."""
    grid = mpidist.Grid(comm, data=2)
    TiedRun(grid.pipe, kit, schedule, grid.data).check()


class TiedRun:
    """4 → 4 in every stage, the first and the last with the same weights."""

    def __init__(self, comm, kit, schedule, data=None):
        self.kit, random = kit, np.random.default_rng(1)
        self.x, self.target = random.normal(size=(2, 10, 4))
        self.ends = random.normal(size=(4, 4))
        placement = as_schedule(schedule).place(comm.size)
        self.stages = placement.stages
        mine = [placement.stage(comm.rank, chunk) for chunk in range(placement.chunks)]
        # Values that differ at first: those of the first stage are taken over.
        layers = [kit.linear(np.full((4, 4), 0.25) if s else self.ends) for s in mine]
        self.tied = [m.weight for s, m in zip(mine, layers) if s in (0, self.stages - 1)]
        rows = slice(0, 10)
        if data is not None:
            layers = [mpidist.DDP(layer, data) for layer in layers]
            rows = (slice(0, 4), slice(4, 10))[data.rank]
        self.given = kit.tensor(self.x[rows]), kit.tensor(self.target[rows]), kit.squares
        tied = {"ends": self.tied if len(self.tied) > 1 else self.tied[0]} if self.tied else None
        self.pipe = mpidist.Pipeline(layers, comm, 3, schedule, tied=tied)

    def check(self):
        expected, whole = self.unsplit()
        for steps in (1, 2):
            assert abs(self.pipe.step(*self.given) - expected) < TOLERANCE
            for p in self.tied:
                assert np.abs(self.kit.array(p.data) - self.ends).max() == 0
                assert np.abs(self.kit.array(p.grad) - steps * whole).max() < TOLERANCE
        self.pipe.close()

    def unsplit(self):
        values = [self.ends, *[np.full((4, 4), 0.25)] * (self.stages - 2), self.ends]
        y, inputs = self.x, []
        for value in values:
            inputs.append(y)
            y = y @ value.T
        loss = ((y - self.target) ** 2).sum(axis=1).mean()
        grad, whole = 2 * (y - self.target) / len(y), np.zeros((4, 4))
        for k in reversed(range(len(values))):
            if k in (0, len(values) - 1):
                whole += grad.T @ inputs[k]
            grad = grad @ values[k]
        return loss, whole


def replicas(comm, kit, schedule):
    """Grid(data=2): each replica has its rows, unequally many; gradients are those of all rows."""
    grid = mpidist.Grid(comm, data=2)
    x, labels = data(18)
    mine = slice(0, 11) if grid.data_index == 0 else slice(11, 18)
    placement = as_schedule(schedule).place(grid.pipe.size)
    layers = kit.layers(seed=grid.data_index)  # the first replica's are taken over
    ranges = chunks_of(layers, placement, grid.pipe.rank)
    models = [mpidist.DDP(kit.join(layers[a:b]), grid.data) for a, b in ranges]
    pipe = mpidist.Pipeline(models if len(models) > 1 else models[0], grid.pipe, 3, schedule)
    whole = kit.layers()
    expected, _ = kit.unsplit(kit.join(whole), x, labels)
    for _ in range(20):  # DDP tries ways of overlapping meanwhile
        for model in models:
            model.zero_grad()
        loss = pipe.step(kit.tensor(x[mine]), kit.tensor(labels[mine]), kit.loss())
        assert abs(loss - expected) < TOLERANCE
        for (a, b), model in zip(ranges, models):
            for one, other in zip(kit.gradients(model), kit.gradients(kit.join(whole[a:b]))):
                assert np.abs(one - other).max() < TOLERANCE
    pipe.close()


def values_of_many_kinds(comm, kit):
    """Tuples, dicts, whole numbers, None and plain values between stages; keyword arguments."""
    random = np.random.default_rng(5)
    x, steps = random.normal(size=(7, 4)), random.integers(0, 3, 7)
    target = random.normal(size=(7, 4))
    stage = kit.mixed(comm.rank, comm.size)
    pipe = mpidist.Pipeline(stage, comm, 3, "zb-h1")
    for _ in range(2):
        stage.weight.grad = None
        loss = pipe.step((kit.tensor(x), kit.tensor(steps)), kit.tensor(target), kit.squares)
        # Each stage multiplies by its weight; the last adds what went beside, and the steps.
        factor = np.prod([2.0 + r for r in range(comm.size)])
        out = x * factor + (x * 2.0 + steps[:, None])
        expected = ((out - target) ** 2).sum(axis=1).mean()
        assert abs(loss - expected) < 1e-9 * abs(expected)
        back = 2 * (out - target) / 7
        own = (back * x * factor).sum() / (2.0 + comm.rank)
        if comm.rank == 0:
            own += (back * x).sum()
        assert abs(float(kit.array(stage.weight.grad)) - own) < 1e-9 * abs(own)
    pipe.close()


def measured_schedule(comm, kit):
    """schedule="auto": right before and after the schedule was computed, and within the cap."""
    for cap in (2, None):
        run = Run(comm, kit, "1f1b", 6, 12)
        run.pipe.close()
        run.pipe = mpidist.Pipeline(run.chunks[0], comm, 6, "auto", max_live=cap)
        for _ in range(6):
            run.forget()
            run.check(run.step())
            stats = run.pipe.stats()
            assert stats.peak_live == stats.predicted_live <= (cap or comm.size)
        assert stats.costs is not None and min(stats.costs.F) > 0
        run.pipe.close()
    run = Run(comm, kit, "zb-v", 6, 12)
    run.pipe.close()
    run.pipe = mpidist.Pipeline(run.chunks, comm, 6, "auto", placement="v")
    for _ in range(6):
        run.forget()
        run.check(run.step())
    run.pipe.close()
    with pytest.raises(InvalidArgument, match="placement='v' with schedule='1f1b'"):
        mpidist.Pipeline(run.chunks[0], comm, 2, "1f1b", placement="v")
    with pytest.raises(InvalidArgument, match="max_live=2 .*schedule='auto'"):
        mpidist.Pipeline(run.chunks[0], comm, 2, "1f1b", max_live=2)


def wrong_arguments(comm, kit):
    """Alike on all ranks, or agreed on: the communicator stays usable."""
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
    with pytest.raises(InvalidArgument, match="schedule 'gpipe'"):
        make(stage, comm, 2, "gpipe" if comm.rank else "1f1b")
    for cap in (0, "2", [2] * (comm.size + 1)):
        with pytest.raises(InvalidArgument, match=f"rank {comm.rank}: Pipeline: max_live="):
            make(stage, comm, 2, "auto", max_live=cap)
    usable(make(stage, comm, 2), stage)


def wrong_stages(comm, kit):
    """What is no stage, on all ranks or on one."""
    stage, make = kit.join(kit.layers()), mpidist.Pipeline
    with pytest.raises(InvalidArgument, match=r"chunk 0 .*\bint\b.*forward\(\)"):
        make(3, comm, 2)
    with pytest.raises(InvalidArgument, match=rf"rank {comm.rank}: Pipeline: stage=\[\]: "):
        make([], comm, 2)
    for given, told in (
        (None, "is None: "),
        ([stage, None], r"\[1\] is None: "),
        (type(stage), r"is the class Sequential\b"),
        (Module(), r"is a Module\b.*forward\(\)"),
        (mpidist.partition(stage, 2, verbose=False), r"is a Partition, .*parts\[comm.rank\]"),
    ):
        with pytest.raises(InvalidArgument, match=f"rank 1: Pipeline: stage ?{told}"):
            make(given if comm.rank == 1 else stage, comm, 2)
    usable(make(stage, comm, 2), stage)


def wrong_ties(comm, kit):
    """What is no parameter, or not tied by one name on several ranks."""
    stage, make = kit.join(kit.layers()), mpidist.Pipeline
    with pytest.raises(InvalidArgument, match="tied: 'w' .*rank 0: "):
        make(stage, comm, 2, tied={"w": next(iter(stage.parameters()))} if comm.rank == 0 else None)
    weight = next(iter(stage.parameters()))
    for given, message in (
        (3, "rank 0: Pipeline: tied=3: "),
        ({"w": 3}, r"rank 0: Pipeline: tied\['w'\] .*\bint\b"),
        ({3: stage}, r"rank 0: Pipeline: tied .*\b3: "),
        ({"w": []}, r"rank 0: Pipeline: tied\['w'\] is \[\]: "),
        ({"w": [weight, weight]}, r"tied: 'w' .*float64\[.*\] on rank 0: "),
        ({"w": weight, "v": weight}, "rank 0: Pipeline: tied .*'w'.*'v'"),
        ({"w": Unreadable()}, r"rank 0: .*tied\['w'\] .*RuntimeError: not yet"),
    ):
        with pytest.raises(InvalidArgument, match=message):
            make(stage, comm, 2, tied=given if comm.rank == 0 else None)
    usable(make(stage, comm, 2), stage)


def wrong_calls(comm, kit):
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


def usable(pipe, stage):
    """All ranks can still agree on something; `pipe` is closed."""
    assert pipe.num_microbatches == 2 and pipe.schedule == "1f1b" and pipe.module is stage
    pipe.close()


class Unreadable:
    """A parameter that has no values, as those of PyTorch's lazy modules."""

    grad = None

    @property
    def data(self):
        raise RuntimeError("not yet")


def unlike_arguments(comm, kit):
    """What differs between ranks is named on all of them, before anything is measured."""
    first = comm.rank == 0
    unlike = (
        ("schedule 'auto' where|has schedule '1f1b'", {"schedule": "auto" if first else "1f1b"}),
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


CASES = (
    forms_may_change,
    user_schedule,
    measured_schedule,
    live_is_what_1f1b_promises,
    wrong_arguments,
    wrong_stages,
    wrong_ties,
    wrong_calls,
    unlike_arguments,
    tied_parameters,
    values_of_many_kinds,
)
