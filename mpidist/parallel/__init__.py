"""Data parallelism: DDP and ZeRO; gradients are averaged in buckets, while backward computes."""

import sys
from importlib import import_module
from typing import Any

from .. import data
from ..checkpoint.checkpoint import Checkpoint
from ..data import shard
from ..stop import StopRequest
from . import hooks, transport
from .bucket import Bucket
from .bucketing import assign_buckets
from .ddp import DDP
from .stats import Stats
from .zero import ZeroOptimizer

__all__ = [
    "DDP",
    "Bucket",
    "Checkpoint",
    "Stats",
    "StopRequest",
    "ZeroOptimizer",
    "assign_buckets",
    "shard",
]

# Documented paths of earlier versions: modules and names that lie elsewhere now.
sys.modules[f"{__name__}.chain"] = transport
sys.modules[f"{__name__}.powersgd"] = hooks
sys.modules[f"{__name__}.shard"] = data
_PIPELINES = ("Partition", "Pipeline", "PipelineStats", "partition")


def __getattr__(name: str) -> Any:
    """Return `name` of :mod:`mpidist.pipeline`, imported late because it builds on this package."""
    if name in _PIPELINES:
        return getattr(import_module("mpidist.pipeline"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}", name=name)
