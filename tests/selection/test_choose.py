"""Who goes before whom in the choice: the user, the table, the calibrated model, the rules."""

from dataclasses import replace

import numpy as np
import pytest

from mpidist import CollectiveConfig, Op, run_simulated
from mpidist.errors import Unsupported
from mpidist.operations import find_op
from mpidist.schedule.cost import Link, Sharing
from mpidist.schedule.registry import find
from mpidist.selection import choose as selection
from mpidist.selection.calibration import Calibration
from mpidist.selection.choose import Candidates, choose, why_not
from mpidist.selection.estimates import DECIDED_TO, Rival
from mpidist.selection.tuning import Key
from tests.support.choices import KNOWN, MEANS, advised, call_for, chosen, full, means_of, table


def test_precedence():
    """What the call asks for, then the configuration, then the tuning table, then shipped rules."""
    small, config = call_for(16), CollectiveConfig(local_allreduce="ring")
    assert chosen(None, small).name == "recursive_doubling"
    tuned = chosen(table(), small)
    assert tuned.name == "tree:4" and tuned.choice.arity == 4
    assert tuned.why == "tuning table t.json: tree:4 below 256 B"
    assert chosen(table(), small, config=config).why == "the configuration asks for it"
    assert chosen(table(), small, "linear", config).why == "the call asks for it"
    assert chosen(table(), call_for(1 << 20)).why == "tuning table t.json: ring from 256 B on"


def test_unusable_entry_falls_back_to_the_rules():
    table_of_native = table({64: "native"})
    candidate = chosen(table_of_native, call_for(16))
    assert candidate.name == "recursive_doubling"
    assert candidate.why.endswith(
        "; the tuning table t.json names native, but there is no native here"
    )
    able = means_of()
    assert chosen(table_of_native, call_for(16), means=able).name == "native"
    late = Op(np.subtract, commute=False, name="late", builtin=True)
    candidate = chosen(table({64: "ring"}), call_for(16, late))
    assert (
        candidate.name == "recursive_doubling"
        and "ring combines out of rank order" in candidate.why
    )


def test_terms_that_must_be_combined_at_once_are_served_by_what_says_so():
    call = call_for(16, "exact_sum")
    assert chosen(None, call).name == "direct"
    for name in ("ring", "linear", "hierarchical/direct/ring"):
        with pytest.raises(Unsupported, match=f"{name}.*'exact_sum'.*at once.*direct"):
            chosen(None, call, name)
    with pytest.raises(Unsupported, match="ring.*'exact_sum'.*at once"):
        chosen(None, call, config=CollectiveConfig(local_allreduce="ring"))


def test_a_fixed_tree_is_served_by_what_combines_so_for_the_number_of_ranks():
    for size, able in ((4, True), (5, False), (6, True), (8, True)):
        call = call_for(16, find_op("sum", order="tree"), size=size)
        assert chosen(None, call).name == ("recursive_doubling" if able else "direct")
        if not able:
            message = "recursive_doubling.*'sum' in order='tree': .*groups 5 ranks.*direct"
            with pytest.raises(Unsupported, match=message):
                chosen(None, call, "recursive_doubling")
        with pytest.raises(Unsupported, match="ring.*'sum' in order='tree'"):
            chosen(None, call, "ring")


def test_symmetric_memory_has_entries_of_its_own():
    key = Key("simulated", (4,), "float", "allreduce", "symmetric")
    both = table({64: "ring"}).merged(table({64: "symmetric"}, key=key))
    shared = means_of(symmetric=None)
    assert chosen(both, call_for(16), means=shared).name == "symmetric"
    assert chosen(both, call_for(16)).name == "ring"


def test_calibrated_cost_model_chooses():
    """With a latency of 10 ms recursive doubling stays ahead far above the shipped threshold."""
    slow = Calibration.straight(1e-2, 1e-9, 1e-10)
    call = call_for(1 << 18)
    assert chosen(None, call).name == "ring"
    candidate = chosen(None, call, calibration=slow)
    assert candidate.name == "recursive_doubling" and candidate.why.startswith("cost model: ")
    assert chosen(None, call, calibration=KNOWN).name == "ring"
    able = means_of()
    assert chosen(None, call_for(16), means=able, calibration=slow).name == "native"


def test_the_cheapest_of_all_that_can_serve():
    """Shared memory beside messages, if the library cannot; the rules if a time is unknown."""
    near = Sharing.straight(1e-6, 1e-10, 1e-10, 0.0, 1e-9, 1 << 20)
    able, call = means_of(native="not today", staged=None), call_for(1 << 12)
    known = replace(KNOWN, mapped=near)
    candidate = chosen(None, call, means=able, calibration=known)
    assert candidate.name == "staged" and candidate.why.startswith("cost model: staged (as slots")
    busy = replace(known, mapped=replace(near, meeting=1.0))
    candidate = chosen(None, call, means=able, calibration=busy)
    assert candidate.choice is not None and candidate.why.startswith("cost model: ")
    candidate = chosen(None, call, means=able, calibration=KNOWN)
    assert candidate.name == "staged" and candidate.why.startswith("shipped rule: ")


NATIVE = ("native", "allreduce")


def test_a_full_calibration_chooses_among_all_that_can_serve():
    """The library's own and kernels too, in place of rules and trials; messages by their curves."""
    call, able = call_for(1 << 14), means_of(staged=None)
    quick = full({NATIVE: 1e-6, ("staged", "allreduce"): 2e-6})
    candidate = chosen(None, call, means=able, calibration=quick, calibrates=True)
    assert candidate.name == "native" and candidate.why.startswith("cost model: native 1.0")
    assert not candidate.untried and "staged 2.0" in candidate.why
    slow = full({NATIVE: 1.0, ("staged", "allreduce"): 2.0})
    candidate = chosen(None, call, means=able, calibration=slow)
    estimates = advised(None, calibration=slow)
    flat = [one for one in Candidates(call, able).every() if one.can and one.choice]
    times = {one.name: estimates.expected(call, one.name, [one.choice])[0] for one in flat}
    assert candidate.choice is not None and times[candidate.name] == min(times.values())
    assert candidate.why.endswith(f" and {len(flat) - 4} more"), "two levels are on several nodes"
    assert chosen(None, call, means=means_of(), calibration=quick).name == "native"


def test_a_full_calibration_leaves_what_the_rules_name_where_it_is_close():
    able = means_of(staged=None)
    for native, name in ((0.96e-6, "staged"), (0.94e-6, "native")):
        known = full({NATIVE: native, ("staged", "allreduce"): 1e-6})
        assert chosen(None, call_for(64), means=able, calibration=known).name == name


def test_a_full_calibration_of_symmetric_arrays_compares_what_ranks_know_of_each_other():
    kernels = {NATIVE: 1e-9, ("symmetric", "allreduce"): 3e-6, ("staged", "allreduce"): 1e-6}
    able = means_of(symmetric=None, staged=None)
    assert chosen(None, call_for(1 << 16), means=able, calibration=full(kernels)).name == (
        "symmetric"
    ), "the call may be in place on some ranks"
    apart = replace(able, rivals=lambda name: ("staged",) if name == "symmetric" else ())
    assert chosen(None, call_for(1 << 16), means=apart, calibration=full(kernels)).name == "staged"


@pytest.mark.parametrize(
    ("how", "call", "means"),
    [
        ({}, call_for(64, dtype="int32"), {}),
        ({}, call_for(64, dtype="float16"), {}),
        ({}, call_for(64, Op(np.fmax, name="largest")), {}),
        ({}, call_for(64, find_op("sum", order="tree")), {}),
        ({}, call_for(64), {"crowded": True}),
        ({}, call_for(DECIDED_TO // 4 + 1), {}),
        ({"ranks_per_node": (2,)}, call_for(64), {}),
        ({"kernels": ()}, call_for(64), {}),
    ],
    ids=["int", "half", "a user's function", "tree", "crowded", "long", "other ranks", "not full"],
)
def test_a_full_calibration_says_nothing_of_other_calls(how, call, means):
    known = replace(full({NATIVE: 1e-9, ("staged", "allreduce"): 1e-6}), **how)
    able = replace(means_of(staged=None), **means)
    with_it = chosen(None, call, means=able, calibration=known)
    assert with_it == chosen(None, call, means=able)
    assert with_it.why.startswith("shipped rule: "), with_it


def test_a_full_calibration_without_the_time_of_the_rules_choice_does_not_choose():
    able = means_of(staged=None)
    candidate = chosen(None, call_for(64), means=able, calibration=full({NATIVE: 1e-9}))
    assert candidate.name == "staged" and candidate.why.startswith("shipped rule: ")


@pytest.mark.parametrize("prior", ["ring", "direct"])
def test_what_the_rules_name_stands_where_it_is_close(prior):
    """Ring and direct take equally long; linear takes several times that."""
    estimates, call = advised(None, calibration=KNOWN), call_for(1 << 16)
    for names in (("ring", "direct", "linear"), ("linear", "direct", "ring")):
        rivals = [Rival(n, [find("allreduce", n)], n == prior) for n in names]
        assert estimates.cheapest(call, rivals)[0] == prior
        rivals = [Rival(n, [find("allreduce", n)], n == "linear") for n in names]
        assert estimates.cheapest(call, rivals)[0] != "linear"
    assert estimates.cheapest(call, rivals[:1]) is None
    wide = advised(None, ((0, 1),), calibration=Calibration.straight(1e-5, 1e-9, 0.0))
    rivals = [Rival(n, [find("allreduce", n)], n == "ring") for n in ("recursive_doubling", "ring")]
    name, why = wide.cheapest(call_for(1 << 16, size=2), rivals)
    assert name == "ring" and why.endswith("; the rules name ring, and nothing is clearly faster")


FAR = Calibration.straight(1e-6, 3e-10, 1e-10, Link(1e-4, 8e-9))
NODES = tuple(tuple(range(8 * k, 8 * k + 8)) for k in range(8))


def test_a_full_calibration_of_two_nodes_chooses_among_levels_too():
    """All algorithms and the library's own time; as a configuration counts nodes, the rules."""
    two, call = ((0, 1), (2, 3)), call_for(1 << 18)
    means = means_of(two)
    link = Link(138e-6, 8.6e-9).messages
    slow = full({NATIVE: 1.0}, (2, 2), far=link)
    candidate = chosen(None, call, means=means, groups=two, calibration=slow)
    assert candidate.choice is not None and candidate.choice.algorithm.local, candidate.why
    assert candidate.why.startswith("cost model: hierarchical")
    quick = full({NATIVE: 1e-9}, (2, 2), far=link)
    assert chosen(None, call, means=means, groups=two, calibration=quick).name == "native"
    other = means_of(((0, 1, 2), (3,)))
    candidate = chosen(None, call, means=other, groups=two, calibration=quick)
    assert candidate.why.startswith("shipped rule"), "of other nodes the times say nothing"


def test_a_full_calibration_of_many_ranks_compares_two_levels_on_fewer():
    known = full({NATIVE: 1e-9}, (8,) * 8, far=Link(138e-6, 8.6e-9).messages)
    call, means = call_for(1 << 16, size=64), means_of(NODES)
    candidate = chosen(None, call, means=means, groups=NODES, calibration=known)
    assert candidate.why.startswith("cost model with the measured links: native"), candidate.why
    assert "of 16 ranks on 4 nodes" in candidate.why


@pytest.mark.parametrize("groups", [((0, 1), (2, 3)), NODES], ids=["4 ranks", "64 ranks"])
def test_measured_links_decide_between_nodes(groups):
    """Two levels over a link that is slower than memory; over one that is alike native, or a ring.

    Where it is close, what the shipped rules name stands.
    """
    slow = Calibration.straight(1.5e-6, 3e-10, 1e-10, Link(138e-6, 8.6e-9))
    alike = Calibration.straight(1.5e-6, 3e-10, 1e-10, Link(1.6e-6, 3.1e-10))
    call, means = call_for(1 << 16, size=sum(map(len, groups))), means_of(groups)
    two = "hierarchical" if len(groups) > 2 else "hierarchical/direct/recursive_doubling"
    for known, name in ((slow, two), (alike, "native"), (None, two)):
        candidate = chosen(None, call, means=means, groups=groups, calibration=known)
        assert candidate.name == name, candidate.why
        assert ("cost model with the measured links" in candidate.why) == (known is not None)
        assert ("of 16 ranks on 4 nodes" in candidate.why) == (
            known is not None and groups is NODES
        )
    without = means_of(groups, "this has none")
    assert chosen(None, call, means=without, groups=groups, calibration=slow).name == two
    assert chosen(None, call, means=without, groups=groups, calibration=alike).name == "ring"
    # As a configuration counts nodes, between which nothing was measured.
    assert chosen(None, call, means=means, calibration=slow).why.startswith("shipped rule")


def test_an_executor_that_runs_schedules_is_a_rival():
    """A new one, too: nothing but the executor itself says which."""
    means = means_of(native="not today", xpmem=None)
    runs = {"xpmem": [find("allreduce", "published")]}
    means = replace(means, schedules=lambda name: runs.get(name, ()))
    known = replace(KNOWN, published=Sharing.straight(1e-6, 1e-10, 1e-10, 0.0, 1e-9, 1 << 20))
    candidate = chosen(None, call_for(1 << 12), means=means, calibration=known)
    assert candidate.name == "xpmem" and candidate.choice is None
    assert candidate.why.startswith("cost model: xpmem (as published)")


@pytest.mark.parametrize("collective", ["allreduce", "reduce_scatter", "alltoall", "scan"])
def test_short_symmetric_calls_go_through_slots(collective):
    """They meet once there; with more ranks than cores, longer ones too; in the background none."""

    def name(nbytes, staged=None, **facts):
        call = call_for(nbytes // 4, collective=collective)
        means = replace(means_of(symmetric=None, staged=staged), **facts)
        return chosen(None, call, means=means).name

    assert [name(n) for n in (64, 4092, 4096)] == ["staged", "staged", "symmetric"]
    assert [name(n, crowded=True) for n in (64, 16 << 10)] == ["staged", "staged"]
    assert name(64 << 10, crowded=True) == "symmetric"
    assert name(64, "it cannot run in the background") == "symmetric"


def test_every_way_is_still_listed():
    names = {candidate.name for candidate in Candidates(call_for(16), MEANS).every()}
    assert {"native", "symmetric", "ring"} <= names


def test_unknown_executor():
    """Its name and its reason are all there is to say: it is chosen, listed and named in errors."""
    able = means_of(native="no native here", lanes=None)
    call = call_for(16)
    for algorithm, tuning, why in (
        ("lanes", None, "the call asks for it"),
        ("auto", table({64: "lanes"}), "tuning table t.json: lanes at every size"),
    ):
        candidate = chosen(tuning, call, algorithm, means=able)
        assert (candidate.name, candidate.choice, candidate.why) == ("lanes", None, why)
    every = {candidate.name: candidate for candidate in Candidates(call, able).every()}
    assert list(every)[:5] == ["native", "symmetric", "staged", "single_copy", "lanes"]
    assert every["lanes"].can and every["lanes"].why
    with pytest.raises(Unsupported, match="'native': no native here; able to .*: lanes, "):
        chosen(None, call, "native", means=able)
    unable = means_of(lanes="the lanes are closed")
    with pytest.raises(Unsupported, match="'lanes': the lanes are closed; able .*: native, "):
        chosen(None, call, "lanes", means=unable)
    candidate = chosen(table({64: "lanes"}), call, means=unable)
    assert candidate.name == "native" and candidate.why.endswith(
        "names lanes, but the lanes are closed"
    )
    assert not {w.name: w for w in Candidates(call, unable).every()}["lanes"].can


@pytest.mark.parametrize("calibration", [None, KNOWN, FAR])
@pytest.mark.parametrize("groups", [((0, 1, 2, 3),), ((0, 1), (2, 3))])
@pytest.mark.parametrize("native", [None, "there is no native here"])
@pytest.mark.parametrize("tuned", [None, "ring", "hierarchical"])
@pytest.mark.parametrize("collective", ["allreduce", "barrier"])
def test_each_algorithm_is_asked_once(collective, tuned, native, groups, calibration, monkeypatch):
    asked, found = [], []

    def why_not_counted(choice, *rest):
        asked.append(choice.name)
        return why_not(choice, *rest)

    def find_counted(*names):
        found.append(names)
        return find(*names)

    monkeypatch.setattr(selection, "why_not", why_not_counted)
    monkeypatch.setattr(selection, "find", find_counted)
    key = Key("simulated", tuple(map(len, groups)), "float", collective, "private")
    tuning = tuned and table({64: tuned}, key=key)
    estimates = advised(tuning, groups, calibrates=True, calibration=calibration)
    candidates = Candidates(call_for(16, collective=collective), means_of(groups, native))
    candidate = choose(candidates, "auto", CollectiveConfig(), estimates)
    assert candidate.can
    every = [*candidates.every()]
    assert len(every) == len({w.name for w in every})
    assert sorted(asked) == sorted({*asked}) and sorted(found) == sorted({*found})


def test_a_choice_says_which_constants_it_lacks():
    near = ("messages",)
    far = (*near, "far")
    two, call = ((0, 1), (2, 3)), call_for(16)
    without = "there is no native here"

    def missing(means, groups=((0, 1, 2, 3),), algorithm="auto", config=None, tuning=None, **more):
        more = {"calibrates": True, **more}
        candidate = chosen(tuning, call, algorithm, config, means, groups=groups, **more)
        return candidate.missing

    assert missing(means_of(native=without)) == near
    assert missing(means_of(two), two) == missing(means_of(two, without), two) == far
    gather = Candidates(call_for(16, None, collective="gather"), means_of(native=without))
    alone = choose(gather, "auto", CollectiveConfig(), advised(None, calibrates=True))
    assert (alone.name, alone.missing) == ("binomial", ()), "there is nothing to compare it with"
    for nothing in (
        missing(means_of()),  # native is taken anyhow
        missing(means_of(symmetric=None)),
        missing(means_of(native=without), calibrates=False),
        missing(means_of(native=without), calibration=KNOWN),
        missing(means_of(native=without), algorithm="ring"),
        missing(means_of(native=without), config=CollectiveConfig(local_allreduce="ring")),
        missing(means_of(native=without), tuning=table()),
    ):
        assert nothing == ()


def test_first_call_asks_executors_once():
    def run(comm):
        asked, chooser = [], comm._service.chooser
        means = chooser.means

        def counted(*of):
            asked.append(of[0].collective)
            return means(*of)

        chooser.means = counted
        comm.allreduce(np.ones(2, "float32"))
        assert not chooser.estimates.uncalibrated
        return asked.count("allreduce"), comm.explain("allreduce", 8)[0].missing

    assert run_simulated(2, run, calibrate=True) == [(1, ())] * 2


def test_impossible_levels_fall_back_to_the_rules():
    """There is no broadcast by a ring, which is only seen when that algorithm is asked."""
    key = Key("simulated", (4,), "any", "broadcast", "private")
    tuning = table({64: "hierarchical/direct/ring"}, key=key)
    call = call_for(16, None, collective="broadcast")
    candidate = chosen(tuning, call, means=means_of())
    assert candidate.name == "native"
    assert candidate.why.endswith("names hierarchical/direct/ring, but that is not registered")
