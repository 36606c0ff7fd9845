"""The published comparison: its plan, its medians and means, its goals and its tables."""

import json
import math
import sys

import pytest

from benchmarks import compare
from benchmarks.plan import FULL, MAIN, QUICK, VARIANT_LAUNCHES, VARIANTS, Launch, Variant, plan
from benchmarks.tables import (
    TARGETS,
    Group,
    Key,
    Target,
    best_bare,
    goals,
    judge,
    merge,
    page,
    without_paths,
)
from mpidist.bench import Results, Row

K = 1 << 10
HEADER = {"stream": {"gbs": 10.0, "array_bytes": 8, "cache_bytes": 0, "enough": False}}


def row(name, nbytes, time_us, memory="private", **more):
    fields = {"backend": "mpi", "ranks": 2, "dtype": "float32", "op": "sum", "in_place": False}
    fields |= {"algbw_gbs": 1.0, "busbw_gbs": 1.0, "ratio": None, "correct": True}
    fields = {"work": "allreduce", **fields, **more}
    return Row(candidate=name, bytes=nbytes, time_us=time_us, memory=memory, **fields)


def launch(bare, native, own, nbytes=64 * K, **more):
    rows = [row("mpi4py", nbytes, bare), row("native", nbytes, native)]
    return MAIN, HEADER, [*rows, row("symmetric", nbytes, own, "symmetric", **more)]


def test_plan_of_launches():
    found = plan(
        {"/a/ompi/bin/python": "Open MPI", "/a/mpich/bin/python": "MPICH"}, [2, 4], 2, FULL
    )
    assert [one.number for one in found] == sorted(one.number for one in found)
    main = [one for one in found if one.variant.name == MAIN]
    assert len(main) == 5 * 2 * 2 * 2 and len({one.name for one in found}) == len(found)
    of = {(o.mpi, o.ranks, o.variant.name) for o in found if o.number <= VARIANT_LAUNCHES}
    assert {v for m, n, v in of if (m, n) == ("ompi", 4)} == {MAIN, *(v.name for v in VARIANTS)}
    assert ("ompi", 2, "no yield") not in of
    assert {v for m, n, v in of if m == "mpich"} == {MAIN, "tuned malloc"}
    assert sum(one.expected_seconds() for one in found) < 20 * 60
    quick = plan({"/a/ompi/bin/python": "Open MPI"}, [2, 4], 2, QUICK)
    assert sum(one.expected_seconds() for one in quick) < 120


def test_ratios_within_a_launch():
    cells = merge([launch(100, 110, 50), launch(900, 990, 100), launch(30, 33, 30)])
    cell = cells[Key("allreduce", False, 64 * K, "symmetric", "symmetric")]
    assert cell.times_us == [50, 100, 30] and cell.time_us == 50
    assert cell.ratio == 2.0 and cell.native_ratio == pytest.approx(2.2)
    # 2pS = 4 * 64 KiB at 10 GB/s are 26.2 µs, of 50 µs
    assert cell.percent == pytest.approx(100 * 4 * 64 * K / 1e4 / 50)
    bare = cells[Key("allreduce", False, 64 * K, "mpi4py")]
    assert bare.ratio == 1.0 and bare.percent is None


def test_wrong_results_and_variants():
    other = ("UCX", {}, [row("mpi4py", 64 * K, 60.0)])
    cells = merge([launch(100, 100, 50, correct=False), launch(100, 100, 50), other])
    assert cells[Key("allreduce", False, 64 * K, "symmetric", "symmetric")].wrong == 1
    key = Key("allreduce", False, 64 * K, "mpi4py")
    assert cells[key].times_us == [100, 100]
    assert best_bare(cells, key) == ("UCX", 60.0)
    assert best_bare(cells, Key("reduce", False, 8, "mpi4py")) is None


def test_goals_at_their_sizes():
    runs = []
    for nbytes, ratio in ((16 * K, 0.1), (64 * K, 2.0), (K * K, 8.0)):
        runs.append(launch(100, 50, 100 / ratio, nbytes))
    cells = merge(runs)
    own = ("allreduce", False, "symmetric", "symmetric", 64 * K, 64 * K * K)
    targets = [
        Target(*own, "least", {2: 1.8}),
        Target(*own, "mean", {2: 4.1}),
        Target(*own, "least native", {2: 1.0, 4: 1.0}),
        Target(*own, "mean", {4: 1.0}),
        Target("reduce", *own[1:], "mean", {2: 1.0}),
    ]
    least, mean, native = judge(cells, 2, targets)
    assert (least.value, least.at, least.met) == (2.0, 64 * K, True)
    assert mean.value == pytest.approx(4.0) and not mean.met and mean.at is None
    assert native.value == pytest.approx(1.0) and native.at == 64 * K


def test_goals_are_measured():
    launches = plan({"/a/ompi/bin/python": "Open MPI"}, [2], 2, FULL)
    measured = {(c, one.place) for one in launches for c in one.bench()[1:7]}
    for target in TARGETS:
        place = "in place" if target.in_place and target.collective != "broadcast" else "apart"
        assert (target.collective, place) in measured


def test_paths_of_this_machine_are_not_published():
    assert without_paths({"A": "1", "B": "/some/where"}) == {"A": "1", "B": "(a path)"}
    text = page(groups(), 5)
    assert "/some/where" not in text and "``B=(a path)``" in text
    assert "UCX: ``OMPI_MCA_pml=ucx" in text and "tuned malloc:" not in text


def groups(**more):
    cells = merge([launch(100, 110, 50), launch(100, 110, 25, 1 << 20)])
    header = {**HEADER, "environment": {"B": "/some/where"}}
    counts = {"as launched, apart": 2, "UCX, apart": 1}
    return [Group("ompi", 2, cells, [header], ["mpidist run"], ["abc"], counts, **more)]


def test_tables():
    text = page(groups(failures=["ompi-2-apart-1: exit code 9"]), 5)
    assert "FAILED: ompi-2-apart-1: exit code 9" in text and "``mpidist run``" in text
    assert '"64K", "100.0", "0.91", "", "", "2.00"' in text
    assert '"1M", "100.0", "0.91", "", "", "4.00"' in text
    mean = next(line for line in text.splitlines() if "**mean from 64K**" in line)
    assert f"**{math.sqrt(8):.2f}**" in mean
    assert "goal" not in text, "the goals of developers are beside the tables of users"
    text = goals(groups())
    assert "2.00 at 64K, goal 1.8: met" in text and "2.83, goal 3: **not met**" in text


FAKE = """
import json, sys
if "in-place" in " ".join(sys.argv):
    print("it fell over"); sys.exit(7)
target = sys.argv[sys.argv.index("--json") + 1]
row = dict(work="allreduce", candidate="mpi4py", ranks=2, time_us=10.0, ratio=1.0, correct=True,
    bytes=65536, dtype="float32", op="sum", backend="mpi", algbw_gbs=1.0, busbw_gbs=1.0)
found = dict(version=2, benchmark="collectives", reference="mpi4py", header={"ranks": 2})
json.dump({**found, "rows": [row]}, open(target, "w"))
"""


def test_resumed_launches_and_failures(tmp_path, monkeypatch):
    (tmp_path / "mpidist").mkdir()
    (tmp_path / "mpidist" / "__main__.py").write_text(FAKE)
    monkeypatch.setattr(compare, "ROOT", tmp_path)
    monkeypatch.setenv("PYTHONPATH", "")
    launches = [
        Launch(sys.executable, 2, place, Variant(MAIN), 1, QUICK) for place in ("apart", "in place")
    ]
    runs = tmp_path / "runs"
    runs.mkdir()
    compare.run_missing(launches, runs, 1.0)
    kept = runs / f"{launches[0].name}.json"
    before = kept.stat().st_mtime_ns
    compare.run_missing(launches, runs, 1.0)
    assert kept.stat().st_mtime_ns == before
    (group,) = compare.gather(launches, runs)
    assert len(group.failures) == 1 and "exit code 7" in group.failures[0]
    assert group.cells[Key("allreduce", False, 65536, "mpi4py")].times_us == [10.0]
    compare.write_merged([group], tmp_path / "out")
    compare.write_tables([group], tmp_path / "out", 1)
    assert "exit code 7" in (tmp_path / "out" / "tables.inc").read_text()
    (merged,) = (tmp_path / "out").glob("*.json")
    content = json.loads(merged.read_text())
    assert content["rows"][0]["figures"]["times_us"] == [10.0]
    assert content["header"]["failures"] == group.failures
    assert Results.from_json(merged.read_text()).rows[0].bytes == 65536
    assert Results.from_json(json.dumps(json.loads(kept.read_text())["results"])).correct


def test_a_launch_that_hangs_is_ended(tmp_path, monkeypatch):
    (tmp_path / "mpidist").mkdir()
    hang = "import signal; print('here', flush=True); signal.pause()"
    (tmp_path / "mpidist" / "__main__.py").write_text(hang)
    monkeypatch.setattr(compare, "ROOT", tmp_path)
    monkeypatch.setenv("PYTHONPATH", "")
    launch = Launch(sys.executable, 2, "apart", Variant(MAIN), 1, QUICK)
    assert "not finished within 2 s" in compare.run_one(launch, tmp_path, "commit", 2.0)
    text = (tmp_path / f"{launch.name}.failed").read_text()
    assert "not finished within 2 s" in text and text.endswith("here\n")


def test_bad_options_are_refused(capsys):
    for words in (["--ranks", "1"], ["--launches", "0"], ["--python", "/no/such/python"]):
        with pytest.raises(SystemExit) as ended:
            compare.read_options([*words, *(["--python", sys.executable] * ("1" in words))])
        assert ended.value.code == 2
        assert "expected" in (told := capsys.readouterr().err) or "no such program" in told


def test_committed_data_stay_small():
    folder = compare.ROOT / "docs" / "benchmarks_data"
    assert 0 < sum(path.stat().st_size for path in folder.iterdir()) < 100_000
