"""Schedules and choices in the formats of other tools: one module for each, to read or to write."""

from .goal import export_goal
from .msccl.algorithm import Imported, import_msccl
from .msccl.text import export_msccl

__all__ = ["Imported", "export_goal", "export_msccl", "import_msccl"]
