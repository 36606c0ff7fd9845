"""Training over many ranks."""

from .bucket import Bucket
from .ddp import DDP
from .layout import assign_buckets
from .shard import shard
from .stats import Stats

__all__ = ["DDP", "Bucket", "Stats", "assign_buckets", "shard"]
