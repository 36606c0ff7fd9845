"""Data parallelism: DDP and ZeRO; gradients are averaged in buckets, while backward computes."""

from . import hooks
from .bucket import Bucket
from .bucketing import assign_buckets
from .ddp import DDP
from .stats import Stats
from .zero import ZeroOptimizer

__all__ = [
    "DDP",
    "Bucket",
    "Stats",
    "ZeroOptimizer",
    "assign_buckets",
]
