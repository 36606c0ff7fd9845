"""Data-parallel and pipeline-parallel training over a communicator."""

from .bucket import Bucket
from .checkpoint import Checkpoint
from .ddp import DDP
from .layout import assign_buckets
from .pipe import Partition, Pipeline, PipelineStats, partition
from .shard import shard
from .stats import Stats
from .stop import StopRequest
from .zero import ZeroOptimizer

__all__ = [
    "DDP",
    "Bucket",
    "Checkpoint",
    "Partition",
    "Pipeline",
    "PipelineStats",
    "Stats",
    "StopRequest",
    "ZeroOptimizer",
    "assign_buckets",
    "partition",
    "shard",
]
