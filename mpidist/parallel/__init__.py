"""Training over many ranks."""

from .buckets import assign_buckets
from .ddp import DDP

__all__ = ["DDP", "assign_buckets"]
