"""The meaning of pipelines: schedules, messages, proofs, times and pictures; no I/O, no MPI."""

from . import shipped  # registers the shipped schedules
from .actions import Action, B, F, I, W
from .automatic import automatic
from .costs import Costs
from .messages import Message, Step, derive
from .placement import Placement
from .proof import PipelineProof
from .prove import prove
from .schedule import PipelineSchedule, as_schedule, find_schedule, pipeline_schedule, schedules
from .simulate import simulate
from .timeline import Span, Timeline

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
