"""Measuring collectives: every algorithm beside the bare mpi4py call, every result checked."""

from .cases import Case, Workload
from .records import Refusal, Results, Row
from .runner import measure, steps
from .series import Settings

__all__ = ["Case", "Refusal", "Results", "Row", "Settings", "Workload", "measure", "steps"]
