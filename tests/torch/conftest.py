"""The default group of tests of the backend "mpidist"."""

from datetime import timedelta

import pytest

from tests.support.torch_groups import SECONDS
from tests.support.training_kits import torch

if torch is not None:
    import torch.distributed as dist


@pytest.fixture(scope="module")
def world():
    """The default group; of one file alone."""
    dist.init_process_group("mpidist", timeout=timedelta(seconds=SECONDS))
    yield dist.group.WORLD
    dist.destroy_process_group()


@pytest.fixture
def place(world):
    return dist.get_rank(), dist.get_world_size()
