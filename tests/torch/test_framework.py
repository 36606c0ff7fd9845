"""Modules of PyTorch on simulated ranks; and that it is needed for nothing else."""

import subprocess
import sys

import pytest

from mpidist import run_simulated
from tests.support import torch_cases as cases
from tests.support.training_kits import NEEDS_TORCH, torch

WITHOUT = """
import sys
sys.modules["torch"] = None  # whoever imports it fails
import numpy as np
import mpidist as md
from mpidist.nn import Linear

def main(comm):
    model = md.DDP(Linear(2, 2), comm)
    model(np.ones((1, 2), np.float32))
    model.backward(np.ones((1, 2), np.float32))
    model.sync_gradients()
    assert list(md.shard([1, 2], comm)) == [comm.rank + 1]

md.run_simulated(2, main)
"""


@pytest.mark.skipif(torch is None, reason=NEEDS_TORCH)
@pytest.mark.parametrize("size", (1, 2, 3))
@pytest.mark.parametrize("case", cases.CASES, ids=lambda case: case.__name__)
def test_torch(case, size):
    run_simulated(size, case)


@pytest.mark.skipif(torch is None, reason=NEEDS_TORCH)
@pytest.mark.parametrize("size", [1, 3])
def test_ignored(size, tmp_path):
    run_simulated(size, lambda comm: cases.what_torch_ignores_is_ignored(comm, tmp_path))


def test_not_needed_without_a_module_of_it():
    subprocess.run([sys.executable, "-c", WITHOUT], check=True, timeout=200)
