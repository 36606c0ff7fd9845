"""States that call collectives: on simulated ranks it would be a deadlock, which is seen first."""

import time

import numpy as np
import pytest

from mpidist import Checkpoint
from mpidist.errors import CheckpointError
from tests.support.training_kits import Faulty


@pytest.mark.mpi(min_size=2)
@pytest.mark.parametrize("where", ("save", "load"))
@pytest.mark.parametrize("meets", ("raises before", "calls one more"))
def test_state_that_calls_collectives_on_some_ranks_is_an_error(comm, folder, meets, where):
    """The collective meets one of the checkpoint, which all ranks repeat to tell the error."""
    last = comm.rank == comm.size - 1

    def act():
        if last and meets == "raises before":
            raise RuntimeError("early")
        if last or meets == "raises before":
            comm.allreduce(np.ones(50_000))

    checkpoint = Checkpoint(folder, comm)
    checkpoint.save(0, model=Faulty("", None))
    model, begun = Faulty(where, act), time.monotonic()
    words = "RuntimeError: early" if meets == "raises before" else "CollectiveMismatch"
    with pytest.raises(CheckpointError, match=words):
        checkpoint.save(1, model=model) if where == "save" else checkpoint.load(model=model)
    assert time.monotonic() - begun < 10
    assert comm.allreduce(1) == comm.size
