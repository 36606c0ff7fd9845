"""The machine: made-up round trips of a cache line, its memory, its variables."""

import pytest

from mpidist import run_simulated
from mpidist.bench import Results, Settings, machine, measure
from mpidist.bench.machine import (
    Watch,
    array_bytes,
    describe_stream,
    knobs,
    last_level_cache,
    measure_stream,
)
from mpidist.bench.results import CHANGED_NOTE, tables
from mpidist.bench.runner import run_benchmark


def fake(monkeypatch, *nanoseconds):
    """Let each rank see these round trips, one after another; the last one again and again."""
    seen = {}

    def round_trip(comm):
        at = seen[comm.rank] = seen.get(comm.rank, -1) + 1
        ns = nanoseconds[min(at, len(nanoseconds) - 1)]
        return None if ns is None else 1e-9 * ns

    monkeypatch.setattr(machine, "round_trip", round_trip)


@pytest.mark.parametrize(
    ("looks", "changed"),
    [([50], False), ([50, 79], False), ([50, 81], True), ([81, 60, 50], True), ([50, None], False)],
)
def test_a_change_is_more_than_a_factor_of_1_6(monkeypatch, looks, changed):
    fake(monkeypatch, *looks)
    watch = Watch(type("Comm", (), {"rank": 0}))
    for _ in looks:
        watch.look()
    assert watch.changed == changed
    figures = watch.figures()
    assert figures.get("changed", False) == changed
    known = [ns for ns in looks if ns is not None]
    assert (figures["line_ns"], figures["line_most_ns"]) == pytest.approx((min(known), max(known)))
    assert ("has changed" in watch.described()) == changed


QUICK = Settings(sizes=(64, 4096), algorithms=["ring"], iterations=3, budget=1.0)


def bench(monkeypatch, *nanoseconds):
    fake(monkeypatch, *nanoseconds)

    def job(comm):
        watch = Watch(comm)
        watch.look()
        results = run_benchmark(comm, ["allreduce"], QUICK)
        watch.end(results)
        return results

    return run_simulated(2, job)[0]


def test_rows_of_two_machines_are_marked(monkeypatch):
    """The state of both sizes is 50 in the first pass; the second size is at 300 in the last."""
    # before; three passes over two sizes, two looks at each; after
    looks = [50, *[50, 52], *[50, 51], *[50, 50], *[50, 50], *[53, 50], *[50, 300], 300]
    results = bench(monkeypatch, *looks)
    marked = {row.bytes: row.figures.get("changed", False) for row in results.rows}
    assert marked == {64: False, 4096: True}
    first, second = (row.figures for row in results.rows)
    assert (first["line_ns"], first["line_most_ns"]) == pytest.approx((50, 53))
    assert (second["line_ns"], second["line_most_ns"]) == pytest.approx((50, 300))
    assert results.header["line_ns"] == pytest.approx({"before": 50, "after": 300})
    assert CHANGED_NOTE in results.notes and "50 ns before, 300 ns after" in results.notes[-1]
    again = Results.from_json(results.to_json())
    assert again.rows == results.rows and again.header == results.header
    (table,) = [each for each in tables(results) if each.heading]
    mark = table.heads.index("")  # the column of the mark "*" has no head
    assert [line.cells[mark] for line in table.lines] == ["", "*"]
    head, *lines = results.to_csv().splitlines()
    assert [line.split(",")[head.split(",").index("changed")] for line in lines] == ["", "True"]


def test_rows_of_one_machine_have_no_mark(monkeypatch):
    """Each look at the machine takes 50 ns, so it has not changed during the bench."""
    results = bench(monkeypatch, 50)
    assert CHANGED_NOTE not in results.notes
    assert all("" not in each.heads for each in tables(results))  # no column of the mark


def test_unknown_round_trips_are_not_told():
    """Threads of one process have no shared memory of ranks."""
    results = run_simulated(2, lambda comm: measure(comm, ["allreduce"], QUICK))[0]
    assert all("line_ns" not in row.figures for row in results.rows)


def test_array_bytes_are_beyond_the_cache():
    assert array_bytes(2, 260 << 20, 100 << 30) == 520 << 20
    assert array_bytes(4, 260 << 20, 100 << 30) == 260 << 20
    assert array_bytes(2, 260 << 20, 1 << 30) == 64 << 20  # a quarter of it, in four arrays
    assert array_bytes(1, 0, 0) == 16 << 20


def test_last_level_cache(tmp_path):
    for index, content in enumerate(
        [("1", "Data", "48K"), ("1", "Instruction", "64K"), ("3", "Unified", "266240K")]
    ):
        folder = tmp_path / "cpu0" / "cache" / f"index{index}"
        folder.mkdir(parents=True)
        for name, text in zip(("level", "type", "size"), content):
            (folder / name).write_text(text + "\n")
    (tmp_path / "cpu1" / "cache" / "index0").mkdir(parents=True)  # tells nothing
    assert last_level_cache(str(tmp_path)) == 266240 << 10
    assert last_level_cache(str(tmp_path / "nothing")) == 0


def test_measure_stream_all_ranks_alike():
    found = run_simulated(2, lambda comm: measure_stream(comm, 1 << 20))
    assert found[0] == found[1] and found[0].gbs > 0 and found[0].array_bytes == 1 << 20
    text = describe_stream({"ranks": 2, "stream": found[0].as_header()})
    assert "GB/s" in text and "all 2 ranks" in text
    assert describe_stream({}) == ""


def test_knobs_are_what_the_user_sets():
    job = {"MPIDIST_RUN_NOTES": "a1", "MPIDIST_RUN_SECRET": "b2", "MPIDIST_TERMINAL": "80"}
    assert knobs({**job, "MPIDIST_GPU": "nccl", "HOME": "/"}) == {"MPIDIST_GPU": "nccl"}
    # Intel's launcher sets 30 of these in each rank; the last two are a user's.
    names = [*("I_MPI_INFO_CPU_0", "I_MPI_PIN_INFO", "I_MPI_PIN_MAPPING", "I_MPI_HYDRA_UUID")]
    names += ["I_MPI_INTERNAL_MEM_POLICY", "MPIR_CVAR_CH3_INTERFACE_HOSTNAME"]
    user = {"I_MPI_FABRICS": "shm", "I_MPI_PIN_DOMAIN": "core"}
    assert knobs({**dict.fromkeys(names, "1"), **user}) == user
