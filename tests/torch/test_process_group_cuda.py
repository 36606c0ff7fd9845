"""The backend "mpidist" of torch.distributed for tensors on a real GPU, which the ranks may share.

Skipped where there is none.
"""

import pytest

import mpidist as md
from tests.support.gpu_kits import NEEDS_GPU, torch_for_gpu

from . import test_process_group_gpu_mpi as cases
from .test_process_group_gpu_mpi import *  # noqa: F403

pytestmark = NEEDS_GPU
test_streams = None  # of stand-ins


@pytest.fixture(autouse=True, scope="module")
def asked():
    """Makes every tensor of the tests on this rank's GPU."""
    torch = torch_for_gpu()
    torch.cuda.set_device(md.init().use_gpu())
    torch.set_default_device("cuda")
    yield
    torch.set_default_device("cpu")


@pytest.mark.parametrize("async_op", (False, True))
def test_order(place, async_op):
    """The input may be queued behind long work, and the result is read behind the call."""
    torch, (_, size) = cases.torch, place
    x = torch.zeros(1 << 20)
    for _ in range(3):
        torch.cuda._sleep(50_000_000)  # cycles
        x.fill_(1)
        work = cases.dist.all_reduce(x, async_op=async_op)
        if async_op:
            assert work.get_future().wait()[0] is not None
            work.wait()
        assert (x + 0 == size).all()
