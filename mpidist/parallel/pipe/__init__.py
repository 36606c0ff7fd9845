"""Pipeline parallelism: every rank holds some stages of the model, microbatches pass through."""

from .partition import Partition, partition
from .pipeline import Pipeline
from .pipeline_stats import PipelineStats

__all__ = ["Partition", "Pipeline", "PipelineStats", "partition"]
