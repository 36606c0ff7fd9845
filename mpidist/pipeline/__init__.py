"""Pipeline parallelism: microbatches pass through stages, in the order that a schedule gives."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

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
    simulate,
)

if TYPE_CHECKING:
    from .partitioning import Partition, partition
    from .pipeline import Pipeline
    from .stats import PipelineStats

# What runs is imported when it is used first (PEP 562): commands that prove or draw a schedule do
# not wait for the communicator.
_LAZY = {
    "Partition": "partitioning",
    "Pipeline": "pipeline",
    "PipelineStats": "stats",
    "partition": "partitioning",
}

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


def __getattr__(name: str) -> Any:
    if name not in _LAZY:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}", name=name)
    value = getattr(import_module(f"{__name__}.{_LAZY[name]}"), name)
    globals()[name] = value
    return value
