"""The store of the backend "mpidist"."""

import gc
import queue
import threading
import time
from datetime import timedelta

import pytest

from tests.support.torch_groups import SECONDS
from tests.support.training_kits import NEEDS_TORCH, torch

pytestmark = pytest.mark.skipif(torch is None, reason=NEEDS_TORCH)
if torch is not None:
    import torch.distributed as dist

    import mpidist.torch


def test_store(place):
    rank, size = place
    store = dist.distributed_c10d._get_default_store()
    store.set(f"key {rank}", f"value {rank}")
    for other in range(size):
        assert store.get(f"key {other}") == f"value {other}".encode()
    store.add("sum", rank + 1)
    dist.barrier()
    assert store.add("sum", 0) == size * (size + 1) // 2
    assert store.check(["key 0", "sum"]) and not store.check(["key 0", "none"])
    begin = time.monotonic()
    with pytest.raises(RuntimeError, match=rf"rank {rank}: store: Timed out .*'.*none'"):
        store.wait(["none"], timedelta(seconds=0.2))
    assert time.monotonic() - begin < 5
    dist.barrier()
    if rank == 0:
        threading.Timer(0.1, store.set, ("late", "it came")).start()
    assert store.get("late") == b"it came"
    dist.barrier()
    if rank == size - 1:
        assert store.delete_key("late") and not store.delete_key("late")
        assert store.compare_set("switch", "", "on") == b"on"
        assert store.compare_set("switch", "off", "no") == b"on"
        with pytest.raises(RuntimeError, match=rf"rank {rank}: store: add\(.*switch', 1\): .*'on'"):
            store.add("switch", 1)  # not a number: other requests are answered on
    dist.barrier()
    assert store.get("switch") == b"on"


def test_clone_of_a_store(place):
    """It has the same keys, and a timeout of its own; PyTorch's prefixes use it, too."""
    rank, size = place
    store = dist.distributed_c10d._get_default_store()
    clone = store.clone()
    gc.collect()
    clone.set(f"cloned {rank}", "here")
    dist.barrier()
    assert all(store.get(f"cloned {other}") == b"here" for other in range(size))
    own = mpidist.torch.rendezvous._store
    twin = own.clone()
    twin.set_timeout(timedelta(seconds=1))
    assert twin.timeout != own.timeout and twin.num_keys() > 0
    assert sum(key.endswith(f"cloned {rank}") for key in twin.list_keys()) == 1
    results = queue.SimpleQueue()
    threads = [
        threading.Thread(target=lambda s=s: results.put([s.add("calls", 1) for _ in range(20)]))
        for s in (twin, own)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(SECONDS)
    numbers = [*results.get(timeout=1), *results.get(timeout=1)]
    assert len(set(numbers)) == 40
    dist.barrier()
    assert own.add("calls", 0) == 40 * size
    dist.barrier()
    own.delete_key("calls")
