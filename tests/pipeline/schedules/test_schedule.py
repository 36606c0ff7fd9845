"""Schedules by name, of users, and names and numbers that are wrong."""

import pytest

from mpidist.errors import InvalidArgument, UnknownName, Unsupported
from mpidist.pipeline.schedules import B, F, find_schedule, pipeline_schedule, prove
from mpidist.pipeline.schedules.schedule import unregister_schedule


def test_names_and_numbers_that_are_wrong():
    with pytest.raises(UnknownName, match="'1f1B'.*'1f1b'"):
        find_schedule("1f1B")
    with pytest.raises(InvalidArgument, match="schedule=3: .*1f1b"):
        prove(3, 2, 2)
    for wrong in (lambda rank: [], min):
        with pytest.raises(InvalidArgument, match=r"\(rank, size, microbatches\)"):
            prove(wrong, 2, 2)
    for arguments, message in (
        ((0, 2), "size=0: .*>= 1"),
        ((2, 0), "microbatches=0: .*>= 1"),
        ((2, True), "microbatches=True: "),
        ((2, 2, 0), "chunks=0: .*>= 1"),
        ((2.0, 2), r"size=2\.0: "),
    ):
        with pytest.raises(InvalidArgument, match=message):
            prove("interleaved", *arguments)
    with pytest.raises(Unsupported, match=r"1f1b: chunks=2\b.*\b1 .*zb-v"):
        prove("1f1b", 2, 2, 2)
    for name in ("", "auto", "a:b", "a/b", None):
        with pytest.raises(InvalidArgument, match=f"name={name!r}: .* a pipeline schedule"):
            pipeline_schedule(name)
    with pytest.raises(UnknownName, match="placement 'w'"):
        pipeline_schedule("mine", placement="w")


def test_a_new_schedule_is_one_function():
    @pipeline_schedule("even", requires=lambda p, m, v: None if m % 2 == 0 else f"m={m} is odd")
    def even(rank, size, microbatches):
        """Two microbatches at a time."""
        for first in range(0, microbatches, 2):
            yield from (F(first), F(first + 1), B(first), B(first + 1))

    try:
        assert prove("even", 3, 4) == prove(even, 3, 4)
        assert find_schedule("even").summary == "Two microbatches at a time."
        with pytest.raises(Unsupported, match="pipeline schedule even: m=3 is odd"):
            prove("even", 3, 3)
    finally:
        unregister_schedule("even")

    def own(rank, size, microbatches, *, chunks=3):
        yield from (F(m, c) for c in range(chunks) for m in range(microbatches))
        yield from (B(m, c) for c in reversed(range(chunks)) for m in range(microbatches))

    assert prove(own, 2, 3).chunks == 3 and prove(own, 2, 3, 5).chunks == 5
