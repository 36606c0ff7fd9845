"""Measuring collectives: every algorithm beside the bare mpi4py call, every result checked."""

from .cases import Case, Workload
from .results import Refusal, Results, Row
from .runner import Settings, measure, run_benchmark, steps

__all__ = [
    "Case",
    "Refusal",
    "Results",
    "Row",
    "Settings",
    "Workload",
    "measure",
    "run_benchmark",
    "steps",
]
