"""1F1B: a backward as soon as there can be one, so that activations do not pile up."""

from collections.abc import Iterator

from ..actions import Action, B, F
from ..registry import pipeline_schedule


@pipeline_schedule("1f1b", splits=False)
def one_forward_one_backward(rank: int, size: int, microbatches: int) -> Iterator[Action]:
    """Warm up with p-1-s forwards on stage s, then take one forward and one backward in turns.

    Bubble: (p-1)/m of the work.  Peak live activations: min(m, p-s).
    Source: Narayanan et al., "Memory-efficient pipeline-parallel DNN training" (PipeDream-flush),
    arXiv:2006.09503.

    3 stages, 4 microbatches, B twice as long as F::

        0  0 1 2 . . . . 0 0 3 1 1 . 2 2 . 3 3
        1  . 0 1 . . 0 0 2 1 1 3 2 2 . 3 3 . .
        2  . . 0 0 0 1 1 1 2 2 2 3 3 3 . . . .
    """
    warm_up = min(size - 1 - rank, microbatches)
    for microbatch in range(warm_up):
        yield F(microbatch)
    for microbatch in range(microbatches):
        if microbatch + warm_up < microbatches:
            yield F(microbatch + warm_up)
        yield B(microbatch)
