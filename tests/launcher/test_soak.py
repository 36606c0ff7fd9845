"""Jobs that are killed and go on from their checkpoints: right, and nothing grows or stays.

A few seconds for each MPI here, five minutes in `make stress`, which prints what they held.
"""

import os
import random
import time

import pytest

from tests.support.jobs import each_mpi, job, no_memory_left_behind

LONG = os.environ.get("MPIDIST_TEST_PROFILE") == "stress"
SECONDS = 300 if LONG else 4
SEED = random.randrange(1 << 32) if LONG else 27
RANKS = 3


@pytest.mark.long
@each_mpi
def test_jobs_go_on_after_kills(python, tmp_path, capsys):
    draw, kills, files = random.Random(SEED), 0, len(os.listdir("/proc/self/fd"))
    until = time.monotonic() + SECONDS * 2 / 3
    with no_memory_left_behind():
        while not kills or time.monotonic() < until:
            life = draw.uniform(0, min(10, SECONDS / 4))
            arguments = str(tmp_path), str(life), str(draw.randrange(RANKS)), str(SEED)
            done = job(python, RANKS, *arguments, script="soak_job.py")
            assert done.status and "AssertionError" not in done.output, done.output
            kills += 1
        arguments = str(tmp_path), str(min(100, SECONDS / 3)), "-1", str(SEED)
        done = job(python, RANKS, *arguments, script="soak_job.py")
        assert done.status == 0 and "steps 0" not in done.output, done.output
    assert len(os.listdir("/proc/self/fd")) == files
    with capsys.disabled():
        print(f"\nseed {SEED}: {kills} kills", *done.output.splitlines(), sep="\n")
