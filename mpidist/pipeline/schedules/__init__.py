"""The meaning of pipelines: schedules, messages, proofs, times and pictures; no I/O, no MPI."""

from . import shipped  # registers the shipped schedules
from .actions import Action, B, F, I, Placement, W
from .automatic import automatic
from .gantt import Span, Timeline
from .messages import Message, Step, derive
from .prove import PipelineProof, prove
from .schedule import PipelineSchedule, as_schedule, find_schedule, pipeline_schedule, schedules
from .simulate import Costs, simulate

__all__ = [
    "Action",
    "B",
    "Costs",
    "F",
    "I",
    "Message",
    "PipelineProof",
    "PipelineSchedule",
    "Placement",
    "Span",
    "Step",
    "Timeline",
    "W",
    "as_schedule",
    "automatic",
    "derive",
    "find_schedule",
    "pipeline_schedule",
    "prove",
    "schedules",
    "simulate",
]
