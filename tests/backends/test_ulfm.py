"""What Open MPI needs to outlive losses: in a job that loses two ranks at certain moments."""

import sys

import pytest

from tests.support import processes
from tests.support.jobs import ROOT, tolerant

PROGRAM = """
import os, select, sys, time
from pathlib import Path
import numpy as np
from mpi4py import MPI
from mpidist.backends import ulfm

comm, folder = MPI.COMM_WORLD, Path(sys.argv[1])
known = folder / "known"
comm.Set_errhandler(MPI.ERRORS_RETURN)
rank, pids = comm.Get_rank(), comm.allgather(os.getpid())
ends = {r: os.pidfd_open(pid) for r, pid in enumerate(pids) if r != rank}

def hear_of(lost):
    select.select([ends[lost]], [], [])
    ulfm.report([lost])
    while lost not in ulfm.dead_ranks(comm):
        MPI.COMM_SELF.Iprobe()

comm.Barrier()
if rank == 0:
    os.kill(os.getpid(), 9)
hear_of(0)
if rank == 4:
    while not known.exists():
        time.sleep(1e-4)
    time.sleep(2e-3)  # rank 5 has asked rank 1 by then
begun = time.monotonic()
flags = np.ones(1, np.intc)
request = comm.Iagree(flags)
told = False
while not told and time.monotonic() < begun + 10:
    try:
        told = request.Test()
    except MPI.Exception:  # that rank 2 is dead
        told = True
    if rank == 2 and time.monotonic() > begun + 0.3:
        os.kill(os.getpid(), 9)
    if rank == 5 and not known.exists() and select.select([ends[2]], [], [], 0)[0]:
        hear_of(2)
        known.touch()
print(f"rank {rank} was told: {told}", flush=True)
(folder / f"told {rank}").touch()
while len(list(folder.glob("told *"))) < 4:  # the others may ask this one
    MPI.COMM_SELF.Iprobe()
os._exit(0)
"""


@pytest.mark.skipif(not tolerant(), reason="needs Open MPI")
def test_agreement_reaches_a_rank_whose_parent_died(tmp_path):
    """Also from a rank that has decided before it heard of the death."""
    # In the binary tree of six ranks without rank 0, rank 1 is the root, and rank 2 between it and
    # rank 5.  Rank 2 dies when it has given what it and rank 5 say; rank 4 alone is missing then.
    script = tmp_path / "job.py"
    script.write_text(PROGRAM)
    command = [sys.executable, "-m", "mpidist", "run", "-q", "-n", "6", "--survive"]
    command += [str(script), str(tmp_path)]
    finished = processes.run(command, 60, processes.environment(PYTHONPATH=str(ROOT)))
    for rank in (1, 3, 4, 5):
        assert f"rank {rank} was told: True" in finished.output, finished.output
