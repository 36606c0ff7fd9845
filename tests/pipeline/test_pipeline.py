"""Pipelines of simulated ranks."""

from dataclasses import replace
from functools import partial

import pytest

import mpidist
from mpidist.pipeline.schedules import find_schedule
from tests.support import pipeline_cases as cases
from tests.support.pipeline_kits import KITS

THREE_CHUNKS = replace(find_schedule("interleaved"), name="three chunks", chunks=3)


@pytest.mark.parametrize("kit", KITS)
@pytest.mark.parametrize("schedule", [*cases.ALL, pytest.param(THREE_CHUNKS, id="three")])
@pytest.mark.parametrize("size", (2, 3, 4))
def test_equals_unsplit(kit, schedule, size):
    for microbatches, rows in zip(range(1, 9), (1, 7, 11, 4, 24, 13, 16, 19)):
        if cases.serves(schedule, size, microbatches):
            case = partial(
                cases.equals_unsplit,
                kit=kit,
                schedule=schedule,
                microbatches=microbatches,
                rows=rows,
            )
            mpidist.run_simulated(size, case)


@pytest.mark.parametrize("kit", KITS)
@pytest.mark.parametrize("case", cases.CASES, ids=lambda case: case.__name__)
@pytest.mark.parametrize("size", (2, 4))
def test_cases(kit, case, size):
    mpidist.run_simulated(size, lambda comm: case(comm, kit))


@pytest.mark.parametrize("kit", KITS)
@pytest.mark.parametrize("schedule", ("gpipe", "1f1b", "zb-v"))
def test_halves(kit, schedule):
    mpidist.run_simulated(3, lambda comm: cases.halves_equal_unsplit(comm, kit, schedule, 4, 11))


@pytest.mark.parametrize("kit", KITS)
@pytest.mark.parametrize("schedule", ("1f1b", "zb-h1", "interleaved", "zb-v"))
def test_recomputation(kit, schedule):
    mpidist.run_simulated(
        2, lambda comm: cases.equals_unsplit(comm, kit, schedule, 4, 11, checkpoint=True)
    )


@pytest.mark.parametrize("kit", KITS)
@pytest.mark.parametrize("schedule", ("1f1b", "zb-h1", "zb-v"))
def test_replicas(kit, schedule):
    mpidist.run_simulated(4, lambda comm: cases.replicas(comm, kit, schedule))


@pytest.mark.parametrize("kit", KITS)
@pytest.mark.parametrize("schedule", ("1f1b", "zb-v"))
def test_tied_replicas(kit, schedule):
    mpidist.run_simulated(4, lambda comm: cases.tied_replicas(comm, kit, schedule))


def test_a_small_communicator_is_refused():
    mpidist.run_simulated(2, cases.a_small_communicator_is_refused)
