"""Actions of a rank, and where stages are placed."""

from mpidist.pipeline.schedules import B, F, I, Placement, W


def test_placements():
    for shape in ("loop", "v"):
        place = Placement(4, 3, shape)
        assert place.stages == 12
        assert [place.stage(*place.owner(stage)) for stage in range(12)] == list(range(12))
    assert [Placement(3, 2, "v").stage(rank, 1) for rank in range(3)] == [5, 4, 3]


def test_actions_of_other_kinds_differ():
    assert F(0) != B(0) and I(1) != W(1) and len({F(0), B(0), I(0), W(0)}) == 4
    assert F(1, chunk=0) == F(1) != F(1, 1)
    assert [str(a) for a in (F(3), W(0, 1))] == ["F(3)", "W(0, chunk=1)"]
