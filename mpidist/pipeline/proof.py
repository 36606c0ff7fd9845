"""What the prover of pipelines gives: counts of a schedule, and the bounds that it keeps."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class PipelineProof:
    """What was shown of a pipeline schedule, whatever the actions and messages take.

    Attributes
    ----------
    name : str
        The schedule.
    size, microbatches, chunks : int
        Ranks; microbatches; virtual stages on every rank.
    actions : int
        Actions of all ranks together.
    messages : int
        Messages between ranks; what a rank hands to itself is not counted.
    outstanding : tuple of int
        For each rank, how many messages to it can be sent and not yet used at a time.
    outstanding_edge : int
        The same for the fullest edge: one direction between two virtual stages.
    peak : tuple of int
        Activations, one for each chunk and microbatch, that are alive at most on each rank.
    splits : bool
        Some backwards are split into I and W.
    """

    name: str
    size: int
    microbatches: int
    chunks: int
    actions: int
    messages: int
    outstanding: tuple[int, ...]
    outstanding_edge: int
    peak: tuple[int, ...]
    splits: bool
