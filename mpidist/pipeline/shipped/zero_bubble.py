"""ZB-H1 and ZB-H2: backward in halves, and the half that nobody waits for fills the bubble."""

from collections.abc import Iterator

from ..actions import Action, F, I, W
from ..schedule import pipeline_schedule


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

    Bubble: (p-1)(F+I-W) on rank 0, where m >= p and W <= F, I.  Peak live activations: min(m, p).
    Source: Qi et al., "Zero bubble pipeline parallelism", arXiv:2401.10241.

    3 ranks, 4 microbatches::

        rank 0  F0 F1 F2 .  .  I0 W0 F3 I1 W1 I2 W2 I3 W3
        rank 1  .  F0 F1 .  I0 F2 I1 W0 F3 I2 W1 I3 W2 W3
        rank 2  .  .  F0 I0 F1 I1 F2 I2 W0 F3 I3 W1 W2 W3
    """
    return _handcrafted(rank, size, microbatches, 1)


@pipeline_schedule("zb-h2", splits=True)
def zb_h2(rank: int, size: int, microbatches: int) -> Iterator[Action]:
    """As ZB-H1, but with twice the forwards ahead: more memory, and no bubble within a rank.

    Bubble: (p-1) max(0, F+I-2W) on rank 0, where m >= 2p-1 and W <= F, I; the makespan keeps
    (p-1)F at least.  Peak live activations: min(m, 2p-1).
    Source: Qi et al., "Zero bubble pipeline parallelism", arXiv:2401.10241.

    3 ranks, 5 microbatches::

        rank 0  F0 F1 F2 F3 F4 I0 W0 I1 W1 I2 W2 I3 W3 I4 W4 .  .
        rank 1  .  F0 F1 F2 I0 F3 I1 F4 I2 W0 I3 W1 I4 W2 W3 W4 .
        rank 2  .  .  F0 I0 F1 I1 F2 I2 F3 I3 F4 I4 W0 W1 W2 W3 W4
    """
    return _handcrafted(rank, size, microbatches, 2)
