"""Modules of PyTorch under mpiexec."""

import pytest

from tests.support import torch_cases as cases
from tests.support.training_kits import NEEDS_TORCH, torch


@pytest.mark.skipif(torch is None, reason=NEEDS_TORCH)
@pytest.mark.parametrize("case", cases.CASES, ids=lambda case: case.__name__)
def test_torch(comm, case):
    case(comm)


@pytest.mark.skipif(torch is None, reason=NEEDS_TORCH)
@pytest.mark.parametrize("way", ("wrapper", "module", "inside"))
def test_compiled_module(comm, way):
    cases.a_compiled_module_is_averaged(comm, way)


@pytest.mark.skipif(torch is None, reason=NEEDS_TORCH)
def test_ignored(comm, tmp_path):
    cases.what_torch_ignores_is_ignored(comm, tmp_path)
