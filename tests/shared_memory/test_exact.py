"""Correctly rounded sums and means: against rational arithmetic, in C and in numpy."""

import ctypes
import itertools
from contextlib import contextmanager
from fractions import Fraction

import ml_dtypes
import numpy as np
import pytest

from mpidist.operations import find_op
from mpidist.shared_memory import compiled, fold
from mpidist.shared_memory.exact import combine_exactly
from tests.support.how_long import takes_minutes

FORMATS = {  # digits, exponent of the smallest number, word
    "float16": (11, -24, np.uint16),
    "bfloat16": (8, -133, np.uint16),
    "float32": (24, -149, np.uint32),
    "float64": (53, -1074, np.uint64),
}
FLOATS = list(FORMATS)
WIDTHS = [width for width in (16, 32, 64) if width <= compiled.vector_width()]
needs_compiler = pytest.mark.skipif(not WIDTHS, reason="needs a C compiler for x86-64")


def by_fractions(terms, dtype, divisor):
    """The bits of the rounded sum, over `divisor`, of one element's terms, as doubles."""
    digits, least, _ = FORMATS[dtype]
    sign = 1 << (digits - 1) << {11: 5, 8: 8, 24: 8, 53: 11}[digits]
    infinity = sign - (1 << (digits - 1))
    if any(x != x for x in terms) or {np.inf, -np.inf} <= set(terms):
        return infinity + (1 << (digits - 2))
    for infinite in (np.inf, -np.inf):
        if infinite in terms:
            return infinity + (sign if infinite < 0 else 0)
    total = sum(map(Fraction, terms), Fraction(0)) / (divisor or 1)
    if total == 0:
        return sign if all(str(x) == "-0.0" for x in terms) else 0
    unit, size = least, abs(total)
    if size >= Fraction(2) ** (least + digits):  # a normal number: find its last digit's worth
        unit = size.numerator.bit_length() - size.denominator.bit_length() - digits
        while size >= Fraction(2) ** (unit + digits):
            unit += 1
    count = round(size / Fraction(2) ** unit)  # of a half to even
    return min(count + (unit - least << (digits - 1)), infinity) + (sign if total < 0 else 0)


def numbers(dtype, count, random):
    """Numbers of one kind: of any bits, of one magnitude, subnormal, large, zeros, few digits."""
    digits, least, word = FORMATS[dtype]
    most = -least - digits + 2  # exponent of the largest numbers
    kind = random.integers(7)
    low, high = {
        0: (least - 3, most + 1),
        1: (-4, 4),
        2: (least - 2, least + digits + 2),
        3: (most - 3, most + 1),
        4: (-2 * digits, 2 * digits),
    }.get(int(kind), (0, digits))
    if kind == 6:
        return np.frombuffer(random.bytes(count * np.dtype(dtype).itemsize), dtype).copy()
    with np.errstate(all="ignore"):
        x = np.ldexp(random.uniform(0.5, 1, count), random.integers(low, high, count))
        if kind == 5:  # many ties: powers of two, and their neighbours
            x = np.ldexp(1.0, random.integers(0, digits + 3, count)) + random.integers(0, 2, count)
        x = (x * random.choice([-1, 1], count)).astype(dtype)
    x[random.random(count) < 0.1] = random.choice([0.0, -0.0])
    return x


def cases(dtype, terms, count, random):
    """Arrays of terms: of one kind and mixed; some cancel but for what is smallest."""
    arrays = [numbers(dtype, count, random) for _ in range(terms)]
    if random.random() < 0.7:
        kind = np.random.default_rng(random.integers(1 << 60))
        state = kind.bit_generator.state
        for k in range(terms):
            kind.bit_generator.state = state
            arrays[k] = random.permutation(numbers(dtype, count, kind))
    if terms > 2 and random.random() < 0.4:
        where = random.random(count) < 0.5
        arrays[-1][where] = -arrays[0][where]
    elif terms > 2 and random.random() < 0.6:
        arrays = edges(dtype, terms, count, random)
    return arrays


def edges(dtype, terms, count, random):
    """Large terms that cancel, and small ones that just fit behind them into a double, or two."""
    low, reach = {"float16": (-24, 16), "float64": (0, 56), "float32": (0, 30)}.get(dtype, (0, 46))
    exponents = random.integers(max(reach - 8, 12), reach + 8, count)

    def any_of(exponents):
        x = np.ldexp(random.uniform(0.5, 1, count), low + exponents)
        return (x * random.choice([-1, 1], count)).astype(dtype)

    arrays = [any_of(0 * exponents) for _ in range(terms)]
    arrays[0] = any_of(exponents)
    arrays[-1] = -arrays[0]
    if terms > 4:
        arrays[1] = any_of(exponents - random.integers(0, 4, count))
        arrays[-2] = -arrays[1]
    return arrays


def check(dtype, count, seed):
    """Compare `count` random cases, and their permutations, with rational arithmetic."""
    random, word, done = np.random.default_rng(seed), FORMATS[dtype][2], 0
    while done < count:
        terms = int(random.choice([2, 3, 4, 5, 8, 13]))
        divisor = int(random.choice([0, terms]))
        arrays = cases(dtype, terms, 50, random)
        with np.errstate(invalid="ignore"):  # of signaling NaN
            wide = [x.astype(np.float64).tolist() for x in arrays]
        expected = [by_fractions(element, dtype, divisor) for element in zip(*wide)]
        got = np.empty_like(arrays[0])
        combine_exactly(arrays, got, divisor)
        found = {"numpy": got.view(word).tolist()}
        for width in WIDTHS:
            order = [arrays[k] for k in random.permutation(terms)]
            got = np.empty_like(got)
            compiled.one_pass(order, [got], divisor, False, width, grouping=compiled.EXACTLY)()
            found[width] = got.view(word).tolist()
        for by, bits in found.items():
            wrong = [k for k in range(50) if bits[k] != expected[k]]
            assert not wrong, (by, divisor, [x[wrong[0]] for x in arrays], bits[wrong[0]])
        done += 50


@pytest.mark.parametrize("dtype", FLOATS)
def test_random_cases_are_rounded_as_fractions_are(dtype):
    check(dtype, 5000, 1)


@takes_minutes
@pytest.mark.parametrize("dtype", FLOATS)
def test_100000_random_cases_of_a_dtype_are_rounded_as_fractions_are(dtype):
    check(dtype, 100_000, 2)


@pytest.mark.parametrize("dtype", FLOATS)
def test_extreme_terms_have_the_results_of_ieee(dtype):
    limit = (ml_dtypes.finfo if dtype == "bfloat16" else np.finfo)(dtype)
    most, tiny = float(limit.max), float(limit.smallest_subnormal)
    for terms, expected in (
        ((-0.0, -0.0, -0.0), -0.0),
        ((-0.0, 0.0, -0.0), 0.0),
        ((1.0, -0.0, -1.0), 0.0),
        ((most, most, -most), most),  # a partial sum overflows
        ((most, most, most), np.inf),
        ((-most, -most, tiny), -np.inf),
        ((tiny, 1.0, -1.0), tiny),
        ((np.inf, 1.0, np.inf), np.inf),
        ((np.inf, -np.inf, 1.0), np.nan),
        ((np.nan, np.inf, 1.0), np.nan),
    ):
        for order in itertools.permutations(terms):
            arrays = [np.full(9, x, dtype) for x in order]
            results = [np.empty_like(arrays[0]) for _ in range(1 + len(WIDTHS))]
            combine_exactly(arrays, results[0])
            for width, out in zip(WIDTHS, results[1:]):
                compiled.one_pass(arrays, [out], width=width, grouping=compiled.EXACTLY)()
            wanted = np.full(9, expected, dtype).tobytes()  # one NaN only
            assert [out.tobytes() for out in results] == [wanted] * len(results), order
    mean = np.empty(3, dtype)
    combine_exactly([np.full(3, most, dtype)] * 3, mean, 3)
    assert (mean == np.full(3, most, dtype)).all()


@pytest.mark.parametrize("dtype", [*FLOATS, "complex64", "complex128"])
@pytest.mark.parametrize("streamed", [False, True])
def test_a_fold_has_the_same_bits_compiled_and_in_numpy(dtype, streamed, monkeypatch):
    random, part = np.random.default_rng(3), np.dtype(dtype)
    if part.kind == "c":
        part = np.dtype(f"float{part.itemsize * 4}")
    for count, terms, start in itertools.product((1, 17, 1000, 70_001), (2, 3, 70), (0, 5)):
        size = count * (1 + (part != np.dtype(dtype)))
        xs = [random.standard_normal(size).astype(part).view(dtype) for _ in range(terms)]
        found = []
        for is_compiled, op in itertools.product((True, False), ("exact_sum", "exact_mean")):
            arrays = [x.copy() for x in xs]
            memory = [np.zeros(count + 16, dtype) for _ in range(2)]
            targets = [arrays[1], *(x[start : start + count] for x in memory)]
            divisor = terms if op == "exact_mean" else 0
            with monkeypatch.context() as patch:
                if not is_compiled:
                    patch.setattr(fold, "one_pass", lambda *arguments, **how: None)
                ranks = tuple(range(terms))
                for action in fold.fold_in_order(
                    find_op(op), arrays, ranks, targets, divisor, None, streamed
                ):
                    action()
            assert {x.tobytes() for x in targets} == {arrays[1].tobytes()}
            assert not any(x[:start].any() or x[start + count :].any() for x in memory)
            assert all(np.array_equal(x, y) for x, y in zip(arrays[2:], xs[2:]))
            found.append(arrays[1].tobytes())
        assert found[:2] == found[2:] and found[0] != found[1]


@contextmanager
def subnormals_as_zero():
    """A thread in which the processor takes subnormal operands and results for zero."""
    library = ctypes.CDLL("libm.so.6")
    before, here = (ctypes.c_uint32 * 8)(), (ctypes.c_uint32 * 8)()  # the last word is MXCSR
    library.fegetenv(before)
    here[:] = before[:]
    here[7] |= 0x8040
    library.fesetenv(here)
    try:
        yield
        library.fegetenv(here)
        assert here[7] & 0x8040 == 0x8040  # as it was before
    finally:
        library.fesetenv(before)


@needs_compiler
@pytest.mark.parametrize("dtype", FLOATS)
def test_flushing_subnormal_numbers_changes_no_bits(dtype):
    random = np.random.default_rng(4)
    digits, least, word = FORMATS[dtype]
    for terms, divisor in itertools.product((2, 3, 4), (0, 3, 4)):
        exponents = random.integers(least, least + 2 * digits, (terms, 200))
        xs = [np.ldexp(random.uniform(-1, 1, 200), e).astype(dtype) for e in exponents]
        results = [np.empty_like(xs[0]) for _ in range(2 + 2 * len(WIDTHS))]

        def compute(results, xs=xs, divisor=divisor):
            combine_exactly(xs, results[0], divisor)
            for width, out in zip(WIDTHS, results[1:]):
                compiled.one_pass(xs, [out], divisor, False, width, grouping=compiled.EXACTLY)()

        compute(results)
        with subnormals_as_zero():
            assert np.float32(1e-39) * np.float32(1) == 0
            compute(results[1 + len(WIDTHS) :])
        assert len({x.tobytes() for x in results}) == 1
        assert (results[0].view(word) != 0).any()
