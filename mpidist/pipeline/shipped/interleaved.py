"""Interleaved 1F1B: several chunks a rank, so that a microbatch comes round sooner."""

from collections.abc import Iterator

from ..actions import Action, B, F
from ..schedule import pipeline_schedule


@pipeline_schedule("interleaved", chunks=2, splits=False)
def interleaved(rank: int, size: int, microbatches: int, *, chunks: int = 2) -> Iterator[Action]:
    """1F1B over v chunks a rank; microbatches take one chunk after the other in groups of g.

    With m a multiple of p, g = p: the order of Megatron.  Else m is dealt to floor(m/p) groups as
    evenly as can be, and g is the largest.

    Bubble: (p-1)/(mv) of the work for m >= p.  Peak live activations: min(mv, 2(p-1-s)+(v-1)g+1)
    chunks.
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
    """Deal the microbatches to groups of at least `size`, the larger ones first."""
    count = max(1, microbatches // size)
    least, more = divmod(microbatches, count)
    begins = [group * least + min(group, more) for group in range(count + 1)]
    return [range(a, b) for a, b in zip(begins, begins[1:])]
