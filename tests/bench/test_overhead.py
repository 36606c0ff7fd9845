"""The overhead of the engine."""

from mpidist.bench.overhead import engine_overhead


def test_engine_overhead_without_and_with_a_deadline():
    rows = engine_overhead()
    assert [row.figures["deadline_s"] for row in rows] == [0, 60.0]
    assert all(0 < row.time_us < 1000 for row in rows)
