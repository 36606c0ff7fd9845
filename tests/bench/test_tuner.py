"""The tuner without MPI: who drops out, what is settled on, and runs on threads."""

import json
import signal
from time import perf_counter
from types import SimpleNamespace

import numpy as np
import pytest

from mpidist import CollectiveConfig, run_simulated
from mpidist.bench import machine, tuner
from mpidist.bench.candidates import memories
from mpidist.bench.cases import Workload
from mpidist.bench.regret import between, verify
from mpidist.bench.tuner import Stop, TuningSettings, count_races, settle, tune, uncertainty
from mpidist.measure import low
from mpidist.selection.rules import Rule
from mpidist.selection.tuning import TuningTable

WAYS = ("binomial", "linear", "tree:2", "tree:4")


def test_candidates_between_nodes():
    """Its name has the parts of both levels, and is not in the list of all ways."""

    def work(comm):
        chosen = comm.explain("allreduce", 1 << 20)[0].name
        return chosen, *tuner.candidate_names(comm, "allreduce", 1 << 20, "private")

    config = CollectiveConfig.multi_node(2, 2)
    for chosen, names, usual in run_simulated(4, work, config=config, nodes="aabb"):
        assert "/" in chosen and usual == chosen and names.count(chosen) == 1
    for chosen, names, usual in run_simulated(
        4, work, config=CollectiveConfig(local_allreduce="tree")
    ):
        assert chosen == "tree:2" == usual and names.count("tree:2") == 1


def named(**seconds):
    entries = [(s, SimpleNamespace(name=n)) for n, s in seconds.items()]
    return sorted(entries, key=lambda pair: pair[0])


def test_faster_half():
    def left(*kept, **seconds):
        return [entry.name for entry in tuner.faster_half(*kept)(named(**seconds))]

    assert left(a=1, b=2, c=3, d=4) == ["a", "b"]
    assert left(a=1, b=2, c=3) == ["a", "b"]
    assert left(a=1.0, b=1.01, c=1.05, d=4) == ["a", "b", "c"]
    assert left("d", a=1, b=2, c=3, d=4) == ["a", "b", "d"]
    keep = tuner.all_but_the_slow("d")
    assert [e.name for e in keep(named(a=1, b=1.4, c=2, d=9))] == ["a", "b", "d"]


def race(nbytes, cycle, **seconds):
    entries = [SimpleNamespace(name=name, times=[s] * 3) for name, s in seconds.items()]
    return SimpleNamespace(
        entries=entries, case=SimpleNamespace(nbytes=nbytes), cycle_seconds=cycle
    )


def test_history():
    """The usual choice first, then the fastest; the hopeless are left out of larger sizes."""
    names, past = ["a", "b", "c", "d"], tuner.History()
    assert past.order(names, "c") == ["c", "a", "b", "d"]
    small = tuner.HOPELESS_BYTES // 2
    seconds = {"a": 9.0, "b": 1.0, "c": 2.0, "d": 8.0}
    assert past.learn(race(small, 1.0, **seconds)) == seconds
    assert past.order(names, "c") == ["c", "b", "d", "a"] and not past.hopeless
    past.learn(race(2 * small, 3.0, **seconds))
    assert past.order(names, "c") == ["c", "b"] and past.order(names, "d") == ["d", "b", "c"]
    assert past.cost(8 * small) == 12.0 and past.cost(8) == 3.0


def test_time_of_a_cycle():
    """A size is skipped if a cycle of calls does not fit: a race must say how long one took."""

    def run(comm):
        works = {tuner.PRIVATE: Workload("allreduce", comm.rank, comm.size, 0, 4 << 20, "float32")}
        race = tuner.Race(comm, works, 4 << 20, tuner.PRIVATE, perf_counter() + 0.2)
        found = race.run(["ring", "recursive_doubling"], tuner.faster_half("ring"))
        return race.cycle_seconds, sum(each[-1] for each in found.values())

    for cycle, calls in run_simulated(2, run):
        assert cycle >= calls > 0


def test_stop_listens_to_the_first_signal():
    """The second one is for the handler before; so are all after the block."""
    seen, stop = [], Stop()
    before = signal.signal(signal.SIGTERM, lambda number, frame: seen.append(number))
    try:
        with stop.listening():
            assert not stop()
            signal.raise_signal(signal.SIGTERM)
            assert stop() and not seen
            signal.raise_signal(signal.SIGTERM)
            assert seen == [signal.SIGTERM]
        signal.raise_signal(signal.SIGTERM)
        assert len(seen) == 2
    finally:
        signal.signal(signal.SIGTERM, before)


def test_small_differences_change_nothing():
    times = {"native": [1.02] * 5, "ring": [1.0] * 5, "linear": [1.01] * 5}
    assert settle(times, "native", "linear") == "native"
    assert settle(times, "direct", "linear") == "linear"
    assert settle({**times, "native": [1.1] * 5}, "native", "direct") == "ring"
    assert settle({**times, "native": [9.0] * 4}, "native", "direct") == "native", "too few"
    assert settle({**times, "ring": [0.1] * 4}, "native", "direct") == "native", "too few"


def test_interrupted_iterations_change_nothing():
    """One in three lasts as long as a time slice: the rest says who is faster, a median may not."""
    quiet, slice = [1.0, 1.01, 1.0, 1.01, 1.0, 1.01], [400.0, 500.0, 600.0]
    ours, other = [*quiet, *slice], [1.2 * t for t in (*quiet[:3], *slice, *slice)]
    assert low(ours) == 1.0 and low(other) == 1.2
    assert settle({"native": ours, "ring": other}, "native", "native") == "native"
    assert settle({"native": other, "ring": ours}, "native", "native") in ("native", "ring")
    assert uncertainty([1.0, 1.0, 1.0, 1.0, 1.0]) == 0 and uncertainty([1.0, 2.0]) == 0.5
    assert low([3.0]) == 3.0 and low([5, 4, 3, 2, 1]) == 1 and low([6, 5, 4, 3, 2, 1]) == 2
    # Of 25 times 3 to 7 are expected below the true percentile.
    assert uncertainty([1 + k / 100 for k in range(25)]) == pytest.approx(0.02 / 1.04)


def usual(nbytes):
    return "native" if nbytes < 700 else "staged" if nbytes < 100_000 else "ring"


def choices(entry):
    return [(rule.start, rule.choose) for rule in entry.rules]


SIZES = [8, 64, 512, 4096, 32768]


def test_a_table_without_changes_is_the_shipped_rules():
    """At all sizes, not only at those measured; also beyond them."""
    draft = tuner.Draft("key", SIZES, usual)
    assert choices(draft.entry()) == [(0, "native"), (700, "staged"), (100_000, "ring")]
    draft.faster = {512: "tree:2"}  # in one pass alone
    assert choices(draft.entry()) == [(0, "native"), (700, "staged"), (100_000, "ring")]
    for sizes in ([0], [8], [1 << 30]):
        draft = tuner.Draft("key", sizes, lambda nbytes: "native")
        assert choices(draft.entry()) == [(0, "native")]


def test_a_confirmed_choice_holds_around_its_size():
    draft = tuner.Draft("key", SIZES, usual)
    draft.confirmed = {64: "tree:2"}
    found = choices(draft.entry())
    assert [name for _, name in found] == ["native", "tree:2", "native", "staged", "ring"]
    assert 8 < found[1][0] <= 64 < found[2][0] <= 512
    draft.confirmed = {512: "tree:2", 4096: "tree:2", 32768: "linear"}
    found = choices(draft.entry())
    assert [name for _, name in found] == ["native", "tree:2", "linear", "staged", "ring"]
    assert found[3][0] <= 4 * 32768, "one step beyond the largest size the usual choice holds"
    draft.wrong = {"staged"}
    assert "staged" not in [name for _, name in choices(draft.entry())]


SHIPPED = [(0, "binomial"), (256 << 10, "reduce_scatter_gather")]  # reduce, simulated ranks


def tuned(monkeypatch, first, second, looks=(50,)):
    """Tune reduce at 64 bytes with made-up times: by (name) in the first and the second pass.

    Return what was found, and how many races were run on rank 0.
    """
    races, seen = [], {}

    def run(race, names, keep):
        passes = second if len(names) == 2 else first
        if race.comm.rank == 0:
            races.append(list(names))
        race.entries = [SimpleNamespace(name=n, times=[passes.get(n, 9.0)] * 20) for n in names]
        for entry in race.entries:
            entry.wrong = 0
        return {entry.name: entry.times for entry in race.entries}

    def round_trip(comm):
        at = seen[comm.rank] = seen.get(comm.rank, -1) + 1
        return 1e-9 * looks[min(at, len(looks) - 1)]

    monkeypatch.setattr(tuner.Race, "run", run)
    monkeypatch.setattr(machine, "round_trip", round_trip)
    settings = TuningSettings(["reduce"], [64], "float32", 20.0)
    found = run_simulated(2, lambda comm: tune(comm, settings, {}))[0]
    return found, races


def test_a_choice_changes_if_it_is_faster_in_both_passes(monkeypatch):
    slow = {"binomial": 2.0, "linear": 1.0}
    found, races = tuned(monkeypatch, slow, slow)
    (entry,) = found.table.entries.values()
    assert races[1:] == [["binomial", "linear"]], "the usual choice and the winner, alone"
    assert entry.at(64).choose == "linear" and (found.faster, found.confirmed) == (1, 1)


@pytest.mark.parametrize("binomial", [1.0, 1.02, 0.5])
def test_a_choice_stays_if_the_second_pass_does_not_confirm(monkeypatch, binomial):
    """Linear takes half the time of the shipped binomial at first; then as long, or 2 % less, or
    twice as long."""
    found, races = tuned(
        monkeypatch, {"binomial": 2.0, "linear": 1.0}, {"binomial": binomial, "linear": 1.0}
    )
    (entry,) = found.table.entries.values()
    assert len(races) == 2 and choices(entry) == SHIPPED
    assert (found.faster, found.confirmed, found.measured) == (1, 0, 1)


def test_without_a_faster_one_there_is_no_second_pass(monkeypatch):
    found, races = tuned(monkeypatch, {"binomial": 1.0, "linear": 1.0}, {})
    assert len(races) == 1 and found.faster == 0


def test_a_race_is_repeated_if_the_machine_changes(monkeypatch):
    slow = {"binomial": 2.0, "linear": 1.0}
    found, races = tuned(monkeypatch, slow, slow, looks=[50, 300, 300, 300])
    assert len(races) == 3 and races[0] == races[1] and found.confirmed == 1
    # At the second pass it changes each time: not confirmed.
    found, races = tuned(monkeypatch, slow, slow, looks=[50, 50, *[50, 300] * 3])
    assert len(races) == 4 and (found.faster, found.confirmed) == (1, 0)
    # Always in the first pass: the size is left out, and there is no table.
    found, races = tuned(monkeypatch, slow, slow, looks=[50, 300] * 3)
    assert len(races) == 3 and not found.table.entries
    assert (found.measured, found.left_out, found.unsteady) == (0, 1, 1)


def test_sizes_left_out_keep_the_usual_choice():
    """As without a table, also where that changes beyond the sizes that were to be measured."""
    settings = TuningSettings(["reduce"], [8, 1024, 4096], "float32", 20.0)

    def run(comm):
        stop = Stop()

        def step(collective, nbytes):
            stop.wanted = nbytes == 8

        found = tune(comm, settings, {}, step, stopped=stop)
        (entry,) = found.table.entries.values()
        return choices(entry)

    assert run_simulated(2, run)[0] == SHIPPED


def test_noise_changes_nothing():
    """A gap of 20 % counts if the times scatter by 1 %, not if by 100 %; many times decide."""
    gap = {"native": 1.2, "ring": 1.0}

    def times(scatter, n):
        steps = [1 - scatter / 2 + scatter * k / (n - 1) for k in range(n)]
        return {name: [middle * s for s in steps] for name, middle in gap.items()}

    assert settle(times(0.01, 20), "native", "native") == "ring"
    assert settle(times(1.0, 20), "native", "native") == "native"
    assert settle(times(1.0, 2), "native", "native") == "native"
    assert settle(times(1.0, 200), "native", "native") == "ring"


@pytest.mark.long
def test_tune_and_verify_on_simulated_ranks(tmp_path):
    settings = TuningSettings(["reduce", "barrier"], [8, 1024], "float32", 20.0)

    def run(comm):
        tables = []
        found = tune(comm, settings, {}, on_table=lambda t: tables.append(len(t.entries)))
        return found.table.to_json(), found.wrong, found.measured, found.left_out, tables

    results = run_simulated(2, run)
    assert results[0] == results[1], "every rank has the same table"
    text, wrong, measured, left_out, tables = results[0]
    assert not wrong and (measured, left_out) == (3, 0) and tables[-1] == 2
    table = TuningTable.from_json(text)
    for entry in table.entries.values():
        assert entry.key.library == "simulated" and entry.key.ranks_per_node == (2,)
    entry = next(e for k, e in table.entries.items() if k.collective == "reduce")
    assert set(entry.times[8]) >= set(WAYS) and entry.rules[0].start == 0

    def check(comm):
        found = verify(comm, TuningSettings(["reduce"], between([8, 1024]), "float32", 20.0))
        return [(r.bytes, r.candidate, r.figures["regret"]) for r in found.regrets], found.wrong

    (regrets, wrong), other = run_simulated(2, check, tuning=table)
    assert (regrets, wrong) == other and not wrong
    assert [nbytes for nbytes, _, _ in regrets] == [8, 92, 1024]
    assert regrets[0][1] == entry.at(8).choose


def test_stopping_keeps_what_was_measured():
    settings = TuningSettings(["reduce", "gather"], [8, 1024], "float32", 20.0)

    def run(comm):
        stop = Stop()

        def step(collective, nbytes):
            stop.wanted = nbytes == 1024

        found = tune(comm, settings, {}, step, stopped=stop)
        return list(found.table.entries), found.left_out

    keys, left_out = run_simulated(2, run)[0]
    assert [key.collective for key in keys] == ["reduce"] and left_out >= 2


def test_wrong_results_are_not_chosen(monkeypatch):
    call = tuner.Race._call

    def mistaken(self, entry):
        seconds, wrong, *rest = call(self, entry)
        return seconds, wrong or entry.name == "binomial", *rest

    monkeypatch.setattr(tuner.Race, "_call", mistaken)
    monkeypatch.setattr(tuner, "MOST", 10)  # ends the races, well before the budget
    settings = TuningSettings(["gather"], [8], "float32", 20.0)
    found = run_simulated(2, lambda comm: tune(comm, settings, {}))[0]
    (entry,) = found.table.entries.values()
    assert found.wrong == ["gather binomial 8 B"] and entry.rules == (Rule("linear"),)


def test_every_collective_in_every_memory_is_counted(monkeypatch):
    comm = SimpleNamespace(
        topology=SimpleNamespace(num_nodes=1), backend=SimpleNamespace(native=object())
    )
    assert count_races(comm, TuningSettings(["allreduce", "barrier"], [8, 32, 128])) == 7
    comm.topology.num_nodes = 2
    assert memories(comm, "allreduce") == ("private",)


def test_times_of_the_document_are_numbers():
    found = run_simulated(
        2, lambda comm: tune(comm, TuningSettings(["barrier"], [8], "int8", 0.3), {})
    )
    (entry,) = json.loads(found[0].table.to_json())["entries"]
    assert entry["kind"] == "any"
    assert all(us > 0 for us in entry["times_us"]["0"].values())
    assert np.isfinite(list(entry["times_us"]["0"].values())).all()
