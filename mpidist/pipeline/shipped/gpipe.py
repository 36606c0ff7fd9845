"""GPipe: every forward, then every backward."""

from collections.abc import Iterator

from ..actions import Action, B, F
from ..schedule import pipeline_schedule


@pipeline_schedule("gpipe", splits=False)
def gpipe(rank: int, size: int, microbatches: int) -> Iterator[Action]:
    """All microbatches go forward, then all come back in reverse order.

    Bubble: (p-1)/m of the work.  Peak live activations: m.
    Source: Huang et al., "GPipe: Efficient training of giant neural networks using pipeline
    parallelism", arXiv:1811.06965.

    3 ranks, 4 microbatches::

        rank 0  F0 F1 F2 F3 .  .  .  .  .  .  B3--- B2--- B1--- B0---
        rank 1  .  F0 F1 F2 F3 .  .  .  B3--- B2--- B1--- B0--- .  .
        rank 2  .  .  F0 F1 F2 F3 B3--- B2--- B1--- B0--- .  .  .  .
    """
    for microbatch in range(microbatches):
        yield F(microbatch)
    for microbatch in reversed(range(microbatches)):
        yield B(microbatch)
