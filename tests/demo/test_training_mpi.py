"""The main job under mpiexec."""

import pytest

from tests.support import demo_cases


@pytest.mark.parametrize("case", demo_cases.CASES, ids=lambda case: case.__name__)
def test_demo(comm, case):
    case(comm)
