"""Pipeline parallelism: every rank holds some stages of the model, microbatches pass through."""

from .divided import Partition
from .partition import partition
from .pipeline import Pipeline
from .pipeline_stats import PipelineStats

__all__ = ["Partition", "Pipeline", "PipelineStats", "partition"]
