"""What is measured when ways are tried out, and what is chosen by it."""

from dataclasses import replace
from functools import partial
from types import SimpleNamespace

import numpy as np
import pytest

from mpidist.calls.call import Call
from mpidist.engine import trial
from mpidist.operations import OPS, find_op
from mpidist.schedule.registry import find
from mpidist.selection.calibration import Calibration
from mpidist.selection.choose import Candidates, Means, choose
from mpidist.selection.config import CollectiveConfig
from mpidist.selection.estimates import TRIED_TO, Estimates
from mpidist.selection.tuning import Key, TuningEntry, TuningTable

ONE_NODE = ((0, 1),)
WAYS = ("staged", "native", "single_copy")


def call_of(nbytes, collective="allreduce", op="sum", x=None, out=None):
    x = np.broadcast_to(np.zeros(1, "uint8"), (nbytes,)) if x is None else x
    op = OPS[op] if isinstance(op, str) else op
    return Call(collective, 0, 2, 0, x.dtype, x, x if out is None else out, op)


def means_of(groups=ONE_NODE, crowded=False, **reasons):
    private = {"native": None, "symmetric": "private", "staged": None, "single_copy": None}

    def schedules(name):
        runs = {"staged": "slots", "single_copy": "published"}.get(name)
        return [find("allreduce", runs)] if runs else ()

    rivals = {"symmetric": ("staged",)}.__getitem__
    return Means(groups, private | reasons, crowded, schedules=schedules, rivals=rivals)


def chosen(call, estimates, means=None, config=None, algorithm="auto"):
    candidates = Candidates(call, means_of() if means is None else means)
    return choose(candidates, algorithm, config or CollectiveConfig(), estimates)


def estimates_of(groups=ONE_NODE, calibrates=True, **more):
    return Estimates("Open MPI 5", groups, calibrates, **more)


def test_a_turn_is_its_slowest_rank_and_a_way_its_fastest_turn():
    times = np.array([[[3.0, 9.0], [5.0, 1.0]], [[4.0, 2.0], [1.0, 8.0]]])
    assert trial.least(times) == [4.0, 8.0]


def test_long_calls_are_tried_less_often():
    turns = [sum(trial.rows_of(1 << k)) for k in range(31)]
    assert turns == sorted(turns, reverse=True)
    assert (max(turns), min(turns)) == (8, 3)


def test_a_way_far_behind_gets_no_further_turns():
    assert trial.near({"one": 1.0, "two": 1.9, "three": 2.1}) == ["one", "two"]
    assert trial.near({"one": 1e-5, "two": 2e-4, "three": 3e-4}) == ["one", "two"]
    for times in ({"one": 1.0, "two": 2.1}, {"one": 1.0}, {}):
        assert trial.near(times) == []


def test_each_way_is_served_in_rows_and_on_new_input():
    x, seen = np.ones(5), []

    def within(name):
        seen.append((name, *x.tolist()))
        x.fill(1)

    ways = {name: SimpleNamespace(within=partial(within, name)) for name in ("one", "two")}
    times = trial.times_of(call_of(40, x=x, out=np.zeros(5)), ways, (3, 2))
    rows = [*["one"] * 3, *["two"] * 3, *["one"] * 2, *["two"] * 2]
    assert seen == [(name, 0, 0, 0, 0, 0) for name in rows]
    assert times.shape == (3, 2) and (times > 0).all()  # without the first turn of each row


def sizes(call):
    return [None if data is None else data.size for data in (call.x, call.out)]


def test_long_calls_are_tried_on_shorter_arrays():
    most = TRIED_TO // 8
    floats = np.broadcast_to(np.zeros(1), (4 * most,))
    call = trial.shortened(call_of(0, x=floats))
    assert sizes(call) == [most, most] and call.nbytes == TRIED_TO
    short = call_of(0, x=floats[:most])
    assert trial.shortened(short) is short
    counts = (most, 3 * most)
    for rank, root in ((0, 0), (0, 1), (1, 1)):
        part, whole = floats[: counts[rank]], floats if rank == root else None
        for collective, x, out in (("gather", part, whole), ("scatter", whole, part)):
            arguments = (collective, rank, 2, root, floats.dtype, x, out, None, counts, counts)
            long = Call(*arguments, even=False)
            call = trial.shortened(long)
            assert call.counts == call.out_counts == (most // 4, 3 * most // 4), collective
            fewer = [None if size is None else size // 4 for size in sizes(long)]
            assert sizes(call) == fewer and call.nbytes == TRIED_TO


def test_the_first_call_of_a_size_tries_what_can_serve_it():
    estimates = estimates_of()
    first = chosen(call_of(64 << 10), estimates)
    assert (first.name, first.untried) == ("staged", WAYS)
    assert first.why.startswith("shipped rule")
    estimates.learn_trial(
        call_of(64 << 10), "private", {"staged": 3e-6, "native": 2e-6, "single_copy": 4e-6}
    )
    second = chosen(call_of(64 << 10), estimates)
    assert (second.name, second.untried) == ("native", ())
    assert second.why == (
        "measured, in this job: native 2.000 µs, staged 3.000 µs, single_copy 4.000 µs"
    )


def test_what_the_rules_name_stands_unless_another_is_clearly_faster():
    for native, name in ((2.9e-6, "staged"), (2.8e-6, "native")):
        estimates = estimates_of()
        times = {"staged": 3e-6, "native": native, "single_copy": 9e-6}
        estimates.learn_trial(call_of(64 << 10), "private", times)
        found = chosen(call_of(64 << 10), estimates)
        assert found.name == name
        kept = "the rules name staged, and nothing is clearly faster"
        assert found.why.endswith(kept) == (name == "staged")


@pytest.mark.parametrize(("nbytes", "tries"), [(4 << 20, True), (5 << 20, False), (1 << 30, False)])
def test_long_symmetric_calls_are_not_tried(nbytes, tries):
    means = means_of(symmetric=None)
    assert bool(chosen(call_of(nbytes), estimates_of(), means).untried) is tries


def test_sizes_share_a_trial_with_the_nearest_power_of_two():
    estimates = estimates_of()
    times = dict.fromkeys(WAYS, 1e-6)
    estimates.learn_trial(call_of(64 << 10), "private", times)
    assert not chosen(call_of(80 << 10), estimates).untried
    assert chosen(call_of(100 << 10), estimates).untried
    estimates.learn_trial(call_of(4 << 20), "private", times)
    longer = chosen(call_of(1 << 30), estimates)
    assert not longer.untried and longer.why.startswith("measured, in this job, of 4M: ")
    floats = np.broadcast_to(np.zeros(1, "float32"), (16 << 10,))
    for other in (call_of(0, x=floats), call_of(64 << 10, "broadcast", None)):
        assert chosen(other, estimates).untried


def test_a_way_that_could_not_serve_the_first_call_is_tried_later():
    """A call of more than a slot, and one of less, are nearest to the same power of two."""
    estimates, long = estimates_of(), means_of(staged="too long")
    assert chosen(call_of(5 << 19), estimates, long).untried == ("single_copy", "native")
    estimates.learn_trial(call_of(5 << 19), "private", {"single_copy": 4e-6, "native": 3e-6})
    assert chosen(call_of(5 << 19), estimates, long).name == "native"
    assert chosen(call_of(3 << 19), estimates).untried == ("staged",)
    estimates.learn_trial(call_of(3 << 19), "private", {"staged": 2e-6, "native": 9e-6})
    assert chosen(call_of(3 << 19), estimates).name == "staged"
    assert chosen(call_of(5 << 19), estimates, long).name == "native"


def test_a_way_that_cannot_serve_is_not_taken():
    estimates = estimates_of()
    estimates.learn_trial(
        call_of(2 << 20), "private", {"staged": 1e-6, "native": 3e-6, "single_copy": 2e-6}
    )
    found = chosen(call_of((2 << 20) + 8), estimates, means_of(staged="too long"))
    assert found.name == "single_copy"


@pytest.mark.parametrize(
    ("call", "means", "how"),
    [
        (call_of((16 << 10) - 1), {}, {}),
        (call_of(64 << 10, op=find_op(np.fmax)), {}, {}),
        (call_of(64 << 10), {"symmetric": None, "staged": "no memory"}, {}),
        (
            call_of(64 << 10),
            {"native": "not today"},
            {"calibration": Calibration.straight(1, 1, 1)},
        ),
        (call_of(64 << 10), {"staged": "no memory", "single_copy": "no memory"}, {}),
        (call_of(64 << 10), {"crowded": True}, {}),
        (call_of(64 << 10), {}, {"calibrates": False}),
    ],
    ids=[
        "short",
        "a user's function",
        "symmetric",
        "no rival",
        "alone",
        "crowded",
        "turned off",
    ],
)
def test_rules_decide_where_nothing_is_tried(call, means, how):
    assert not chosen(call, estimates_of(**how), means_of(**means)).untried


def test_what_the_user_asks_for_is_not_tried():
    call, estimates = call_of(64 << 10), estimates_of()
    assert not chosen(call, estimates, algorithm="native").untried
    asked = CollectiveConfig(local_allreduce="ring")
    assert not chosen(call, estimates, config=asked).untried
    key = Key("Open MPI 5", (2,), "int", "allreduce", "private")
    entry = TuningEntry.from_points(key, {1024: "native"}, {1024: {"native": 1e-6}})
    assert not chosen(call, estimates_of(tuning=TuningTable([entry]))).untried


def test_symmetric_arrays_try_private_ways_where_the_rules_name_one():
    means = means_of(symmetric=None, single_copy="moves data only")
    for nbytes, untried in (
        (20 << 10, ("staged", "native", "published")),
        (40 << 10, ("symmetric", "staged")),
    ):
        call = call_of(nbytes, "gather", None)
        call.counts = call.out_counts = (nbytes // 2,) * 2
        means = replace(means, cannot_run=lambda choice: None)
        assert chosen(call, estimates_of(), means).untried == untried


def test_several_nodes_keep_their_rules():
    groups = ((0,), (1,))
    found = chosen(call_of(64 << 10), estimates_of(groups), means_of(groups, staged="two nodes"))
    assert not found.untried


def test_a_table_may_leave_a_call_open():
    key = Key("Open MPI 5", (2,), "int", "allreduce", "private")
    entry = TuningEntry.from_points(key, {1024: "native", 65536: "auto"}, {1024: {"native": 1e-6}})
    estimates = estimates_of(tuning=TuningTable([entry], source="t.json"))
    found = chosen(call_of(64 << 10), estimates)
    assert found.untried == WAYS
    assert found.why.endswith("; the tuning table t.json leaves it open")
    times = {"staged": 3e-6, "native": 2e-6, "single_copy": 4e-6}
    estimates.learn_trial(call_of(64 << 10), "private", times)
    found = chosen(call_of(64 << 10), estimates)
    assert (found.name, found.tried) == ("native", True)
    assert chosen(call_of(512), estimates).why == "tuning table t.json: native below 8 KiB"
