"""Rules for other libraries: ranges and gains of measured and predicted times."""

import pytest

from mpidist.errors import InvalidArgument, Unsupported
from mpidist.interchange import library_rules
from mpidist.interchange.library_rules import (
    DEFAULT,
    MEASURED,
    PREDICTED,
    LibraryCollective,
    LibraryRule,
    check_rules,
    of_entry,
    predicted,
)
from mpidist.schedule.cost import cost
from mpidist.schedule.registry import algorithms
from mpidist.selection.tuning import PRIVATE, Key, TuningEntry

SCHEDULES = {"doubling": "recursive_doubling", "rings": "ring", "own": None}
MODEL = {"alpha": 1e-6, "beta": 1e-9}


def entry(chosen, times):
    key = Key("Open MPI 5.0.11", (2, 2), "float", "allreduce", PRIVATE)
    return TuningEntry.from_points(key, chosen, times)


def test_of_entry_ends_with_the_measured_sizes():
    times = {
        64: {DEFAULT: 4.0, "rings": 2.0},
        1024: {DEFAULT: 6.0, "rings": 2.0},
        4096: {DEFAULT: 8.0, "rings": 9.0},
    }
    (rule,) = of_entry(entry({64: "rings", 1024: "rings", 4096: DEFAULT}, times), MEASURED)
    assert (rule.collective, rule.ranks, rule.algorithm) == ("allreduce", 4, "rings")
    assert rule.first == 64 and 1024 <= rule.last < 4096, "not from 0 bytes on"
    assert rule.gains == (2.0, 3.0)
    (last,) = of_entry(entry({64: DEFAULT, 4096: "rings"}, times), MEASURED)
    assert 64 < last.first <= 4096 == last.last, "not beyond"


def test_of_entry_without_a_gain_is_empty():
    assert of_entry(entry({64: DEFAULT}, {64: {DEFAULT: 1.0, "rings": 1.0}}), MEASURED) == []


def test_predicted_rules_are_those_of_the_cost_model():
    sizes = [64, 1 << 10, 1 << 20, 1 << 24]
    steps = []
    rules = predicted("allreduce", SCHEDULES, 8, sizes, MODEL, lambda: steps.append(1))
    assert [rule.algorithm for rule in rules] == ["doubling", "rings"]
    assert len(steps) == 2 * len(sizes) and {rule.basis for rule in rules} == {PREDICTED}
    assert rules[0].first == 64 and rules[-1].last == 1 << 24
    assert rules[0].last < rules[1].first
    times = [cost("allreduce", n, 8, 64, **MODEL).seconds for n in ("ring", "recursive_doubling")]
    assert rules[0].gains[1] == pytest.approx(times[0] / times[1])


def test_predicted_writes_nothing_where_two_are_as_fast():
    """On 2 ranks both exchange everything: what the library chooses is as good."""
    free = {"alpha": 0.0, "beta": 1e-9}
    both = {"doubling": "recursive_doubling", "binary": "recursive_doubling"}
    assert predicted("allreduce", both, 4, [1024], free) == []


def test_predicted_without_what_cannot_win_is_the_same(monkeypatch):
    """A lower bound takes the place of the time of a long schedule that is too slow at any rate."""
    sizes, ranks = [64, 1 << 12, 1 << 16, 1 << 20, 1 << 24], 16
    exact = predicted("allreduce", SCHEDULES, ranks, sizes, MODEL)
    monkeypatch.setattr(library_rules, "MANY", 0)
    calls = []
    monkeypatch.setattr(
        library_rules, "cost", lambda *a, **k: calls.append(a[1].name) or cost(*a, **k)
    )
    bounded = predicted("allreduce", SCHEDULES, ranks, sizes, MODEL)
    assert [r.algorithm for r in bounded] == [r.algorithm for r in exact] == ["doubling", "rings"]
    assert bounded[0].gains[0] <= exact[0].gains[0] * (1 + 1e-9) and "ring" in calls
    assert calls.count("ring") < len(sizes) == calls.count("recursive_doubling")


@pytest.mark.parametrize("collective", ("allreduce", "broadcast", "alltoall", "reduce", "barrier"))
def test_bound_is_not_above_the_cost(collective, monkeypatch):
    monkeypatch.setattr(library_rules, "MANY", 0)
    simulation = library_rules.Simulation(collective, 6, MODEL, None, None)
    for one in algorithms(collective):
        if one.unsupported(6) is None:
            for nbytes in (0, 5, 1000):
                exact = cost(collective, one, 6, nbytes, **MODEL).seconds
                assert simulation.seconds(one.name, nbytes, 0.0) <= exact * (1 + 1e-9), one.name


def test_predicted_leaves_out_what_does_not_serve_these_ranks():
    """Neighbour exchange needs an even number."""
    names = {"neighbor": "neighbor_exchange", "ring": "ring"}
    (rule,) = predicted("allgather", names, 8, [8], MODEL)
    assert rule.algorithm == "neighbor"
    (rule,) = predicted("allgather", names | {"bruck": "bruck"}, 9, [8], MODEL)
    assert rule.algorithm == "bruck"
    with pytest.raises(Unsupported, match="on 5 ranks: 1 of"):
        predicted("allgather", names, 5, [8], MODEL)


def test_predicted_with_nothing_to_compare_is_unsupported():
    with pytest.raises(Unsupported, match="allgather on 8 ranks: 1 of its algorithms ring, pat"):
        predicted("allgather", {"ring": "ring", "pat": None}, 8, [64], MODEL)


def test_check_rules_names_what_a_library_lacks():
    known = {"allreduce": LibraryCollective("allreduce", SCHEDULES)}
    rule = LibraryRule("allreduce", 4, 0, 8, "rings", MEASURED, (1.5, 1.5))
    check_rules([rule], known, "X")
    with pytest.raises(InvalidArgument, match="'bucket'.*known: doubling, own, rings"):
        check_rules([LibraryRule("allreduce", 4, 0, 8, "bucket", MEASURED, (1, 1))], known, "X")
    with pytest.raises(InvalidArgument, match="scan: X has no choice .* expected allreduce"):
        check_rules([LibraryRule("scan", 4, 0, 8, "linear", MEASURED, (1, 1))], known, "X")


def test_rule_as_text_names_range_source_and_gain():
    rule = LibraryRule("allreduce", 4, 64, 4096, "rings", MEASURED, (1.5, 2.25))
    assert str(rule) == (
        "allreduce on 4 ranks, 64 to 4K: rings, measured: 1.50 to 2.25 times as fast as the "
        "library's choice"
    )
    other = LibraryRule("allreduce", 4, 64, 4096, "rings", PREDICTED, (1.5, 1.5))
    assert str(other).endswith("predicted: 1.50 times as fast as the next by the model")
