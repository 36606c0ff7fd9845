"""The main job under mpiexec."""

import demo_cases
import pytest


@pytest.mark.parametrize("case", demo_cases.CASES, ids=lambda case: case.__name__)
def test_demo(comm, case):
    case(comm)
