"""Arguments of pipelines that are refused; each case is called with a communicator of all."""

import numpy as np
import pytest

import mpidist
from mpidist.errors import InvalidArgument, Unsupported
from mpidist.nn import Module


def wrong_arguments(comm, kit):
    """Alike on all ranks, or agreed on: the communicator stays usable."""
    stage, make = kit.join(kit.layers()), mpidist.Pipeline
    for number in (0, -1, 2.0, True, None, np.int64(0)):
        with pytest.raises(InvalidArgument, match=f"rank {comm.rank}: .*num_microbatches.* > 0"):
            make(stage, comm, number)
    with pytest.raises(InvalidArgument, match="unknown pipeline schedule '1f1c'.*1f1b"):
        make(stage, comm, 2, "1f1c")
    with pytest.raises(InvalidArgument, match="comm=None: allowed are communicators"):
        make(stage, None, 2)
    with pytest.raises(Unsupported, match="chunks=2"):
        make([stage, stage], comm, 2, "1f1b")
    with pytest.raises(InvalidArgument, match="checkpoint=1"):
        make(stage, comm, 2, checkpoint=1)
    with pytest.raises(InvalidArgument, match="rank 1 has .* where rank 0 has"):
        make(stage, comm, 2 + comm.rank, "gpipe")
    with pytest.raises(InvalidArgument, match="schedule 'gpipe'.*they must be the same"):
        make(stage, comm, 2, "gpipe" if comm.rank else "1f1b")
    for cap in (0, "2", [2] * (comm.size + 1)):
        with pytest.raises(InvalidArgument, match=f"rank {comm.rank}: Pipeline: max_live="):
            make(stage, comm, 2, "auto", max_live=cap)
    usable(make(stage, comm, 2), stage)


def wrong_stages(comm, kit):
    """What is no stage, on all ranks or on one."""
    stage, make = kit.join(kit.layers()), mpidist.Pipeline
    with pytest.raises(InvalidArgument, match=r"chunk 0 is of int and has no forward\(\)"):
        make(3, comm, 2)
    with pytest.raises(InvalidArgument, match=rf"rank {comm.rank}: Pipeline: stage=\[\]: allowed"):
        make([], comm, 2)
    for given, told in (
        (None, "is None: allowed are a module of PyTorch or mpidist.nn, an object with forward"),
        ([stage, None], r"\[1\] is None: allowed are a module"),
        (type(stage), r"is the class Sequential, not an object as Sequential\(…\): allowed"),
        (Module(), r"is a Module, without a forward\(\): allowed are a module"),
        (mpidist.partition(stage, 2, verbose=False), r"is a Partition, .*parts\[comm.rank\]"),
    ):
        with pytest.raises(InvalidArgument, match=f"rank 1: Pipeline: stage ?{told}"):
            make(given if comm.rank == 1 else stage, comm, 2)
    usable(make(stage, comm, 2), stage)


def wrong_ties(comm, kit):
    """What is no parameter, or not tied by one name on several ranks."""
    stage, make = kit.join(kit.layers()), mpidist.Pipeline
    with pytest.raises(InvalidArgument, match="'w' is rank 0: .*names that several ranks give"):
        make(stage, comm, 2, tied={"w": next(iter(stage.parameters()))} if comm.rank == 0 else None)
    weight = next(iter(stage.parameters()))
    for given, message in (
        (3, "rank 0: Pipeline: tied=3: allowed are mappings of names to parameters"),
        ({"w": 3}, r"rank 0: Pipeline: tied\['w'\] is a int: allowed are parameters"),
        ({3: stage}, "rank 0: Pipeline: tied has the name 3: allowed are strings"),
        ({"w": []}, r"rank 0: Pipeline: tied\['w'\] is \[\]: allowed is at least one"),
        (
            {"w": [weight, weight]},
            r"tied: 'w' is rank 0: float64\[.*\]: allowed are names that sev",
        ),
        ({"w": weight, "v": weight}, "rank 0: .* same parameter as 'w' and as 'v': allowed is one"),
        ({"w": Unreadable()}, r"rank 0: .*tied\['w'\] cannot be read: RuntimeError: not yet"),
    ):
        with pytest.raises(InvalidArgument, match=message):
            make(stage, comm, 2, tied=given if comm.rank == 0 else None)
    usable(make(stage, comm, 2), stage)


def wrong_calls(comm, kit):
    """Of a pipeline that is well; it stays so."""
    stage, make = kit.join(kit.layers()), mpidist.Pipeline
    pipe = make(stage, comm, np.int64(2))
    with pytest.raises(InvalidArgument, match=r"backward\(\) without a forward\(\)"):
        pipe.backward()
    with pytest.raises(InvalidArgument, match="before the first step"):
        pipe.trace("never.json")
    if comm.rank == 0:
        x = kit.tensor(np.ones((1, 6)))
        for given, message in (
            (None, "rank 0: x=None: rank 0 must provide the input"),
            (kit.tensor(np.ones(())), "without dimensions"),
            (x, "1 rows for num_microbatches=2: allowed are at least as many"),
            ((x, kit.tensor(np.ones((3, 6)))), r"tensors of \[1, 3\] rows"),
            ("text", "no tensor in it"),
            ({1}, "has a set in it"),
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
        ("num_microbatches", 0, "rank 0: Pipeline: num_microbatches must be > 0"),
        ("stage", 3, "rank 0: chunk 0 is of int"),
        ("schedule", 3, "schedule"),
    ):
        given = {"num_microbatches": 2, "stage": kit.linear(np.ones((4, 4)))}
        told = told if first else f"Pipeline: an argument fails on rank 0: .*{told}"
        with pytest.raises(InvalidArgument, match=told):
            mpidist.Pipeline(comm=comm, **(given | {name: value} if first else given))
