"""The data of a case, and the check of its result."""

import numpy as np
import pytest

from mpidist.bench import Workload
from mpidist.bench.cases import number_dtype, rounded_total
from mpidist.schedule import COLLECTIVES
from tests.support.bench_kits import bench


def test_fill_no_two_turns_are_alike():
    work = Workload("allreduce", 0, 2, 0, 400, "float32")
    case = work.case(400)
    seen = []
    for turn in range(5):
        case.fill(turn)
        case.out[:] = case.expected[0][1][turn : turn + case.out.size]
        assert case.check(turn) and not case.check(turn + 1)
        seen.append(case.x.tobytes())
    assert len(set(seen)) == 5


@pytest.mark.parametrize("collective", [c for c in COLLECTIVES if c != "barrier"])
@pytest.mark.parametrize("in_place", [False, True])
def test_result_is_all_that_is_checked(collective, in_place):
    """All that is checked, in words of 8 bytes: a changed word is in memory that is read."""
    for rank in range(3):
        work = Workload(collective, rank, 3, 1, 240, "float32", in_place=in_place)
        case = work.case(240)
        for bare in (False, True):
            special = bare and case.bare_expected is not None
            windows = case.bare_expected if special else case.expected
            read = case.result(bare)
            assert sum(x.nbytes for x in read) == sum(m.nbytes for m, _, _ in windows)
            assert all(any(np.shares_memory(m, x) for x in read) for m, _, _ in windows)


def test_rounded_total_is_the_tolerance():
    numbers = np.random.default_rng(1).standard_normal(999).astype(np.float32)
    results = bench(
        3, ["allreduce"], data=numbers, sizes=[numbers.nbytes], bits=True, algorithms=["ring"]
    )
    assert results.correct and results.identical == {"ring": True}
    low, high = rounded_total(numbers, 3, 900, 7)
    assert (low <= high).all()
    exact = sum(numbers[7 * r : 7 * r + 900].astype(float) for r in range(3))
    assert (np.abs(low - exact) <= 1e-5).all() and (np.abs(high - exact) <= 1e-5).all()


@pytest.mark.parametrize(
    ("dtype", "op"),
    [
        ("int8", "sum"),
        ("float16", "sum"),
        ("bfloat16", "sum"),
        ("float32", "mean"),
        ("complex64", "prod"),
        ("bool", "or"),
        ("uint16", "xor"),
        ("float64", "max"),
    ],
)
def test_check_every_dtype_is_exact(dtype, op):
    names = ["ring", "linear"]
    assert bench(
        4, ["allreduce"], sizes=[1000], dtype=number_dtype(dtype), op=op, algorithms=names
    ).correct
