"""ZB-H1 and ZB-H2: backward in halves, and the half that nobody waits for fills the bubble."""

from collections.abc import Iterator

from ..actions import Action, F, I, W
from ..registry import pipeline_schedule


def _handcrafted(rank: int, size: int, microbatches: int, lead: int) -> Iterator[Action]:
    """I follows F by `lead` steps for every stage behind, W by `lead` times p-1 on all stages."""
    delay = lead * (size - 1)
    for step in range(microbatches + delay):
        turns = ((F, step), (I, step - lead * (size - 1 - rank)), (W, step - delay))
        for action, microbatch in turns:
            if 0 <= microbatch < microbatches:
                yield action(microbatch)


@pipeline_schedule("zb-h1", splits=True)
def zb_h1(rank: int, size: int, microbatches: int) -> Iterator[Action]:
    """As 1F1B, but W waits p-1 microbatches: it stands where 1F1B had its bubble.

    Bubble: (p-1)(F+I-W).  Peak live activations: p.
    Source: Qi et al., "Zero bubble pipeline parallelism", arXiv:2401.10241.
    """
    return _handcrafted(rank, size, microbatches, 1)


@pipeline_schedule("zb-h2", splits=True)
def zb_h2(rank: int, size: int, microbatches: int) -> Iterator[Action]:
    """As ZB-H1, but with twice the forwards ahead: more memory, and no bubble within a rank.

    Bubble: (p-1)(F+I-2W).  Peak live activations: 2p-1.
    Source: Qi et al., "Zero bubble pipeline parallelism", arXiv:2401.10241.
    """
    return _handcrafted(rank, size, microbatches, 2)
