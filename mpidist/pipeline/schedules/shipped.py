"""The shipped pipeline schedules, one generator each.

In the docstrings, p is the number of ranks, m that of microbatches, v that of chunks per rank, and
s a stage (with one chunk, the rank).  F, B, I and W are times of these actions.  A bubble is the
time in which a rank waits in a step: as a time, or relative to the time in which it computes.  In
the pictures, a dot is a waiting rank, and F2b is the forward of microbatch 2 through chunk b.
"""

from collections import Counter
from collections.abc import Iterator

from .actions import KINDS, Action, B, F, I, W
from .schedule import pipeline_schedule


@pipeline_schedule("gpipe", splits=False)
def gpipe(rank: int, size: int, microbatches: int) -> Iterator[Action]:
    """Run all microbatches forward, then all backward in reverse order.

    With p ranks and m microbatches.  Bubble: (p-1)/m of the work.  Peak live activations: m.
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


@pipeline_schedule("1f1b", splits=False)
def one_forward_one_backward(rank: int, size: int, microbatches: int) -> Iterator[Action]:
    """Warm up with p-1-s forwards on stage s of p, then alternate one forward and one backward.

    With m microbatches.  Bubble: (p-1)/m of the work.  Peak live activations: min(m, p-s).
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


@pipeline_schedule("interleaved", chunks=2, splits=False)
def interleaved(rank: int, size: int, microbatches: int, *, chunks: int = 2) -> Iterator[Action]:
    """Run 1F1B over v chunks per rank; microbatches take one chunk after the other in groups of g.

    With p ranks and m microbatches, m a multiple of p: g = p, the order of Megatron.  Otherwise the
    microbatches are divided into floor(m/p) groups (at least one) as evenly as possible, and g is
    the size of the largest.

    Bubble: (p-1)/(mv) of the work for m >= p.  Peak live activations: min(mv, 2(p-1-s)+(v-1)g+1)
    on rank s, each of one chunk for one microbatch.
    Source: Narayanan et al., "Efficient large-scale language model training on GPU clusters using
    Megatron-LM", arXiv:2104.04473.

    2 ranks, 2 microbatches::

        rank 0  F0a F1a F0b F1b .   .   B0b---- .   B1b---- B0a---- B1a----
        rank 1  .   F0a F1a F0b B0b---- F1b B1b---- B0a---- B1a---- .   .
    """
    groups = _groups(microbatches, size)
    forward = [(x, c) for group in groups for c in range(chunks) for x in group]
    backward = [(x, c) for group in groups for c in reversed(range(chunks)) for x in group]
    warm_up = min(2 * (size - 1 - rank) + (chunks - 1) * len(groups[0]), len(forward))
    for microbatch, chunk in forward[:warm_up]:
        yield F(microbatch, chunk)
    for turn, (microbatch, chunk) in enumerate(backward):
        if turn + warm_up < len(forward):
            yield F(*forward[turn + warm_up])
        yield B(microbatch, chunk)


def _groups(microbatches: int, size: int) -> list[range]:
    """Divide the microbatches into groups of at least `size` (one group if fewer), larger first."""
    count = max(1, microbatches // size)
    least, more = divmod(microbatches, count)
    begins = [group * least + min(group, more) for group in range(count + 1)]
    return [range(a, b) for a, b in zip(begins, begins[1:])]


def _handcrafted(rank: int, size: int, microbatches: int, lead: int) -> Iterator[Action]:
    """Yield the actions of ZB-H1 (`lead` 1) or ZB-H2 (2): per turn at most one F, one I and one W.

    Stage s of p runs F of microbatch k in its turn k, I in turn k + `lead` * (p-1-s), and W in turn
    k + `lead` * (p-1).
    """
    delay = lead * (size - 1)
    for step in range(microbatches + delay):
        turns = ((F, step), (I, step - lead * (size - 1 - rank)), (W, step - delay))
        for action, microbatch in turns:
            if 0 <= microbatch < microbatches:
                yield action(microbatch)


@pipeline_schedule("zb-h1", splits=True)
def zb_h1(rank: int, size: int, microbatches: int) -> Iterator[Action]:
    """Run 1F1B with W delayed by p-1 microbatches, into the bubble of 1F1B.

    With p ranks, m microbatches, and F, I, W the times of these actions.
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
    """Run ZB-H1 with twice the forwards ahead: more memory, and no bubble where F = I = W.

    With p ranks, m microbatches, and F, I, W the times of these actions.
    Bubble: (p-1)(F+I-2W) between rank 0's first and last action, where m >= 2p-1 and W <= F, I; the
    makespan is longer than the work of one rank by (p-1)F at least.
    Peak live activations: min(m, 2p-1).
    Source: Qi et al., "Zero bubble pipeline parallelism", arXiv:2401.10241.

    3 ranks, 5 microbatches::

        rank 0  F0 F1 F2 F3 F4 I0 W0 I1 W1 I2 W2 I3 W3 I4 W4 .  .
        rank 1  .  F0 F1 F2 I0 F3 I1 F4 I2 W0 I3 W1 I4 W2 W3 W4 .
        rank 2  .  .  F0 I0 F1 I1 F2 I2 F3 I3 F4 I4 W0 W1 W2 W3 W4
    """
    return _handcrafted(rank, size, microbatches, 2)


@pipeline_schedule("zb-v", chunks=2, placement="v", splits=True)
def zb_v(rank: int, size: int, microbatches: int) -> Iterator[Action]:
    """Pass each microbatch down the ranks and back up; I and W fill the bubbles.

    With p ranks, m microbatches, and F, I, W the times of these actions.
    Bubble: 0 where F = I = W and m >= 2p-1; the makespan is longer than the work of one rank by
    (p-1)F.  Peak live activations: 2 min(m, p), each of one of the two chunks of a rank.  Twice the
    messages of schedules of one chunk.
    Source: Qi et al., "Pipeline parallelism with controllable memory", arXiv:2405.15362.

    2 ranks, 3 microbatches::

        rank 0  F0a F1a F2a F0b I0b W0b F1b I1b W1b I0a W0a F2b I2b W2b I1a W1a I2a W2a .
        rank 1  .   F0a F0b F1a F1b I0b W0b F2a I0a W0a F2b I1b W1b I1a I2b I2a W1a W2b W2a
    """
    # Rank 1 of 3, 5 microbatches; a and b are the chunks 0 and 1 (r is the rank)::
    #
    #     F0a F1a F2a                 2(p-r)-1  microbatch 0 goes down to rank 2 and back up to here
    #     F0b F3a                     r         … up to rank 0, and its gradient comes back down
    #     F1b I0b W0b  F2b I1b W1b    p-r       … down to rank 2, and back up as that of chunk a
    #     F4a I0a W0a F3b I2b W2b  …  m-p       all is there when it is needed
    #     I2a I4b                     r         gradients first: other ranks wait for them;
    #     I3a W2a  I4a W3a            p-r       W, for which none waits, fills the time between
    #     W4b  W4a                    r, r      and comes last
    behind = size - rank
    # The phases are whole with 2p-1 microbatches; of a smaller batch, those missing are left out.
    full = max(microbatches, 2 * size - 1)
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
