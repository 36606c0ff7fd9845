"""Pipelines under mpiexec: of 2 ranks up to all of them."""

import pipeline_cases as cases
import pytest
from pipeline_kits import KITS


@pytest.fixture
def pipe_comm(comm):
    """All ranks, at least 2."""
    if comm.size < 2:
        pytest.skip("needs at least 2 ranks")
    return comm


@pytest.mark.parametrize("kit", KITS)
@pytest.mark.parametrize("schedule", cases.ALL)
def test_equals_unsplit(pipe_comm, kit, schedule):
    size = pipe_comm.size
    for microbatches, rows in ((1, 1), (3, 11), (size, 4 * size), (8, 19)):
        if cases.serves(schedule, size, microbatches):
            cases.equals_unsplit(pipe_comm, kit, schedule, microbatches, rows)


@pytest.mark.parametrize("kit", KITS)
@pytest.mark.parametrize("schedule", ("gpipe", "1f1b", "zb-v"))
def test_halves(pipe_comm, kit, schedule):
    cases.halves_equal_unsplit(pipe_comm, kit, schedule, 4, 11)
