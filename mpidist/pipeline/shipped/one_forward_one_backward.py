"""1F1B: a backward as soon as there can be one, so that activations do not pile up."""

from collections.abc import Iterator

from ..actions import Action, B, F
from ..schedule import pipeline_schedule


@pipeline_schedule("1f1b", splits=False)
def one_forward_one_backward(rank: int, size: int, microbatches: int) -> Iterator[Action]:
    """Warm up with p-1-s forwards on stage s, then take one forward and one backward in turns.

    Bubble: (p-1)/m of the work.  Peak live activations: min(m, p-s).
    Source: Narayanan et al., "Memory-efficient pipeline-parallel DNN training" (PipeDream-flush),
    arXiv:2006.09503.

    4 ranks, 5 microbatches::

        rank 0  F0 F1 F2 F3 .  .  .  .  .  .  B0--- F4 B1--- .  B2--- .  B3--- .  B4---
        rank 1  .  F0 F1 F2 .  .  .  .  B0--- F3 B1--- F4 B2--- .  B3--- .  B4--- .  .
        rank 2  .  .  F0 F1 .  .  B0--- F2 B1--- F3 B2--- F4 B3--- .  B4--- .  .  .  .
        rank 3  .  .  .  F0 B0--- F1 B1--- F2 B2--- F3 B3--- F4 B4--- .  .  .  .  .  .
    """
    warm_up = min(size - 1 - rank, microbatches)
    for microbatch in range(warm_up):
        yield F(microbatch)
    for microbatch in range(microbatches):
        if microbatch + warm_up < microbatches:
            yield F(microbatch + warm_up)
        yield B(microbatch)
