"""The simulator of pipelines: against the closed forms, and where there is none its laws.

The forms are those of the papers.  They hold under conditions that the tests name; `make stress`
tries all of them, up to 16 ranks and 64 microbatches.
"""

import gc
import os
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mpidist.errors import InvalidArgument
from mpidist.pipeline.schedules import Costs, F, schedules, simulate

EQUAL, LONG_BACKWARD, UNEQUAL = (1, 1, 1), (2, 3, 1), (5, 4, 3)  # F, I, W; W <= F, I
STRESS = os.environ.get("MPIDIST_TEST_PROFILE") == "stress"


def microbatch_counts(p):
    if STRESS:
        return range(1, 65)
    near = {1, 2, 3, p - 1, p, p + 1, 2 * p - 2, 2 * p - 1, 2 * p, 3 * p + 1}
    return sorted((near | ({64} if p in (4, 16) else set())) - {0})


@pytest.fixture(autouse=True)
def no_collection():
    """Many small tuples that all live: looking for garbage among them doubles the time."""
    gc.disable()
    yield
    gc.enable()


@pytest.mark.parametrize("p", range(1, 17))
class TestClosedForms:
    def test_gpipe_and_1f1b(self, p):
        for m in microbatch_counts(p):
            for f, i, w in (EQUAL, UNEQUAL) if m < 32 else (UNEQUAL,):
                work = f + i + w
                for name in ("gpipe", "1f1b"):
                    line = simulate(name, p, m, costs=(f, i, w))
                    assert line.makespan == (m + p - 1) * work
                    assert line.bubble == pytest.approx((p - 1) / (m + p - 1))
                    assert line.idle == tuple((p - 1 - s) * work for s in range(p))
                    live = [m if name == "gpipe" else min(m, p - s) for s in range(p)]
                    assert line.peak == tuple(live)

    def test_interleaved(self, p):
        f, i, w = LONG_BACKWARD
        for m in microbatch_counts(p):
            for v in (1, 2, 3) if m * p < 200 else (2,):
                line = simulate("interleaved", p, m, v, costs=(f, i, w))
                # For m a multiple of p known from Megatron; ours keeps it for every m >= p.
                turns = m * v + p - 1 if m >= p else p * v + m - 1
                assert line.makespan == turns * (f + i + w)
                group = -(-m // max(1, m // p))
                warm_up = [2 * (p - 1 - s) + (v - 1) * group for s in range(p)]
                assert line.peak == tuple(min(m * v, n + 1) for n in warm_up)
                if m % p == 0:
                    assert group == p

    def test_zb_h1(self, p):
        for m in microbatch_counts(p):
            for f, i, w in (EQUAL, UNEQUAL) if m < 32 else (UNEQUAL,):
                line = simulate("zb-h1", p, m, costs=(f, i, w))
                assert line.peak == (min(m, p),) * p
                if m >= p:
                    assert line.makespan == m * (f + i + w) + (p - 1) * (f + i - w)
                    assert line.idle == tuple((p - 1 - s) * (f + i - w) for s in range(p))

    def test_zb_h2(self, p):
        for m in microbatch_counts(p):
            for f, i, w in (EQUAL, UNEQUAL) if m < 32 else (UNEQUAL,):
                line = simulate("zb-h2", p, m, costs=(f, i, w))
                assert line.peak == (min(m, 2 * p - 1),) * p
                if m >= 2 * p - 1:
                    bubble = max(0, f + i - 2 * w)
                    assert line.idle[0] == (p - 1) * bubble
                    assert line.makespan == m * (f + i + w) + (p - 1) * max(f, bubble)

    def test_zb_v(self, p):
        for m in microbatch_counts(p):
            line = simulate("zb-v", p, m, costs=EQUAL)
            assert max(line.peak) == 2 * min(m, p)  # chunks, each half of what a rank holds
            if m >= 2 * p - 1:
                assert line.idle == (0,) * p and line.peak == (2 * p,) * p
                assert line.makespan == 6 * m + p - 1


def names_and_sizes():
    return st.tuples(
        st.sampled_from([s.name for s in schedules()]), st.integers(1, 6), st.integers(1, 12)
    )


times = st.integers(0, 9)


@given(names_and_sizes(), st.tuples(times, times, times, times), st.integers(0, 3))
def test_costs_that_grow_never_make_it_shorter(case, costs, which):
    name, p, m = case
    more = [c + (3 if k == which else 0) for k, c in enumerate(costs)]
    assert simulate(name, p, m, costs=costs).makespan <= simulate(name, p, m, costs=more).makespan


@given(names_and_sizes(), st.tuples(times, times, times, times))
def test_a_microbatch_more_never_makes_it_shorter(case, costs):
    name, p, m = case
    line, more = simulate(name, p, m, costs=costs), simulate(name, p, m + 1, costs=costs)
    assert line.makespan <= more.makespan


@given(names_and_sizes(), st.randoms(use_true_random=False))
def test_actions_begin_as_early_as_possible(case, rng):
    """An independent reading of the times: the last cause of each action ends when it begins."""
    name, p, m = case
    stages = p * (2 if name in ("interleaved", "zb-v") else 1)
    f, i, w = ([rng.randint(1, 9) for _ in range(stages)] for _ in range(3))
    delay = rng.randint(0, 5)
    line = simulate(name, p, m, costs=Costs(f, i, w, delay))
    ends, owner = {}, {}
    for rank, part in enumerate(line.spans):
        for (x, chunk, kind), _, end in part:
            stage = line.placement.stage(rank, chunk)
            ends["F" if kind == "F" else "W" if kind == "W" else "I", stage, x] = end
            owner[stage] = rank
    for rank, part in enumerate(line.spans):
        before = 0
        for (x, chunk, kind), begin, end in part:
            stage = line.placement.stage(rank, chunk)
            backward = i[stage] + w[stage]
            took = {"F": f[stage], "I": i[stage], "W": w[stage], "B": backward}[kind]
            assert end - begin == took
            source = stage - 1 if kind == "F" else stage + 1 if kind in "BI" else None
            causes = [before]
            if source is not None and 0 <= source < stages:
                message = 0 if owner[source] == rank else delay
                causes.append(ends["F" if kind == "F" else "I", source, x] + message)
            assert begin == max(causes)
            before = end


def test_a_slow_stage_and_slow_messages():
    line = simulate("1f1b", 3, 6, costs=Costs(F=[1, 3, 1], I=1, W=0))
    # Rank 0 before it; the slow stage, which waits once, for the last gradient; rank 0 after it.
    assert line.makespan == 1 + 6 * (3 + 1) + 1 + 1
    near, far = (simulate("gpipe", 4, 8, costs=(1, 1, 1, late)) for late in (0, 10))
    assert far.makespan == near.makespan + 2 * 3 * 10
    v = simulate("zb-v", 1, 2, costs=(1, 1, 1, 10))
    assert v.makespan == 12 and v.idle == (0,)  # nothing is sent


def test_peak_with_split_backward():
    line = simulate("zb-h1", 2, 3)
    rank = [span.action for span in line.spans[0]]
    assert rank.index(F(2)) > next(k for k, a in enumerate(rank) if str(a) == "W(0)")
    assert line.peak == (2, 2)


def test_numbers_of_a_timeline():
    line = simulate("1f1b", 2, 2, costs=(1, 1, 1))
    assert line.busy == (6, 6) and line.makespan == 9 and line.begin == 0
    assert line.bubble == pytest.approx(1 / 3)
    assert simulate("1f1b", 2, 2, costs=(0, 0, 0)).bubble == 0
    shuffled = random.Random(0).sample(range(8), 8)
    assert simulate("gpipe", 8, 1, costs=(shuffled, 0, 0)).makespan == sum(range(8))


def test_costs_that_are_wrong():
    for costs, message in (
        ((1, 2), r"costs=\(1, 2\): "),
        ("111", "costs='111': "),
        ((1, -2, 1), "costs: I=-2: .*>= 0"),
        ((1, 1, float("nan")), "costs: W=nan: "),
        ((1, 1, 1, -1), "costs: message=-1: .*>= 0"),
        (([1, "x"], 1, 1), r"costs: F\[1\]='x': "),
        (([1, 2], 1, 1), r"costs: F .*\b2 times.*\b3\b"),
    ):
        with pytest.raises(InvalidArgument, match=message):
            simulate("gpipe", 3, 2, costs=costs)
