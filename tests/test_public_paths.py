"""Import paths that users have stay valid, wherever the modules lie now."""

from importlib import import_module

import pytest

import mpidist

NAMES = {
    "mpidist.parallel": "DDP Bucket Checkpoint Partition Pipeline PipelineStats Stats StopRequest "
    "ZeroOptimizer assign_buckets partition shard",
    "mpidist.parallel.chain": "chained",
    "mpidist.parallel.hooks": "Compress TopK chained",
    "mpidist.parallel.join": "Join",
    "mpidist.parallel.powersgd": "PowerSGD",
    "mpidist.parallel.shard": "Order",
    "mpidist.pipeline": "Action B Costs F I Message PipelineProof PipelineSchedule Placement "
    "Span Step Timeline W as_schedule automatic derive find_schedule pipeline_schedule "
    "prove schedules simulate",
    "mpidist.pipeline.show": "svg text",
    "mpidist.pipeline.trace": "Trace mean_costs read write",
    "mpidist.nn": "SGD Adam CrossEntropy Identity Linear Module Parameter ReLU Sequential",
    "mpidist.bench": "Case Refusal Results Row Settings Workload measure steps",
    "mpidist.demo": "DemoResult Digits load_digits train",
}


@pytest.mark.parametrize("module", NAMES)
def test_documented_names_are_found(module):
    there = import_module(module)
    for name in NAMES[module].split():
        assert hasattr(there, name), name


def test_paths_of_one_object():
    parallel = import_module("mpidist.parallel")
    for name in (
        "DDP",
        "Checkpoint",
        "Pipeline",
        "StopRequest",
        "ZeroOptimizer",
        "partition",
        "shard",
    ):
        assert getattr(parallel, name) is getattr(mpidist, name)
    # A function has the name of the folder behind it.
    assert callable(import_module("mpidist.pipeline").schedules)


def test_unknown_name():
    with pytest.raises(ImportError, match="Pipelines"):
        from mpidist.parallel import Pipelines  # noqa: F401
