"""The measurement of collectives, on simulated ranks: times are not tested."""

import gc

import pytest

from mpidist import run_simulated
from mpidist.bench import Refusal, Settings, measure, runner, steps
from mpidist.bench.candidates import Candidate
from mpidist.bench.cases import Case, number_dtype
from mpidist.bench.runner import Entrant, Series
from mpidist.errors import InvalidArgument, UnknownName, Unsupported
from mpidist.schedule import COLLECTIVES, algorithm, algorithms
from mpidist.schedule.registry import unregister
from tests.support.bench_kits import QUICK, bench


def test_measure_order_varies_and_is_the_same_again(monkeypatch):
    orders = []
    call, cycle = Series._call, Series.cycle

    def begun(self, *arguments):
        orders.append([])
        return cycle(self, *arguments)

    def noted(self, entry):
        orders[-1].append(entry.name)
        return call(self, entry)

    monkeypatch.setattr(Series, "cycle", begun)
    monkeypatch.setattr(Series, "_call", noted)
    names = ["linear", "ring", "direct", "tree"]
    settings = Settings(sizes=[64], algorithms=names, iterations=20, budget=1e9)
    run_simulated(1, lambda comm: measure(comm, ["allreduce"], settings))
    timed = [order for order in orders if len(order) == len(names)]
    assert len(timed) >= 20 and all(sorted(order) == sorted(names) for order in timed)
    assert {order[0] for order in timed} == set(names)
    again = len(orders)
    run_simulated(1, lambda comm: measure(comm, ["allreduce"], settings))
    assert orders[again:] == orders[:again], "the same order on every rank, so without chance"


@pytest.mark.parametrize("size", [1, 3])
def test_every_algorithm_is_measured_and_right(size):
    results = bench(size, list(COLLECTIVES), root=size - 1)
    assert results.correct
    rows = {(row.work, row.candidate) for row in results.rows}
    refused = {(r.work, r.candidate) for r in results.unsupported}
    for known in algorithms():
        assert (known.collective, known.name) in rows | refused
    without_mpi = {"native", "mpi4py", "staged", "single_copy"}
    assert {name for _, name in refused} <= without_mpi | {"neighbor_exchange"}
    assert ("allgather", "neighbor_exchange") in refused  # it needs an even number of ranks


@pytest.mark.parametrize("collective", sorted(COLLECTIVES))
def test_in_place(collective):
    results = bench(3, [collective], in_place=True, sizes=[1000])
    assert results.correct and results.rows


def test_a_wrong_algorithm_is_found_out():
    @algorithm("allreduce", "forgetful", blocks=1)
    def forgetful(rank, size):
        """Keep what this rank has."""
        yield ()

    try:
        names = ["forgetful", "ring"]
        results = bench(2, ["allreduce"], algorithms=names, sizes=(4, 1000), in_place=True)
    finally:
        unregister("allreduce", "forgetful")
    assert {row.candidate: row.correct for row in results.rows} == {
        "forgetful": False,
        "ring": True,
    }


@pytest.mark.parametrize("entered, correct", [((0.0, 0.5), True), ((0.0, 2.0), False)])
def test_a_barrier_must_wait(monkeypatch, entered, correct):
    """Rank 0 leaves at 1.0: wrong if rank 1 enters later, by the clock that they share."""

    def timed(self, entry):
        begun = entered[self.comm.rank]
        return 1.0, False, begun, -(begun + 1.0), 0, 0, 1.0

    monkeypatch.setattr(Series, "_call", timed)
    results = bench(2, ["barrier"], algorithms=["linear"])
    assert results.rows and {row.correct for row in results.rows} == {correct}


def test_used_is_writing_call_and_first_reading(monkeypatch):
    """By a clock that only these three move; the check of the result reads later, untimed."""
    clock, order = [0.0], []

    def takes(seconds, what):
        def act(*arguments):
            order.append(what)
            clock[0] += seconds

        return act

    monkeypatch.setattr(runner, "perf_counter", lambda: clock[0])
    monkeypatch.setattr(
        "mpidist.bench.candidates.ours", lambda comm, case, name: takes(5.0, "call")
    )
    monkeypatch.setattr(Case, "fill", takes(3.0, "write"))
    monkeypatch.setattr(Entrant, "read", takes(7.0, "read"))
    monkeypatch.setattr(Case, "check", lambda *arguments: order.append("check") or True)
    results = bench(1, ["allreduce"], sizes=[64], algorithms=["ring"], budget=1e9, limit=1e9)
    (row,) = results.rows
    assert row.time_us == pytest.approx(5e6), "as before, the call alone"
    assert row.figures["used_us"] == pytest.approx(15e6)
    assert order[:4] == ["write", "call", "read", "check"]


def test_ratios_of_used(monkeypatch):
    """Each is the bare call's divided by the candidate's own."""
    seconds = {"mpi4py": (1.0, 6.0), "ring": (2.0, 4.0)}
    monkeypatch.setattr("mpidist.bench.candidates.bare", lambda comm, case: lambda: None)

    def timed(self, entry):
        call, used = seconds[entry.name]
        return call, False, 0.0, 0.0, 0, 0, used

    monkeypatch.setattr(Series, "_call", timed)
    results = bench(1, ["allreduce"], sizes=[64], algorithms=["ring"])
    ratios = {row.candidate: (row.ratio, row.figures["used_ratio"]) for row in results.rows}
    assert ratios == {"mpi4py": (1.0, 1.0), "ring": (0.5, 1.5)}


def test_a_library_beside_mpidist():
    """It is checked like every candidate, and says itself what it cannot do."""

    def job(comm):
        def make(case, extra=0):
            if case.nbytes > 64:
                raise Unsupported("64 bytes at most")

            def call():
                comm.allreduce(case.x, out=case.out, algorithm="ring")
                case.out += extra

            return call

        others = [Candidate("theirs", other=make), Candidate("off", other=lambda c: make(c, 1))]
        settings = Settings(sizes=(64, 1 << 10), algorithms=["linear"], **QUICK)
        return measure(comm, ["allreduce"], settings, others=others)

    results = run_simulated(2, job)[0]
    found = {row.candidate: row for row in results.rows if row.bytes == 64}
    assert found["theirs"].correct and not found["off"].correct and not results.correct
    assert found["theirs"].backend == "theirs" and "used_us" in found["theirs"].figures
    (refusal,) = (r for r in results.unsupported if r.candidate == "theirs")
    assert refusal == Refusal("allreduce", "theirs", 1 << 10, "64 bytes at most")


def test_measure_without_garbage_collection():
    enabled = []

    def job(comm):
        settings = Settings(sizes=(8,), algorithms=["linear"], **QUICK)
        measure(comm, ["allreduce"], settings, lambda *step: enabled.append(gc.isenabled()))

    run_simulated(1, job)
    assert enabled and not any(enabled) and gc.isenabled()


def test_settings_that_name_nothing_are_refused():
    with pytest.raises(UnknownName, match="'rign'.*'ring'"):
        bench(1, ["allreduce"], algorithms=["rign"])
    with pytest.raises(InvalidArgument, match="'float17'"):
        number_dtype("float17")
    results = bench(2, ["allreduce", "broadcast"], algorithms=["ring", "chain"])
    assert {(r.work, r.candidate) for r in results.unsupported if r.reason.endswith("chain")} == {
        ("allreduce", "chain")
    }


def test_steps_are_as_many_as_were_announced():
    settings = Settings(sizes=(8, 100), algorithms=["linear"], **QUICK)
    told = []

    def job(comm):
        note = (lambda *step: told.append(step)) if comm.rank == 0 else (lambda *step: None)
        measure(comm, ["allreduce", "barrier"], settings, note)

    run_simulated(2, job)
    assert len(told) == steps(["allreduce", "barrier"], settings)
