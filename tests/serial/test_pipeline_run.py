"""Pipelines of simulated ranks."""

from functools import partial

import pipeline_cases as cases
import pytest
from pipeline_kits import KITS

import mpidist


@pytest.mark.parametrize("kit", KITS)
@pytest.mark.parametrize("schedule", cases.ALL)
@pytest.mark.parametrize("size", (2, 3, 4))
def test_equals_unsplit(kit, schedule, size):
    for microbatches, rows in ((1, 1), (2, 7), (4, 4), (3, 11), (5, 24), (8, 19)):
        if cases.serves(schedule, size, microbatches):
            case = partial(
                cases.equals_unsplit,
                kit=kit,
                schedule=schedule,
                microbatches=microbatches,
                rows=rows,
            )
            mpidist.run_simulated(size, case)
