"""The tuning table: reading, looking up, who goes before whom; and the calibration."""

import json
import logging
import os
from dataclasses import replace

import ml_dtypes
import numpy as np
import pytest

from mpidist import CollectiveConfig, ConfigError, Op, run_simulated
from mpidist.calls.call import Call
from mpidist.engine.calibration import from_environment
from mpidist.errors import DeadlockError, Unsupported
from mpidist.operations import OPS
from mpidist.schedule.cost import Sharing, cost
from mpidist.schedule.registry import find
from mpidist.selection import choose as selection
from mpidist.selection.choose import Candidate, Candidates, Means, choose, why_not
from mpidist.selection.estimates import MODEL, MOST_RANKS, Calibration, Estimates, Model, Rival
from mpidist.selection.rules import Rule
from mpidist.selection.segmentation import Segmentation
from mpidist.selection.tuning import Key, TuningEntry, TuningTable, kind_for, rules_of

KEY = Key("simulated", (4,), "float", "allreduce", "private")
TIMES = {
    64: {"ring": 8e-6, "tree:4": 2e-6, "linear": 3e-6},
    1024: {"ring": 8e-6, "tree:4": 32e-6},
}


def table(chosen=None, times=TIMES, key=KEY, source="t.json"):
    return TuningTable(
        [TuningEntry.from_points(key, chosen or {64: "tree:4", 1024: "ring"}, times)], {}, source
    )


def call_for(count, op="sum", dtype="float32", size=4, collective="allreduce"):
    x = np.broadcast_to(np.zeros(1, dtype), (count,))
    op = OPS[op] if isinstance(op, str) else op
    return Call(collective, 0, size, 0, x.dtype, x, x, op)


def advised(tuning, groups=((0, 1, 2, 3),), **more):
    return Estimates("simulated", groups, tuning=tuning, **more)


RUNS = {
    "symmetric": ["in_place"],
    "staged": ["slots", "slots_one_shot"],
    "single_copy": ["published"],
}


def schedules(executor):
    return [find("allreduce", name) for name in RUNS.get(executor, ())]


def means_of(groups=((0, 1, 2, 3),), native=None, symmetric="no array is symmetric", **more):
    """Reasons as of a communicator, by default one with native collectives only."""
    reasons = {
        "native": native,
        "symmetric": symmetric,
        "staged": "the ranks share no memory",
        "single_copy": "the ranks share no memory",
    }
    return Means(groups, reasons | more, schedules=schedules)


MEANS = means_of(native="there is no native here")


def chosen(tuning, call, algorithm="auto", config=None, means=MEANS, **more):
    candidates, config = Candidates(call, means), config or CollectiveConfig()
    return choose(candidates, algorithm, config, advised(tuning, **more))


# -- the document ----------------------------------------------------------------------------------


def test_round_trip(tmp_path):
    first, path = table(), tmp_path / "t.json"
    first.save(path)
    second = TuningTable.load(path)
    assert second.source == str(path)
    (one,), (other,) = first.entries.values(), second.entries.values()
    assert one.key == other.key and one.rules == other.rules
    for size, at in one.times.items():
        assert other.times[size] == pytest.approx(at)
    assert [p.name for p in tmp_path.iterdir()] == ["t.json"], "nothing is left beside it"


def document(**changes):
    content = json.loads(table().to_json())
    content["entries"][0].update(changes)
    return content


@pytest.mark.parametrize(
    ("content", "told"),
    [
        ("{", "t.json is not JSON"),
        ("[" * 100_000, "t.json is nested too deep"),
        ([], "t.json is not a tuning table"),
        ({"rows": []}, "t.json is not a tuning table"),
        ({"mpidist_tuning": 7, "entries": []}, "t.json: version 7 of the table: .* 1"),
        ({"mpidist_tuning": 1, "entries": 3}, "'entries' is 3: .* list"),
        ({"mpidist_tuning": 1, "entries": [3]}, "entry 0 is 3: .* object"),
        (document(choose=[{"from": 0, "algorithm": "rign"}]), "entry 0: .*did you mean 'ring'"),
        (document(choose=[{"from": 0, "algorithm": "ring:4"}]), "entry 0: .*ring has no arity"),
        (document(choose=[{"from": 0, "algorithm": "autoo"}]), "entry 0: .*auto"),
        (
            document(choose=[{"from": 8, "algorithm": "ring"}]),
            r"'choose' .*\[8\]: expected 0",
        ),
        (
            document(choose=[{"algorithm": "ring"}]),
            "entry 0: .*'choose' .* list of {from, algorithm}",
        ),
        (document(choose=[]), r"entry 0: 'choose' .*\[\]: expected 0"),
        (document(times_us={"8": {"ring": 0}}), "entry 0: 'times_us': .*> 0"),
        (document(times_us={"x": {}}), "'times_us'"),
        (document(collective="allredcue"), "collective='allredcue': .*allreduce"),
        (document(kind="float32"), "kind='float32': .*any, float"),
        (document(memory="shared"), "memory='shared': .*private, symmetric"),
        (document(ranks_per_node=[0]), r"ranks_per_node=\[0\]: .*> 0"),
        (document(ranks_per_node=4), "ranks_per_node=4"),
        (document(library=None), "library=None: .*name"),
    ],
)
def test_bad_documents_say_where_and_why(content, told):
    text = content if isinstance(content, str) else json.dumps(content)
    with pytest.raises(ConfigError, match=told):
        TuningTable.from_json(text, "t.json")


def test_bad_files(tmp_path):
    with pytest.raises(ConfigError, match="no.json: No such file"):
        TuningTable.load(tmp_path / "no.json")
    with pytest.raises(ConfigError, match="Is a directory"):
        TuningTable.load(tmp_path)
    (tmp_path / "b").write_bytes(b"\xff\xfe")
    with pytest.raises(ConfigError, match="it is not text"):
        TuningTable.load(tmp_path / "b")


def test_merged():
    other = Key("simulated", (2,), "float", "allreduce", "private")
    old = TuningTable([*table().entries.values(), TuningEntry(other, rules_of([(0, "ring")]), {})])
    new = old.merged(table({64: "linear"}))
    assert new.find(other).at(1).choose == "ring"
    assert new.find(KEY).at(1 << 20).choose == "linear"


# -- looking up ------------------------------------------------------------------------------------


def test_the_way_changes_where_the_times_cross():
    entry = table().find(KEY)
    # tree leads by 4 at 64 bytes, ring by 4 at 1024: they are even in the middle, 256 bytes.
    assert entry.rules == (Rule("tree:4", 0, 256), Rule("ring", 256))
    assert entry.at(0) == entry.rules[0]
    assert entry.at(255).choose == "tree:4" and entry.at(256) == entry.rules[1]
    assert entry.at(1 << 40).choose == "ring", "above the largest size"


def test_switch_point_without_times():
    entry = table({64: "linear", 1024: "ring"}).find(KEY)
    assert entry.rules == (Rule("linear", 0, 256), Rule("ring", 256))


def test_a_measured_size_keeps_its_own_way():
    times = {8: {"ring": 1.0, "linear": 1.0}, 32: {"ring": 2.0, "linear": 1.0}}
    entry = table({8: "ring", 32: "linear"}, times).find(KEY)
    assert entry.at(8).choose == "ring" and entry.at(9).choose == "linear"
    times = {8: {"ring": 1.0, "linear": 2.0}, 32: {"ring": 1.0, "linear": 1.0}}
    entry = table({8: "ring", 32: "linear"}, times).find(KEY)
    assert entry.at(31).choose == "ring" and entry.at(32).choose == "linear"


def test_times_are_interpolated_on_logarithmic_axes():
    entry = table().find(KEY)
    assert entry.seconds("tree:4", 256) == pytest.approx(8e-6)
    assert entry.seconds("tree:4", 64) == 2e-6
    for nbytes in (0, 63, 4096):
        assert entry.seconds("tree:4", nbytes) is None, "no guess beyond the measured sizes"
    assert entry.seconds("linear", 128) is None, "linear was not measured there"
    assert entry.seconds("binomial", 128) is None


def test_kinds():
    kinds = {"float32": "float", "float64": "float", "float16": "half", "int8": "int"}
    for dtype, kind in {**kinds, "complex64": "complex"}.items():
        assert kind_for(call_for(1, dtype=dtype)) == kind
    assert kind_for(call_for(1, "max", "bool")) == "bool"
    assert kind_for(call_for(1, dtype=ml_dtypes.bfloat16)) == "half"
    broadcast = Call("broadcast", 0, 4, 0, np.dtype("int8"), np.zeros(1), np.zeros(1))
    assert kind_for(broadcast) == "any"


# -- who goes before whom --------------------------------------------------------------------------


def test_precedence():
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


@pytest.mark.parametrize(
    ("call", "groups", "told"),
    [
        (call_for(16), ((0, 1), (2, 3)), r"it is for simulated, 4 ranks on 1 node; this is sim"),
        (call_for(16, dtype="int32"), None, "no entry for allreduce of kind int in private memory"),
        (call_for(16, Op(np.add)), None, "operations of the user"),
    ],
)
def test_table_of_another_setting(call, groups, told):
    candidate = chosen(table(), call, groups=groups or ((0, 1, 2, 3),))
    assert candidate.name == "recursive_doubling"
    assert told in candidate.why


def test_symmetric_memory_has_entries_of_its_own():
    key = Key("simulated", (4,), "float", "allreduce", "symmetric")
    both = table({64: "ring"}).merged(table({64: "symmetric"}, key=key))
    shared = means_of(symmetric=None)
    assert chosen(both, call_for(16), means=shared).name == "symmetric"
    assert chosen(both, call_for(16)).name == "ring"


def test_unused_table_is_logged_once(caplog):
    elsewhere = table(key=Key("another MPI 1.0", (4,), "float", "allreduce", "private"))
    with caplog.at_level(logging.WARNING, "mpidist"):
        run_simulated(4, lambda comm: comm.split(0).explain("allreduce", 8), tuning=elsewhere)
        run_simulated(4, lambda comm: comm.split(comm.rank % 2).rank, tuning=table())
    (record,) = caplog.records
    assert "t.json does not apply: it is for another MPI 1.0, 4 ranks" in record.message


def test_table_after_split():
    pair = Key("simulated", (2,), "float", "allreduce", "private")
    both = table().merged(table({64: "linear"}, key=pair))

    def names(comm):
        half = comm.split(comm.rank % 2)
        total = half.allreduce(np.ones(3, "float32"))
        return comm.explain("allreduce", 8)[0].name, half.explain("allreduce", 8)[0].name, total[0]

    assert run_simulated(4, names, tuning=both) == [("tree:4", "linear", 2.0)] * 4


def test_explain_shows_the_times_of_the_table():
    chosen, every = run_simulated(4, lambda c: c.explain("allreduce", 64), tuning=table())[0]
    times = {candidate.name: candidate.seconds for candidate in every}
    assert chosen.seconds == pytest.approx(2e-6) and "tuning table" in chosen.basis
    assert times["ring"] == pytest.approx(8e-6) and times["binomial"] is None
    chosen, _ = run_simulated(4, lambda c: c.explain("allreduce", 64))[0]
    assert chosen.seconds is None


# -- calibration -----------------------------------------------------------------------------------

KNOWN = Calibration(1e-5, 1e-9, 1e-10)


def test_calibrated_cost_model_chooses():
    """With a latency of 10 ms recursive doubling stays ahead far above the shipped threshold."""
    slow = Calibration(1e-2, 1e-9, 1e-10)
    call = call_for(1 << 18)
    assert chosen(None, call).name == "ring"
    candidate = chosen(None, call, calibration=slow)
    assert candidate.name == "recursive_doubling" and candidate.why.startswith("cost model: ")
    assert chosen(None, call, calibration=KNOWN).name == "ring"
    able = means_of()
    assert chosen(None, call_for(16), means=able, calibration=slow).name == "native"


def test_the_cheapest_of_all_that_can_serve():
    """Shared memory beside messages, if the library cannot; the rules if a time is unknown."""
    near = Sharing(1e-6, 1e-10, 1e-10, 0.0, 1e-9, 1 << 20)
    able, call = means_of(native="not today", staged=None), call_for(1 << 12)
    known = replace(KNOWN, mapped=near)
    candidate = chosen(None, call, means=able, calibration=known)
    assert candidate.name == "staged" and candidate.why.startswith("cost model: staged (as slots")
    busy = replace(known, mapped=replace(near, meeting=1.0))
    candidate = chosen(None, call, means=able, calibration=busy)
    assert candidate.choice is not None and candidate.why.startswith("cost model: ")
    candidate = chosen(None, call, means=able, calibration=KNOWN)
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
    wide = advised(None, ((0, 1),), calibration=Calibration(1e-5, 1e-9, 0.0))
    rivals = [Rival(n, [find("allreduce", n)], n == "ring") for n in ("recursive_doubling", "ring")]
    name, why = wide.cheapest(call_for(1 << 16, size=2), rivals)
    assert name == "ring" and why.endswith("; the rules name ring, and nothing is clearly faster")


NODES = tuple(tuple(range(8 * k, 8 * k + 8)) for k in range(8))


@pytest.mark.parametrize("groups", [((0, 1), (2, 3)), NODES], ids=["4 ranks", "64 ranks"])
def test_measured_links_decide_between_nodes(groups):
    """Two levels over a link that is slower than memory; over one that is alike native, or a ring.

    Where it is close, what the shipped rules name stands.
    """
    slow = Calibration(1.5e-6, 3e-10, 1e-10, 138e-6, 8.6e-9)
    alike = Calibration(1.5e-6, 3e-10, 1e-10, 1.6e-6, 3.1e-10)
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
    known = replace(KNOWN, published=Sharing(1e-6, 1e-10, 1e-10, 0.0, 1e-9, 1 << 20))
    candidate = chosen(None, call_for(1 << 12), means=means, calibration=known)
    assert candidate.name == "xpmem" and candidate.choice is None
    assert candidate.why.startswith("cost model: xpmem (as published)")


def test_predicted_times():
    model = Model(KNOWN, ((0, 1, 2, 3),), Segmentation())
    ring = find("allreduce", "ring")
    exact = cost("allreduce", ring, 4, 1 << 16, alpha=1e-5, beta=1e-9, gamma=1e-10).seconds
    assert model.seconds("allreduce", ring, 65_000) == exact, "rounded to a power of two"
    assert model.seconds("barrier", find("barrier", "dissemination"), 0) == pytest.approx(2e-5)
    many = Model(KNOWN, (tuple(range(MOST_RANKS + 1)),), Segmentation())
    assert many.seconds("allreduce", ring, 8) is None
    apart = Model(Calibration(1e-5, 0, 0, 1e-3, 0), ((0, 1), (2, 3)), Segmentation())
    assert apart.seconds("allreduce", ring, 8) > 1e-3


def test_predicted_times_in_shared_memory():
    """None where its constants were not measured; a slot's pieces are those of the executor."""
    near = Sharing(1e-6, 1e-10, 1e-10, 0.0, 1e-9, 1 << 20)
    model = Model(replace(KNOWN, mapped=near), ((0, 1),), Segmentation())
    assert model.seconds("barrier", find("barrier", "in_place"), 0) == 1e-6
    in_place, slots = (find("allgather", name) for name in ("in_place", "slots"))
    assert model.seconds("allgather", in_place, 1 << 20) == pytest.approx(2e-6 + (1 << 19) * 1e-10)
    cut = cost(*("allgather", "slots", 2, 1 << 20), alpha=1e-5, beta=1e-9, segments=8, sharing=near)
    assert model.seconds("allgather", slots, 1 << 20) == cut.seconds
    published = find("allgather", "published")
    assert model.seconds("allgather", published, 8) is None
    both = replace(KNOWN, published=replace(near, access=1e-3))
    assert Model(both, ((0, 1),), Segmentation()).seconds("allgather", published, 8) > 1e-3
    assert Model(both, ((0, 1),), Segmentation()).seconds("allgather", slots, 8) is None


def test_predicted_times_of_executors():
    near = Sharing(1e-6, 1e-10, 1e-10, 0.0, 1e-9, 1 << 20)
    estimates = Estimates("a library", ((0, 1),), True, replace(KNOWN, mapped=near))
    call = call_for(1 << 16, size=2)

    def of(name, collective="allreduce"):
        return estimates.model.seconds(collective, find(collective, name), call.nbytes)

    candidates = Candidates(call, means_of(((0, 1),)))

    def expected(name):
        return candidates.predicted(Candidate(name, None, ""), estimates, "private")

    assert expected("symmetric").seconds == of("in_place") > 0
    assert expected("staged").seconds == min(of("slots"), of("slots_one_shot"))
    assert expected("native").seconds is None
    assert expected("single_copy").seconds is None, "it was not measured"
    assert expected("staged").basis == MODEL


def test_communicators_of_one_shape_share_their_predictions():
    """Each takes milliseconds, and many groups of a program have the same shape."""
    two, three = ((0, 1), (2, 3)), ((0, 1), (2, 3), (4, 5))
    first, second, other = (
        Estimates("a library", groups, True, KNOWN) for groups in (two, two, three)
    )
    assert first.model is second.model is not other.model
    assert Estimates("a library", two, True, replace(KNOWN, alpha=1.0)).model is not first.model


@pytest.mark.parametrize("size", [2, 4])
def test_simulated_ranks_calibrate_when_asked(size):
    def both(comm):
        before = comm.explain("allreduce", 1 << 20)[0].why
        total = comm.allreduce(np.ones(1 << 18, "float32"))
        after = comm.explain("allreduce", 1 << 20)[0].why
        inherited = comm.split(0).explain("allreduce", 1 << 20)[0].why
        return before, after, inherited, total.sum()

    found = run_simulated(size, both, calibrate=True)
    assert len(set(found)) == 1, "every rank has the same figures"
    before, after, inherited, total = found[0]
    assert "the first call will calibrate" in before and total == size << 18
    assert after.startswith("cost model: ") and inherited == after
    before, after, _, _ = run_simulated(size, both)[0]
    assert before == after == "shipped rule: ring from 32 KiB on"


def test_background_call_does_not_calibrate():
    """Its ranks need not meet: this one would wait for a message that comes later."""

    def cross(comm):
        data = np.ones(4, "float32")
        if comm.rank == 0:
            work = comm.iallreduce(data)
            comm.send(data, 1)
        else:
            comm.recv(data, 0)
            work = comm.iallreduce(data)
        return work.wait()[0]

    assert run_simulated(2, cross, calibrate=True, timeout=10) == [2.0, 2.0]


def test_missing_rank_in_calibrate():
    def absent(comm):
        if comm.rank == 0:
            with pytest.raises(DeadlockError) as caught:
                comm.allreduce(np.ones(2))
            assert "allreduce" in comm.broken and "calibrate" not in comm.broken
            raise caught.value

    with pytest.raises(DeadlockError, match="ranks 0 wait"):
        run_simulated(2, absent, calibrate=True)


def test_the_variable():
    assert from_environment({}) is None
    assert from_environment({"MPIDIST_CALIBRATE": "0"}) is False
    assert from_environment({"MPIDIST_CALIBRATE": "1"}) is True
    with pytest.raises(ConfigError, match="MPIDIST_CALIBRATE='no': expected 0 or 1"):
        from_environment({"MPIDIST_CALIBRATE": "no"})


def test_every_way_is_still_listed():
    names = {candidate.name for candidate in Candidates(call_for(16), MEANS).every()}
    assert {"native", "symmetric", "ring"} <= names


# -- one pass --------------------------------------------------------------------------------------


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


@pytest.mark.parametrize("calibration", [None, KNOWN, Calibration(1e-6, 3e-10, 1e-10, 1e-4, 8e-9)])
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
    near = ("alpha", "beta", "gamma")
    far = (*near, "far_alpha", "far_beta")
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


@pytest.mark.parametrize("path", ["/dev/zero", "fifo"])
def test_only_regular_files_are_tables(path, tmp_path):
    """A device without an end, or a pipe without a writer, would be waited for."""
    os.mkfifo(tmp_path / "fifo")
    with pytest.raises(ConfigError, match="not a regular file"):
        TuningTable.load(tmp_path / path)


def test_numbers_beyond_floats_are_refused(tmp_path):
    table = json.dumps(
        {
            "mpidist_tuning": 1,
            "entries": [
                {
                    "library": "Open MPI 5.0.11",
                    "ranks_per_node": [2],
                    "kind": "float",
                    "collective": "allreduce",
                    "memory": "private",
                    "choose": [{"from": 0, "algorithm": "ring"}],
                    "times_us": {"8": {"ring": 5.0}},
                }
            ],
        }
    )
    assert TuningTable.from_json(table, "t.json").entries
    for old, new in (('"from": 0', '"from": Infinity'), ("5.0", "1" + "0" * 400), ("5.0", "NaN")):
        with pytest.raises(ConfigError, match=r"t\.json: entry 0"):
            TuningTable.from_json(table.replace(old, new), "t.json")


def test_a_table_is_not_saved_through_a_name_that_others_can_foresee(tmp_path):
    (tmp_path / "precious").write_text("kept")
    os.symlink("precious", tmp_path / f"t.json.{os.getpid()}.new")
    TuningTable().save(tmp_path / "t.json")
    assert (tmp_path / "precious").read_text() == "kept"
    assert TuningTable.load(tmp_path / "t.json").entries == {}
