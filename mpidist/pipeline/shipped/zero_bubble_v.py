"""ZB-V: two chunks a rank, laid out as a V: the last one comes back to where the first is."""

from collections import Counter
from collections.abc import Iterator

from ..actions import KINDS, Action
from ..schedule import pipeline_schedule


@pipeline_schedule("zb-v", chunks=2, placement="v", splits=True)
def zb_v(rank: int, size: int, microbatches: int) -> Iterator[Action]:
    """Each microbatch goes down the ranks and comes back; I and W in halves fill what is left.

    Bubble: 0 where F = I = W and m >= 2p-1; the makespan keeps (p-1)F.  Peak live activations:
    2 min(m, p) chunks, each half of what a rank holds.  Twice the messages of one chunk.
    Source: Qi et al., "Pipeline parallelism with controllable memory", arXiv:2405.15362.

    2 ranks, 3 microbatches::

        rank 0  F0a F1a F2a F0b I0b W0b F1b I1b W1b I0a W0a F2b I2b W2b I1a W1a I2a W2a .
        rank 1  .   F0a F0b F1a F1b I0b W0b F2a I0a W0a F2b I1b W1b I1a I2b I2a W1a W2b W2a
    """
    behind = size - rank
    full = max(microbatches, 2 * size - 1)  # with fewer, those that there are keep their order
    order = ["F0"] * (2 * behind - 1) + ["F1", "F0"] * rank + ["F1", "I1", "W1"] * behind
    for turn in range(full - size):
        order += ["F0"] if turn + 2 * size - 1 - rank < full else []
        order += ["I0", "W0", "F1", "I1", "W1"]
    order += ["I0", "I1"] * rank + ["I0", "W0"] * behind + ["W1"] * rank + ["W0"] * rank
    done: Counter[str] = Counter()
    for name in order:
        if done[name] < microbatches:
            yield KINDS[name[0]](done[name], int(name[1]))
        done[name] += 1
