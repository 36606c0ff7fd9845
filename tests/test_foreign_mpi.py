"""Forged checkpoints under MPI: all ranks load the same, or all of them raise CheckpointError."""

import os
import random
import shutil
import tempfile
from pathlib import Path

import numpy as np
import pytest

from mpidist import Checkpoint
from mpidist.errors import CheckpointError
from tests.support.forged_files import forge_checkpoint

FORGED = 500 if os.environ.get("MPIDIST_TEST_PROFILE") == "stress" else 40


@pytest.mark.parametrize("where", ("first rank", "last rank", "all ranks"))
def test_forged_checkpoints_end_alike_on_every_rank(comm, where):
    """The folder of one rank alone is forged, as on another node; or all ranks read one folder."""
    top = Path(comm.broadcast_object(tempfile.mkdtemp() if comm.rank == 0 else None))
    good, secret = top / "good", top / "secret"
    secret.write_bytes(b"x" * 100)
    name = Checkpoint(good, comm).save(7, w=np.arange(5000.0)).name
    draw, ended = random.Random(where), []
    forging = comm.size - 1 if where == "last rank" else 0
    for number in range(FORGED):
        mine = top / f"{number}.{0 if where == 'all ranks' else comm.rank}"
        if where != "all ranks" or comm.rank == 0:
            shutil.copytree(good, mine)
        if comm.rank == forging:
            forge_checkpoint(mine / name, draw, secret)
        comm.barrier()
        try:
            found = repr(Checkpoint(mine, comm).load())
        except CheckpointError:
            found = "refused"
        alike = comm.allgather_object(found)
        assert len(set(alike)) == 1, (number, alike)
        ended.append(found == "refused")
    # The last rank reads few of its files: rank 0 reads the manifest for all.
    assert sum(ended) < FORGED and (where == "last rank" or sum(ended) > 0)
    comm.barrier()
    if comm.rank == 0:
        shutil.rmtree(top)
