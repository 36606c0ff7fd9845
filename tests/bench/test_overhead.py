"""The overhead of the engine, and of the flight record."""

from mpidist.bench.overhead import engine_overhead, record_overhead
from mpidist.shared_memory.compiled import runs_steps


def test_engine_overhead_without_and_with_a_deadline():
    rows = engine_overhead()
    assert [row.figures["deadline_s"] for row in rows] == [0, 60.0]
    assert all(0 < row.time_us < 1000 for row in rows)


def test_record_in_compiled_code_and_in_python():
    rows = {row.candidate: row.time_us for row in record_overhead()}
    assert list(rows) == ["compiled", "Python"][not runs_steps() :]
    assert 0 < rows["Python"] < 100 and rows.get("compiled", 0) < 10
