"""GPipe: every forward, then every backward."""

from collections.abc import Iterator

from ..actions import Action, B, F
from ..registry import pipeline_schedule


@pipeline_schedule("gpipe", splits=False)
def gpipe(rank: int, size: int, microbatches: int) -> Iterator[Action]:
    """All microbatches go forward, then all come back in reverse order.

    Bubble: (p-1)/m of the work.  Peak live activations: m.
    Source: Huang et al., "GPipe: Efficient training of giant neural networks using pipeline
    parallelism", arXiv:1811.06965.

    3 stages, 3 microbatches, B twice as long as F::

        0  0 1 2 . . . . . . 2 2 1 1 0 0
        1  . 0 1 2 . . . 2 2 1 1 0 0 . .
        2  . . 0 1 2 2 2 1 1 0 0 . . . .
    """
    for microbatch in range(microbatches):
        yield F(microbatch)
    for microbatch in reversed(range(microbatches)):
        yield B(microbatch)
