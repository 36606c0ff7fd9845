"""The benchmark: its formulas, checks and records; on simulated ranks, for times are not tested."""

import gc
import re

import numpy as np
import pytest

from mpidist import run_simulated
from mpidist.bench import Refusal, Results, Row, Settings, Workload, measure, runner, steps
from mpidist.bench.candidates import Candidate, candidates
from mpidist.bench.cases import Case, number_dtype, rounded_total
from mpidist.bench.overhead import engine_overhead
from mpidist.bench.report import as_svg, bench_page, draw
from mpidist.bench.runner import Entrant, Series
from mpidist.communicator.layers import calibrate
from mpidist.engine.calibration import measure_links
from mpidist.errors import InvalidArgument, UnknownName, Unsupported
from mpidist.measure import (
    add_cost,
    algbw,
    busbw,
    format_size,
    parse_size,
    parse_sizes,
    ping_pong,
    round_size,
)
from mpidist.schedule import COLLECTIVES, Send, algorithm, algorithms
from mpidist.schedule.registry import unregister


def test_sizes_are_read_in_units_of_1024():
    assert [parse_size(t) for t in ("8", "64K", "1M", "2G", "1.5k", "3KiB", "4MB", "7B")] == [
        8,
        65536,
        1 << 20,
        2 << 30,
        1536,
        3072,
        4 << 20,
        7,
    ]
    assert parse_sizes("8,64K,8") == [8, 65536]
    assert parse_sizes("8-200") == [8, 32, 128, 200]


@pytest.mark.parametrize("text", ["", "x", "-8", "1T", "1.3", "8,,9", "64K-8", "0-8", "8-", "1e3"])
def test_what_is_no_size_is_refused(text):
    with pytest.raises(InvalidArgument, match=r"^'[^']*' .*: "):
        parse_sizes(text)


@pytest.mark.parametrize("nbytes", [0, 1, 8, 1000, 1024, 1536, 65536, 668712, 1 << 20, 3 << 29])
def test_parse_size_of_format_size(nbytes):
    assert parse_size(format_size(nbytes)) == nbytes
    assert len(round_size(nbytes)) <= 8


@pytest.mark.parametrize("unit", [1 << 10, 1 << 20])
@pytest.mark.parametrize("number", [1.1234, 99.99, 999.4, 1001.1, 1023.9])
def test_a_rounded_size_has_three_digits(number, unit):
    text = round_size(round(number * unit))
    assert "e" not in text and len(text) <= 6
    read = float(text[:-1]) * {"K": 1 << 10, "M": 1 << 20, "G": 1 << 30}[text[-1]]
    assert read == pytest.approx(number * unit, rel=0.006)


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


def test_bandwidths_are_those_of_nccl_tests():
    assert algbw(8_000_000_000, 2.0) == 4.0
    expected = {
        "allreduce": 4.0 * 2 * 3 / 4,
        "reduce_scatter": 3.0,
        "allgather": 3.0,
        "alltoall": 3.0,
        "gather": 3.0,
        "scatter": 3.0,
        "broadcast": 4.0,
        "reduce": 4.0,
        "scan": 4.0,
        "exscan": 4.0,
        "barrier": 0.0,
    }
    assert set(expected) == set(COLLECTIVES)
    for collective, value in expected.items():
        assert busbw(collective, 8_000_000_000, 2.0, 4) == pytest.approx(value)
        assert busbw(collective, 8, 1e-6, 1) == (0.0 if value != 4.0 else algbw(8, 1e-6))


def test_speeds_of_memory_and_messages_are_positive():
    assert add_cost(1 << 16) > 0
    found = run_simulated(3, calibrate)
    assert found[0] == found[1] == found[2]
    assert found[0].alpha > 0 and found[0].beta >= 0 and found[0].gamma > 0
    assert run_simulated(1, calibrate)[0].alpha == 0
    (link,), near = run_simulated(3, measure_links)[2]
    assert link.inside and near.alpha == link.alpha > 0 and near.gamma > 0
    times = run_simulated(3, lambda comm: ping_pong(comm, 2, 8, repeat=3, first=1))
    assert times[0] == 0 and times[1] > 0


QUICK = {"iterations": 1, "budget": 0.05}


def bench(size, collectives, **settings):
    settings = Settings(**{"sizes": (0, 1000), **QUICK, **settings})
    every = run_simulated(size, lambda comm: measure(comm, collectives, settings))
    assert every[0].rows == every[-1].rows  # all ranks know the same
    return every[0]


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


@pytest.mark.parametrize(
    ("dtype", "op"),
    [
        ("int8", "sum"),
        ("float16", "sum"),
        ("bfloat16", "sum"),
        ("float32", "mean"),
        ("complex64", "prod"),
        ("bool", "or"),
        ("uint16", "xor"),
        ("float64", "max"),
    ],
)
def test_sums_are_exact_in_every_dtype(dtype, op):
    names = ["ring", "linear"]
    assert bench(
        4, ["allreduce"], sizes=[1000], dtype=number_dtype(dtype), op=op, algorithms=names
    ).correct


def test_a_wrong_algorithm_is_found_out():
    @algorithm("allreduce", "forgetful", blocks=1)
    def forgetful(rank, size):
        """Keep what this rank has."""
        yield (Send((rank + 1) % size),) if size < 1 else ()

    try:
        names = ["forgetful", "ring"]
        results = bench(2, ["allreduce"], algorithms=names, sizes=(4, 1000), in_place=True)
    finally:
        unregister("allreduce", "forgetful")
    assert {row.candidate: row.correct for row in results.rows} == {
        "forgetful": False,
        "ring": True,
    }


def test_tolerance_is_the_rounding_of_the_sum():
    numbers = np.random.default_rng(1).standard_normal(999).astype(np.float32)
    results = bench(
        3, ["allreduce"], data=numbers, sizes=[numbers.nbytes], bits=True, algorithms=["ring"]
    )
    assert results.correct and results.identical == {"ring": True}
    low, high = rounded_total(numbers, 3, 900, 7)
    assert (low <= high).all()
    exact = sum(numbers[7 * r : 7 * r + 900].astype(float) for r in range(3))
    assert (np.abs(low - exact) <= 1e-5).all() and (np.abs(high - exact) <= 1e-5).all()


def test_no_two_turns_have_the_same_data():
    work = Workload("allreduce", 0, 2, 0, 400, "float32")
    case = work.case(400)
    seen = []
    for turn in range(5):
        case.fill(turn)
        case.out[:] = case.expected[0][1][turn : turn + case.out.size]
        assert case.check(turn) and not case.check(turn + 1)
        seen.append(case.x.tobytes())
    assert len(set(seen)) == 5


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


@pytest.mark.parametrize("collective", [c for c in COLLECTIVES if c != "barrier"])
@pytest.mark.parametrize("in_place", [False, True])
def test_what_is_read_is_the_result(collective, in_place):
    """All that is checked, in words of 8 bytes: a changed word is in memory that is read."""
    for rank in range(3):
        work = Workload(collective, rank, 3, 1, 240, "float32", in_place=in_place)
        case = work.case(240)
        for bare in (False, True):
            special = bare and case.bare_expected is not None
            windows = case.bare_expected if special else case.expected
            read = case.result(bare)
            assert sum(x.nbytes for x in read) == sum(m.nbytes for m, _, _ in windows)
            assert all(any(np.shares_memory(m, x) for x in read) for m, _, _ in windows)


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


def example():
    call = {"bytes": 8, "dtype": "float32", "op": "sum", "backend": "mpi"}
    bandwidths = {"algbw_gbs": 1.0, "busbw_gbs": 2.0}
    rows = [
        Row("allreduce", name, 2, t * n, 1 / t, n < 900, **call | bandwidths | {"bytes": n})
        for n in (8, 1024)
        for name, t in (("mpi4py", 1.0), ("ring", 2.5))
    ]
    refused = [Refusal("allgather", "neighbor_exchange", 8, "an even number <of> ranks")]
    return Results(
        {"ranks": 2, "host": "h", "date": "d", "versions": {"mpidist": "1"}}, rows, refused
    )


def test_records_are_read_as_they_were_written(tmp_path):
    results = example()
    results.save(str(tmp_path / "r.json"))
    again = Results.from_json((tmp_path / "r.json").read_text())
    assert again == results
    with pytest.raises(InvalidArgument, match="not a result file"):
        Results.from_json('{"rows": [{"bytes": 1}]}')


def test_missing_symmetric_memory_is_refused():
    with pytest.raises(InvalidArgument, match="memory='shared': .*auto, private, symmetric, both"):
        bench(1, ["allreduce"], memory="shared")
    with pytest.raises(Unsupported, match="no shared memory"):
        bench(2, ["allreduce"], memory="symmetric")


def test_candidates():
    def of(*args):
        return run_simulated(1, lambda comm: candidates(comm, *args))[0]

    every = {a.name for a in algorithms("allgather")}
    private = of("allgather", None, "private")
    assert private[0] == Candidate("mpi4py", "private")
    assert {c.name for c in private} >= every | {"native", "auto"}
    assert all(c.memory == "private" and c.name != "symmetric" for c in private)
    symmetric = of("allgather", None, "symmetric")
    assert symmetric[:2] == [Candidate("mpi4py"), Candidate("native")]
    assert {c.name for c in symmetric[2:]} >= every | {"native", "auto", "symmetric"}
    assert {c.memory for c in symmetric[2:]} == {"symmetric"}
    both = of("allgather", None, "both")
    assert set(both) == set(private) | set(symmetric) and len(both) == len(set(both))
    assert of("allgather", ["ring"], "symmetric")[2:] == [Candidate("ring", "symmetric")]
    # Simulated ranks have no symmetric memory, so "auto" is private there, and no error.
    assert set(of("allgather", None, "auto")) == set(private)


def test_the_page_needs_nothing_else():
    page = bench_page(example())
    links = set(re.findall(r"""(?:src|href)=["']([^#"'][^"']*)""", page))
    assert not links and "<svg" in page and "WRONG" in page and "&lt;of&gt;" in page
    assert "<script" not in page and "@import" not in page and "url(http" not in page


def test_curves_have_a_line_for_each_algorithm():
    figure = draw(example())
    assert len(figure.axes) == 2 and len(figure.axes[0].lines) == 2
    assert as_svg(figure).startswith("<svg")


def test_engine_overhead():
    rows = engine_overhead()
    assert [row.figures["deadline_s"] for row in rows] == [0, 60.0]
    assert all(0 < row.time_us < 1000 for row in rows)
