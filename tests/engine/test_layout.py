"""Plans and layouts: what is cut into segments, and what is not."""

import numpy as np
import pytest

from mpidist.calls.call import Caller
from mpidist.calls.prepare import prepare
from mpidist.engine.layout import Plan, Segments
from mpidist.schedule.registry import find
from mpidist.selection.segmentation import Segmentation

GROUPS = ((0, 1), (2, 3))


def layout(name, n, rank=0):
    x = np.zeros(n, "float32")
    call = prepare("allreduce", Caller(rank, 4), x, x.copy(), op="sum").call
    return Plan(call, find("allreduce", name), GROUPS, 2, Segmentation()).layout(call)


def sides(found):
    return [step for steps in found.steps for step in steps if isinstance(step, Segments)]


@pytest.mark.parametrize("memory", ("in_place", "slots", "published"))
def test_long_messages_between_meetings_are_strands(memory):
    """A strand has a piece of each block, and all pieces together are the blocks."""
    name, n = f"hierarchical/{memory}/ring", 1_000_003
    (short,), (long,) = sides(layout(name, 1000)), sides(layout(name, n))
    assert len(short.strands) == 1 < len(long.strands) and long.window > 1
    for strand in long.strands:
        assert [len(steps) for steps in strand] == [len(steps) for steps in short.strands[0]]
    for number, steps in enumerate(short.strands[0]):
        for at, placed in enumerate(steps):
            pieces = [strand[number][at].rows[0][0] for strand in long.strands]
            assert all(one[2] == other[1] for one, other in zip(pieces, pieces[1:])), placed
            assert {piece[0] for piece in pieces} == {pieces[0][0]}


def test_segments_are_the_same_on_all_ranks():
    found = [sides(layout("hierarchical/in_place/ring", 1_000_003, rank))[0] for rank in range(4)]
    assert len({(len(side.strands), side.window) for side in found}) == 1


def test_every_segment_reads_what_the_whole_reads():
    """The second segment, too, sends its piece of the input before it is combined."""
    (long,) = sides(layout("hierarchical/in_place/ring", 1_000_003))
    keys = [[rows[0][0][0] for _, rows in steps] for strand in long.strands for steps in strand]
    each = len(keys) // len(long.strands)
    assert all(keys[k] == keys[k % each] for k in range(len(keys)))
