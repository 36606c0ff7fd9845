"""The backend "mpidist" of torch.distributed for CUDA tensors: those of the host stand for them.

Most cases are those of the files of its modules, such as test_collectives_mpi.py.
"""

import pytest

from mpidist.communicator.communicator import Communicator
from mpidist.device.find import install_device
from tests.support.emulated import take_tensors_for_a_gpus
from tests.support.training_kits import NEEDS_TORCH, torch

pytestmark = pytest.mark.skipif(torch is None, reason=NEEDS_TORCH)
if torch is not None:
    import torch.distributed as dist

    from . import test_collectives_mpi as collectives
    from .test_collectives_mpi import (  # noqa: F401
        test_all_reduce_coalesced,
        test_all_to_all_splits,
        test_coalesced,
        test_gather_uneven,
        test_in_place,
        test_reduce_scatter,
        test_requires_grad,
        test_sparse,
    )
    from .test_memory_mpi import test_not_contiguous  # noqa: F401
    from .test_messages_mpi import (  # noqa: F401
        test_any_source,
        test_message_before_collective,
        test_wrong_message,
    )
    from .test_process_group_mpi import test_objects  # noqa: F401
    from .test_work_mpi import test_collective_in_a_callback, test_exception_of_a_work  # noqa: F401


@pytest.fixture(autouse=True, scope="module")
def asked():
    """Takes every tensor for one of a GPU; gives what the streams were asked for."""
    with pytest.MonkeyPatch.context() as patch:
        yield take_tensors_for_a_gpus(patch)
    install_device(None)


@pytest.mark.parametrize("dtype", ("float32", "bfloat16", "int16", "bool"))
def test_all_reduce(place, dtype):
    collectives.test_all_reduce(place, getattr(torch, dtype))


@pytest.mark.parametrize("dtype", ("float64", "uint8", "complex64"))
def test_moves(place, dtype):
    collectives.test_moves(place, getattr(torch, dtype))


@pytest.mark.parametrize("async_op", (False, True))
def test_streams(place, asked, monkeypatch, async_op):
    """A blocking call uses the caller's; one in the group's thread waits for it, and is waited for.

    Also on a rank that gets nothing: the others of a gather.
    """
    _, size = place
    x, root = torch.ones(3), size - 1
    into = [torch.zeros(3) for _ in range(size)] if dist.get_rank() == root else None
    for method in (Communicator.allreduce, Communicator.gather):

        def noted(*args, method=method, **more):
            asked.append(method.__name__)
            return method(*args, **more)

        monkeypatch.setattr(Communicator, method.__name__, noted)
    for call in (
        lambda: dist.all_reduce(x, async_op=async_op),
        lambda: dist.gather(x, into, root, async_op=async_op),
    ):
        asked.clear()
        work = call()
        if async_op:
            work.wait()
        steps = [step for step in asked if step != "new"]
        (served_as,) = set(steps) & {"allreduce", "gather"}
        wanted = ["record", "enter", "wait for event", served_as, "synchronize", "leave"]
        assert steps == (wanted if async_op else [served_as])
    assert (x == size).all() and all((y == size).all() for y in into or ())


def test_ddp(place):
    """torch DDP's buckets: the mean of the ranks' gradients."""
    rank, size = place
    model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(3, 2, bias=False))
    model(torch.full((1, 3), float(rank))).sum().backward()
    assert torch.allclose(model.module.weight.grad, torch.full((2, 3), (size - 1) / 2))
