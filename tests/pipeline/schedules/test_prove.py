"""The prover of pipelines: what it shows of good schedules, and what it says of broken ones."""

from functools import partial

import pytest

from mpidist.errors import InvalidArgument, ScheduleError
from mpidist.pipeline.schedules import (
    B,
    F,
    I,
    PipelineSchedule,
    Placement,
    W,
    as_schedule,
    derive,
    pipeline_schedule,
    prove,
)
from mpidist.pipeline.schedules.messages import Message, with_messages
from mpidist.pipeline.schedules.prove import prove_parts
from mpidist.pipeline.schedules.schedule import unregister_schedule


def test_messages_by_placement():
    loop = derive("interleaved", 2, 2)
    turn = next(step for step in loop[1] if step.action == F(0))
    activation, gradient = (partial(Message, kind=kind) for kind in ("activation", "gradient"))
    assert turn.receive == activation(source=0, target=1, stage=1, microbatch=0)
    assert turn.sends == (activation(source=1, target=0, stage=2, microbatch=0),)
    assert not turn.sends[0].local
    v = derive("zb-v", 2, 3)
    down = next(step for step in v[1] if step.action == F(0))
    assert down.sends == (activation(source=1, target=1, stage=2, microbatch=0),)
    assert down.sends[0].local
    back = next(step for step in v[1] if step.action == I(0, 1))
    assert back.receive == gradient(source=0, target=1, stage=2, microbatch=0)
    assert back.sends == (gradient(source=1, target=1, stage=1, microbatch=0),)
    assert back.sends[0].local
    assert all(step.receive is None and not step.sends for step in v[0] if step.action.kind == "W")
    ends = [step for step in v[0] if step.action in (F(0), I(0, 1))]
    assert [step.receive for step in ends] == [None, None]
    source, target, stage, kind = ends[0].sends[0].edge
    assert (source, target, stage, kind) == (0, 1, 1, "activation")


def one_rank_different(actions, rank=0, like="1f1b", splits=None):
    """A schedule that is as `like`, but on one rank."""

    def broken(which, size, microbatches):
        if which == rank:
            return actions
        return as_schedule(like).function(which, size, microbatches)

    return PipelineSchedule("broken", broken, splits=splits)


BROKEN = {
    "missing F": (
        [F(0), B(0), B(1)],
        "rank 0, stage 0, step 2: B(1) comes before F(1)",
    ),
    "missing B": (
        [F(0), F(1), B(0)],
        "rank 0, stage 0, step 3: ends without B(1), or I(1) and W(1)",
    ),
    "missing W": (
        [F(0), F(1), I(0), W(0), I(1)],
        "rank 0, stage 0, step 5: ends without W(1): I(1) is only the first half of backward",
    ),
    "missing microbatch": (
        [F(0), B(0)],
        "rank 0, stage 0, step 2: ends without F(1)",
    ),
    "nothing": ([], "rank 0, stage 0, step 0: ends without F(0)"),
    "F twice": (
        [F(0), F(1), F(0), B(0), B(1)],
        "rank 0, stage 0, step 2: F(0) is done again: step 0 did it",
    ),
    "B twice": (
        [F(0), B(0), F(1), B(1), B(0)],
        "rank 0, stage 0, step 4: B(0) is done again: step 1 did it",
    ),
    "B after I": (
        [F(0), F(1), I(0), B(0), B(1)],
        "rank 0, stage 0, step 3: B(0) is done again: step 2, I(0), has computed that gradient",
    ),
    "I after B": (
        [F(0), F(1), B(0), I(0), B(1)],
        "rank 0, stage 0, step 3: I(0) is done again: step 2, B(0), has computed that gradient",
    ),
    "B before F": (
        [B(0), F(0), F(1), B(1)],
        "rank 0, stage 0, step 0: B(0) comes before F(0)",
    ),
    "W before I": (
        [F(0), F(1), W(0), I(0), B(1)],
        "rank 0, stage 0, step 2: W(0) comes before I(0)",
    ),
    "no such microbatch": (
        [F(0), F(2), B(0), B(2)],
        "rank 0, stage 0, step 1: F(2): there are microbatches 0 … 1",
    ),
    "negative microbatch": (
        [F(0), F(-1)],
        "rank 0, stage 0, step 1: F(-1): there are microbatches 0 … 1",
    ),
    "no such chunk": (
        [F(0), F(1, 1)],
        "rank 0, stage 0, step 1: F(1, chunk=1): there are chunks 0 … 0",
    ),
    "no action": (
        [F(0), "B(0)"],
        "rank 0, stage 0, step 1: yields 'B(0)'; it must yield F, B, I or W of mpidist.pipeline",
    ),
    "a plain tuple": (
        [(0, 0, "F")],
        "rank 0, stage 0, step 0: yields (0, 0, 'F'); it must yield F, B",
    ),
    "no generator": (
        None,
        "rank 0: pipeline schedule broken returned None; it must yield its actions",
    ),
}


@pytest.mark.parametrize("case", BROKEN)
def test_a_broken_rank_is_named(case):
    actions, message = BROKEN[case]
    with pytest.raises(ScheduleError) as failure:
        prove(one_rank_different(actions), 2, 2)
    assert message in str(failure.value)
    assert failure.value.rank == 0
    assert actions is None or (failure.value.stage, failure.value.step is None) == (0, False)


def test_a_generator_that_fails():
    """On the way, and with chunks of which it does not say which one it is about."""

    def failing(rank, size, microbatches, *, chunks=2):
        yield F(0, rank)
        raise KeyError("what")

    with pytest.raises(ScheduleError, match="rank 0, step 1: .*KeyError: 'what'"):
        prove(failing, 2, 2)
    with pytest.raises(ScheduleError, match="rank 0, stage 0, step 1: .*KeyError: 'what'"):
        prove(failing, 2, 2, 1)

    def at_once(rank, size, microbatches):
        return [F(0), B(0)][rank + 2]

    with pytest.raises(ScheduleError, match="rank 0, stage 0, step 0: .*IndexError"):
        prove(at_once, 2, 2)

    def odd(rank, size, microbatches, *, chunks="two"):
        yield F(0)

    with pytest.raises(InvalidArgument, match="schedule=odd: .*chunks='two'"):
        prove(odd, 2, 2)
    crooked = one_rank_different([F(0), F(7)], rank=1, like="gpipe")
    with pytest.raises(ScheduleError, match=r"rank 1, stage 1, step 1: F\(7\): .*\b3\b"):
        prove(crooked, 2, 4)


def test_a_split_that_was_not_declared():
    broken = one_rank_different([F(0), I(0), W(0)], splits=False)
    with pytest.raises(ScheduleError, match=r"rank 0, stage 0, step 1: I\(0\).*splits"):
        prove(broken, 2, 1)
    assert prove(one_rank_different([F(0), I(0), W(0)]), 2, 1).splits


def test_messages_out_of_order():
    with pytest.raises(ScheduleError) as failure:
        prove(one_rank_different([F(1), F(0), B(1), B(0)], rank=1), 3, 2)
    assert str(failure.value) == (
        "rank 1, stage 1, step 0: F(1) takes message 0 from rank 0 for its activation, but that is "
        "of microbatch 0, sent by step 0: messages from one stage to another keep their order"
    )
    with pytest.raises(ScheduleError) as failure:
        prove(one_rank_different([F(0), F(1), B(1), B(0)], rank=1), 3, 2)
    assert str(failure.value) == (
        "rank 0, stage 0, step 2: B(0) takes message 0 from rank 1 for its gradient, but that is "
        "of microbatch 1, sent by step 2: messages from one stage to another keep their order"
    )
    assert (failure.value.rank, failure.value.stage, failure.value.step) == (0, 0, 2)


def test_a_deadlock_names_the_circle():
    eager = one_rank_different([F(0), B(0), F(1), B(1)], rank=1, like="gpipe")

    def deadlocked(rank, size, microbatches):
        order = eager.function(rank, size, microbatches)
        return order if rank == 1 else [F(0), F(1), B(0), B(1)]

    with pytest.raises(ScheduleError) as failure:
        prove(deadlocked, 3, 2)
    assert str(failure.value) == (
        "rank 1, stage 1, step 1: deadlock: rank 1 at step 1, B(0), waits for the gradient from "
        "rank 2, which sends it by step 2, B(0); rank 2 at step 1, F(1), waits for the activation "
        "from rank 1, which sends it by step 2, F(1)"
    )


def test_a_deadlock_around_three_ranks():
    """Stage 3 on rank 0 comes too early, and the stages between wait for it."""

    @pipeline_schedule("round", chunks=2)
    def around(rank, size, microbatches):
        first = [F(0, 1), F(0, 0)] if rank == 0 else [F(0, 0), F(0, 1)]
        yield from [*first, B(0, 1), B(0, 0)]

    try:
        with pytest.raises(ScheduleError) as failure:
            prove("round", 3, 1)
    finally:
        unregister_schedule("round")
    assert str(failure.value) == (
        "rank 0, stage 3, step 0: deadlock: rank 0 at step 0, F(0, chunk=1), waits for the "
        "activation from rank 2, which sends it by step 0, F(0); rank 2 at step 0, F(0), waits for "
        "the activation from rank 1, which sends it by step 0, F(0); rank 1 at step 0, F(0), waits "
        "for the activation from rank 0, which sends it by step 1, F(0)"
    )


def test_a_rank_that_waits_for_itself():
    parts = with_messages([[F(0, 1), F(0), B(0, 1), B(0)]], Placement(1, 2, "v"))
    with pytest.raises(ScheduleError) as failure:
        prove_parts("own", parts, Placement(1, 2, "v"), 1)
    assert str(failure.value) == (
        "rank 0, stage 1, step 0: deadlock: rank 0 at step 0, F(0, chunk=1), waits for the "
        "activation from this rank itself, which sends it by step 1, F(0)"
    )


def test_local_messages_need_no_order():
    """On the rank where the V turns, chunk 1 may take microbatches in another order."""
    turned = [F(0), F(1), F(1, 1), F(0, 1), B(1, 1), B(0, 1), B(0), B(1)]
    place = Placement(1, 2, "v")
    assert prove_parts("turned", with_messages([turned], place), place, 2).messages == 0
