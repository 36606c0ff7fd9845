"""Schedules and choices in the formats of other tools: one module for each, to read or to write."""

from .goal import export_goal
from .han import export_han
from .library_rules import LibraryRule
from .mpich import export_mpich
from .msccl.algorithm import Imported, import_msccl
from .msccl.text import export_msccl
from .nccl import export_nccl
from .openmpi import export_openmpi

__all__ = [
    "Imported",
    "LibraryRule",
    "export_goal",
    "export_han",
    "export_mpich",
    "export_msccl",
    "export_nccl",
    "export_openmpi",
    "import_msccl",
]
