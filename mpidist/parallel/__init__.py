"""Training over many ranks."""

from .bucket import Bucket
from .checkpoint import Checkpoint
from .ddp import DDP
from .layout import assign_buckets
from .shard import shard
from .stats import Stats
from .zero import ZeroOptimizer

__all__ = [
    "DDP",
    "Bucket",
    "Checkpoint",
    "Stats",
    "ZeroOptimizer",
    "assign_buckets",
    "shard",
]
