"""What pipelines do, on any communicator: each case is called on every rank with one."""

import numpy as np
from pipeline_kits import chunks_of, data

import mpidist
from mpidist.pipeline import as_schedule, schedules

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
