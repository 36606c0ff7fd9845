"""Pipeline parallelism: microbatches pass through stages, in the order that a schedule gives."""

import sys

from .partition import Partition, partition
from .pipeline import Pipeline

# From here on the attribute `schedules` is the function of that name; modules of the folder are
# imported as in ``from mpidist.pipeline.schedules.show import text``.
from .schedules import (
    Action,
    B,
    Costs,
    F,
    I,
    Message,
    PipelineProof,
    PipelineSchedule,
    Placement,
    Span,
    Step,
    Timeline,
    W,
    as_schedule,
    automatic,
    derive,
    find_schedule,
    pipeline_schedule,
    prove,
    schedules,
    show,
    simulate,
    trace,
)
from .stats import PipelineStats

# The documented paths of these two modules, which lie in schedules/.
sys.modules[f"{__name__}.show"] = show
sys.modules[f"{__name__}.trace"] = trace

__all__ = [
    "Action",
    "B",
    "Costs",
    "F",
    "I",
    "Message",
    "Partition",
    "Pipeline",
    "PipelineProof",
    "PipelineSchedule",
    "PipelineStats",
    "Placement",
    "Span",
    "Step",
    "Timeline",
    "W",
    "as_schedule",
    "automatic",
    "derive",
    "find_schedule",
    "partition",
    "pipeline_schedule",
    "prove",
    "schedules",
    "simulate",
]
