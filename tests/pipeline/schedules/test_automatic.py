"""Schedules computed for the stages' own times, under a cap on live activations."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import mpidist
from mpidist.errors import InvalidArgument, UnknownName, Unsupported
from mpidist.nn import Identity
from mpidist.pipeline import measuring
from mpidist.pipeline.schedules import (
    B,
    Costs,
    F,
    as_schedule,
    automatic,
    prove,
    schedules,
    simulate,
)
from mpidist.pipeline.schedules.schedule import pipeline_schedule, unregister_schedule

# A language model on 4 ranks, cut into 8 parts: six alike; the first is the embedding, which has no
# gradient of its input, the last one the head over the vocabulary with the loss.
RANKS, MICROBATCHES = 4, 8
FORWARD, GRADIENT, WEIGHT = ([a] + [1.0] * 6 + [b] for a, b in ((0.25, 2), (0, 2), (0.5, 1)))
PARTS = Costs(FORWARD, GRADIENT, WEIGHT)
PAIRS = Costs(*([t[k] + t[k + 1] for k in range(0, 8, 2)] for t in (FORWARD, GRADIENT, WEIGHT)))


def fixed(cap):
    """The makespan of every fixed schedule whose live parts of the model fit the cap."""
    found = {}
    for schedule in schedules():
        pairs = schedule.chunks == 1  # a stage is two of the eight parts
        line = simulate(schedule, RANKS, MICROBATCHES, costs=PAIRS if pairs else PARTS)
        if max(line.peak) * (2 if pairs else 1) <= cap:
            found[schedule.name] = line.makespan
    return found


@pytest.mark.parametrize(
    "cap, fitting",
    [
        (12, {"1f1b", "interleaved", "zb-h1", "zb-v"}),
        (16, {"1f1b", "gpipe", "interleaved", "zb-h1", "zb-h2", "zb-v"}),
    ],
)
def test_ten_percent_shorter_than_every_fixed_schedule(cap, fitting):
    others = fixed(cap)
    assert set(others) == fitting
    schedule = automatic(RANKS, MICROBATCHES, PARTS, cap, chunks=2, placement="v")
    line = simulate(schedule, RANKS, MICROBATCHES, costs=PARTS)
    assert max(line.peak) <= cap
    assert line.makespan <= 0.9 * min(others.values())
    assert prove(schedule, RANKS, MICROBATCHES).splits


times = st.lists(st.integers(0, 6), min_size=6, max_size=6)


@given(
    *(st.integers(1, 3), st.integers(1, 7), st.sampled_from([(1, "loop"), (2, "loop"), (2, "v")])),
    *(times, times, times, st.integers(0, 4), st.integers(0, 6), st.booleans()),
)
def test_plans_keep_the_cap_and_beat_fixed_schedules(
    size, microbatches, layout, f, i, w, message, room, splits
):
    chunks, placement = layout
    costs = Costs(f[: size * chunks], i[: size * chunks], w[: size * chunks], message)
    cap = chunks + room
    plan = automatic(size, microbatches, costs, cap, chunks, placement, splits)
    proof = prove(plan, size, microbatches)
    assert max(proof.peak) <= cap and (splits or not proof.splits)
    line = simulate(plan, size, microbatches, costs=costs)
    for known in schedules():
        if (known.chunks, known.placement) == (chunks, placement) and (splits or not known.splits):
            other = simulate(known, size, microbatches, costs=costs)
            if max(other.peak) <= cap:
                assert line.makespan <= other.makespan


def test_the_same_on_every_rank():
    plans = [automatic(3, 5, (1, [1, 2, 1], 0.5), 4) for _ in range(2)]
    orders = [[plan.actions(rank, 3, 5) for rank in range(3)] for plan in plans]
    assert orders[0] == orders[1]


def test_rank_0_plans_for_all(monkeypatch):
    """As where a schedule is registered on some of them only: rank 0 computes."""
    calls = []

    def moody(*given):
        calls.append(given)
        return as_schedule("1f1b" if len(calls) % 2 else "gpipe")

    def job(comm):
        pipe, x = mpidist.Pipeline(Identity(), comm, 3, "auto", max_live=3), np.ones((6, 2))
        for _ in range(6):
            assert pipe.step(x, x, lambda y, t: (float(y.sum()), y), reduction="mean") == 4.0
        return [step.action for part in pipe._executor.plan.steps for step in part]

    monkeypatch.setattr(measuring, "automatic", moody)
    first, *others = mpidist.run_simulated(3, job)
    assert len(calls) == 2 and all(plan == first for plan in others)

    def fails(*given):
        raise ArithmeticError("not here")

    def refused(comm):
        kind = InvalidArgument if comm.rank else ArithmeticError
        with pytest.raises(kind, match="rank 0: .*not here" if comm.rank else "not here"):
            mpidist.Pipeline(Identity(), comm, 3, "auto")
        comm.barrier()

    monkeypatch.setattr(measuring, "automatic", fails)
    mpidist.run_simulated(3, refused)


def test_caps():
    equal = Costs()
    assert max(prove(automatic(4, 9, equal), 4, 9).peak) <= 4
    assert simulate(automatic(4, 9, equal), 4, 9).makespan == simulate("zb-h1", 4, 9).makespan
    assert prove(automatic(3, 6, equal, 1), 3, 6).peak == (1, 1, 1)
    falling = prove(automatic(3, 6, equal, [3, 2, 1]), 3, 6).peak
    assert all(peak <= cap for peak, cap in zip(falling, (3, 2, 1)))
    wide, narrow = (simulate(automatic(4, 9, equal, cap), 4, 9).makespan for cap in (9, 2))
    assert wide < narrow


def test_registered_schedules_are_candidates():
    taken = []

    @pipeline_schedule("one-at-a-time", splits=False)
    def one(rank, size, microbatches):
        taken.append(rank)
        for m in range(microbatches):
            yield from (F(m), B(m))

    @pipeline_schedule("backwards", splits=False)
    def backwards(rank, size, microbatches):
        yield from (B(0), F(0))

    @pipeline_schedule("fails", splits=False)
    def fails(rank, size, microbatches):
        yield F(0)
        raise ArithmeticError(rank)

    try:
        assert prove(automatic(2, 3, Costs(), 1, splits=False), 2, 3).peak == (1, 1)
        assert taken == [0, 1]
    finally:
        unregister_schedule("one-at-a-time")
        unregister_schedule("backwards")
        unregister_schedule("fails")


def test_what_it_cannot_do():
    plan = automatic(3, 4, Costs())
    with pytest.raises(Unsupported, match=r"auto: .*\b3 ranks and 4 microbatches"):
        prove(plan, 3, 5)
    assert replace(plan, name="mine").actions(0, 3, 4) == plan.actions(0, 3, 4)
    for arguments, message in (
        ((2, 2, Costs(), 0), "cap=0: .*>= 1"),
        ((2, 2, Costs(), 1, 2), "cap=1: .*>= 2"),
        ((2, 2, Costs(), [1, 2, 3]), r"cap=\[1, 2, 3\]: .*\b2 ranks"),
        ((2, 2, Costs(), 1.5), "cap=1.5: "),
        ((2, 2, Costs(), "22"), "cap='22': "),
        ((0, 2, Costs()), "size=0: "),
        ((2, 2, Costs([1, 2, 3])), r"\bF .*\b3 times.*\b2\b"),
    ):
        with pytest.raises(InvalidArgument, match=message):
            automatic(*arguments)
    with pytest.raises(UnknownName, match="placement 'w'"):
        automatic(2, 2, Costs(), placement="w")
