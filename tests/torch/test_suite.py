"""Some of torch's own tests of torch.distributed; `make test-torch` runs all of them."""

import importlib.util

import pytest

from tests.support.training_kits import NEEDS_TORCH, torch
from tests.torch import suite

QUICK = [
    "test_DistributedDataParallelCPU",
    "test_accumulate_gradients_no_sync",
    "test_all_gather_complex",
    "test_all_gather_coalesced_with_empty",
    "test_all_gather_object_subgroup",
    "test_all_reduce_coalesced_sum",
    "test_all_reduce_max",
    "test_all_reduce_sum_complex",
    "test_all_reduce_sum_async",
    "test_all_to_all_single_unequal_split",
    "test_all_to_all_complex",
    "test_barrier_timeout_global",
    "test_batch_isend_irecv_gloo_tags",
    "test_broadcast",
    "test_ddp_logging_data_cpu",
    "test_destroy_group",
    "test_gather_object",
    "test_get_future",
    "test_isend",
    "test_reduce_full_group_sum",
    "test_reduce_sum_twice",
    "test_scatter_object_list",
    "test_send_recv_any_source",
    "test_send_recv_with_tag",
    "test_sparse_all_reduce_sum",
    "test_static_graph_api_cpu",
]


@pytest.mark.long
@pytest.mark.skipif(torch is None, reason=NEEDS_TORCH)
@pytest.mark.timeout(300)
def test_quick_ones(tmp_path):
    assert importlib.util.find_spec("expecttest"), "expecttest belongs to the extra 'test'"
    found = suite.results("mpidist", 2, QUICK, tmp_path, 60)
    assert len(found) == len(QUICK)
    assert {name: found[name][1] for name in suite.failed(found)} == {}


def test_each_explained_failure_is_a_test():
    """A reason names tests once."""
    names = [name for some in suite.explained().values() for name in some]
    assert len(set(names)) == len(names) and all(name.startswith("test_") for name in names)
