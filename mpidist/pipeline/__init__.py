"""The meaning of pipelines: schedules, messages, proofs, times and pictures; no I/O, no MPI."""

from . import shipped  # registers the shipped schedules
from .actions import Action, B, F, I, W
from .messages import Message, Step, derive
from .placement import Placement
from .registry import (
    PipelineSchedule,
    as_schedule,
    find_schedule,
    pipeline_schedule,
    schedules,
)

__all__ = [
    "Action",
    "B",
    "F",
    "I",
    "Message",
    "PipelineSchedule",
    "Placement",
    "Step",
    "W",
    "as_schedule",
    "derive",
    "find_schedule",
    "pipeline_schedule",
    "schedules",
]
