"""Pictures: what they say of small schedules, and that there is one of every algorithm."""

import xml.dom.minidom

import pytest

import mpidist  # noqa: F401  (registers the algorithms)
from mpidist.errors import ScheduleError
from mpidist.schedule import Recv, Send, algorithms, find
from mpidist.schedule.reading import name_blocks
from mpidist.schedule.show import svg, text

RING = """\
allreduce ring on 3 ranks: 3 blocks, 4 messages in a row, 12 messages in all, 12 blocks moved
→ sends to   ← receives from   + receives from and combines   [blocks]

time  rank 0  rank 1  rank 2
----  ------  ------  ------
1     →1 [2]  →2 [0]  →0 [1]
      +2 [1]  +0 [2]  +1 [0]
2     →1 [1]  →2 [2]  →0 [0]
      +2 [0]  +0 [1]  +1 [2]
3     →1 [0]  →2 [1]  →0 [2]
      ←2 [2]  ←0 [0]  ←1 [1]
4     →1 [2]  →2 [0]  →0 [1]
      ←2 [1]  ←0 [2]  ←1 [0]"""

LINEAR = """\
reduce linear on 3 ranks, root 1: 1 block, 2 messages in a row, 2 messages in all, 2 blocks moved
→ sends to   + receives from and combines

time  rank 0  rank 1  rank 2
----  ------  ------  ------
1     →1      +0
2             +2      →1"""


def test_text():
    assert text("allreduce", "ring", 3) == RING
    assert text("reduce", find("reduce", "linear"), 3, root=1) == LINEAR


def test_copies_buffers_and_strands():
    assert "in[0]⇒[0]" in text("alltoall", "pairwise", 3)
    assert "→1 in[1]" in text("alltoall", "pairwise", 3)
    drawn = text("broadcast", "chain", 3, segments=2)
    assert "a:→1 [0]" in drawn and "b:→1 [1]" in drawn and "2 segments" in drawn
    assert "arity 4" in text("allreduce", "tree:4", 6)
    assert "arity 3" in text("allreduce", "tree", 6, arity=3)
    assert "→2" in text("allreduce", "hierarchical", 4, groups=((0, 1), (2, 3)))


IN_PLACE = """\
allreduce in_place on 3 ranks: 3 blocks, 4 steps in a row, 2 meetings, \
6 blocks read, 6 blocks stored
⇢ stores at   Σ combines here, of ranks   ═ meets   [blocks]

time  rank 0          rank 1          rank 2
----  --------------  --------------  --------------
1     ═ meet          ═ meet          ═ meet
2     Σ0-2 in[0]⇒[0]  Σ0-2 in[1]⇒[1]  Σ0-2 in[2]⇒[2]
3     ⇢1,2 [0]        ⇢0,2 [1]        ⇢0,1 [2]
4     ═ meet          ═ meet          ═ meet"""

SLOTS = """\
gather slots on 3 ranks, root 0: 3 blocks, 2 steps in a row, 1 meeting, 2 blocks read
⇠ reads at   ⇒ copies here   ═ meets   [blocks]

time   rank 0           rank 1          rank 2
-----  ---------------  --------------  --------------
start                   in[1]⇒slot0[0]  in[2]⇒slot0[0]

1      ═ meet           ═ meet          ═ meet

2      ⇠1 slot0[0]⇒[1]
       ⇠2 slot0[0]⇒[2]
       in[0]⇒[0]"""


def test_shared_memory():
    assert text("allreduce", "in_place", 3) == IN_PLACE
    assert text("gather", "slots", 3) == SLOTS
    assert "═ await nobody" in text("scatter", "in_place", 3)
    assert "Σ0-4 slot0/in[2]⇒[2]" in text("allreduce", "slots", 5)
    mixed = text("allreduce", "hierarchical/published/ring", 4, groups=((0, 1), (2, 3)))
    for part in ("═ await 0,1", "Σ2,3 in[0,1]⇒[0,1]", "+2 [0]", "⇠3 [2,3]", "8 messages in all"):
        assert part in mixed


def test_a_bar_for_every_rank_that_meets():
    drawn = svg("allreduce", "in_place", 4)
    assert drawn.count('class="arrow meet"') == 2 * 4 + 1  # and one in the legend
    assert drawn.count('class="arrow put"') == 12 + 1 and drawn.count('class="arrow fold"') == 4 + 1
    assert "Σ0-3 in[1]⇒[1]" in drawn
    drawn = svg("allgather", "published", 4)
    assert drawn.count('class="arrow get"') == 12 + 1


@pytest.mark.parametrize(
    "algorithm", algorithms(one_sided=True), ids=lambda a: a.label.replace(" ", "-")
)
def test_every_algorithm_has_its_pictures(algorithm):
    for size in (1, 2, 5, 6):
        if algorithm.unsupported(size):
            continue
        for segments in (1, 2):
            args = (algorithm.collective, algorithm, size)
            lines = text(*args, segments=segments).splitlines()
            assert lines == [line.rstrip() for line in lines]
            if segments == 1 and size < 6:
                assert max(map(len, lines)) <= 120
            root = xml.dom.minidom.parseString(svg(*args, segments=segments)).documentElement
            assert root.tagName == "svg" and "http" not in root.toxml().replace(
                'xmlns="http://www.w3.org/2000/svg"', ""
            )


def test_an_arrow_for_every_message():
    drawn = svg("allreduce", "direct", 4)
    assert drawn.count('class="arrow reduce"') == 12 + 1  # and one in the legend
    assert drawn.count('class="arrow receive"') == 12 + 1
    assert "rank 3" in drawn and "allreduce direct on 4 ranks" in drawn


def test_nodes_are_marked():
    drawn = svg("allreduce", "hierarchical", 4, groups=((0, 2), (1, 3)))
    assert drawn.count('class="node"') == drawn.count('class="node odd"') == 2
    assert drawn.count(">node 0<") == drawn.count(">node 1<") == 2
    drawn = svg("allreduce", "hierarchical", 4, groups=((0, 1), (2, 3)))
    assert drawn.count('class="node"') == drawn.count('class="node odd"') == 1
    lines = text("allreduce", "hierarchical", 4, groups=((0, 2), (3, 1))).splitlines()
    assert "ranks of each node: 0,2 | 1,3" in lines
    flat = svg("allreduce", "ring", 4, groups=((0, 1), (2, 3)))
    assert 'class="node' not in flat, "an algorithm that does not know the nodes"


def test_nothing_wrong_is_drawn():
    def wrong(rank, size):
        yield Recv(0) if rank else Send(1)

    for draw in (text, svg):
        with pytest.raises(ScheduleError, match="deadlock"):
            draw("broadcast", wrong, 3)


def test_names_of_blocks():
    assert name_blocks((0,), 1) == "" and name_blocks((0,), 1, "tmp") == "tmp"
    assert name_blocks((0, 1, 2), 3) == "[all]" and name_blocks((0, 1, 2), 4) == "[0-2]"
    assert name_blocks((2, 3, 0, 1), 4, "in") == "in[2,3,0,1]"
    assert name_blocks((0, 1, 2), 3, "tmp") == "tmp[0-2]"
