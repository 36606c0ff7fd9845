"""The strongest peer at each size: states of the machine, ratios, and the tables of them."""

import json
import sys
from pathlib import Path

import pytest

from benchmarks import compare, strongest
from benchmarks.plan import ONLY_IN_PLACE, PEERS, QUICK_PEERS, PeerLaunch, plan_peers
from benchmarks.strongest import FAR, NEAR, ONE, Spot
from mpidist.bench import Row

K = 1 << 10
PYTHONS = ["/a/ompi/bin/python", "/a/intel/bin/python"]
LIBRARIES = {"oneCCL": PYTHONS[1], "DeepSpeed": PYTHONS[0]}
APART, PLACE = ("allreduce", False), ("allreduce", True)


def row(name, used, nbytes=64 * K, line=140.0, most=150.0, memory="private", **more):
    figures = {"used_us": used, "line_ns": line, "line_most_ns": most, **more.pop("figures", {})}
    made = Row("allreduce", name, 2, used / 2, correct=True, figures=figures)
    made.bytes, made.memory = nbytes, memory
    made.in_place = more.pop("in_place", False)
    return made


def header(vendor):
    return {"mpi": {"vendor": vendor, "version": "1"}, "ranks": 2, "date": "today", "cores": 2}


def launches():
    """Two MPIs, a library that is in place only, and one that is faster out of place."""
    far = {"line": 600.0, "most": 640.0}
    ours = [row("auto", 20.0), row("auto", 5.0, memory="symmetric"), row("native", 1.0)]
    mixed = [row("mpi4py", 1.0, line=140, most=900, figures={"changed": True})]
    return [
        ("", header("A"), [row("mpi4py", 50.0), *ours, row("auto", 90.0, **far)]),
        ("", header("A"), [row("mpi4py", 70.0), row("mpi4py", 80.0, **far)]),
        ("", header("B"), [row("mpi4py", 40.0), row("auto", 8.0), *mixed]),
        ("shm", header("A"), [row("mpi4py", 0.1), row("shm", 10.0, in_place=True)]),
        ("gloo", header("A"), [row("gloo", 900.0), row("gloo", 950.0, in_place=True)]),
    ]


def test_plan():
    found = plan_peers(PYTHONS, LIBRARIES, 2, PEERS, Path("/built"))
    assert len({one.name for one in found}) == len(found)
    assert [one.number for one in found] == sorted(one.number for one in found)
    first = [one for one in found if one.number == 1]
    assert sum(one.library == "" for one in first) == 4, "each MPI, apart and in place"
    assert {one.place for one in first if one.library in ONLY_IN_PLACE} == {"in place"}
    own = next(one for one in first if one.library == "").words()
    other = next(one for one in first if one.library == "oneCCL").words()
    assert own[:2] == ["mpidist", "bench"] and other[0] == "benchmarks/peers.py"
    for option in ("--bytes", "--budget"):
        assert own[own.index(option) + 1] == other[other.index(option) + 1]
    assert sum(one.expected_seconds() for one in found) < 20 * 60
    quick = plan_peers(PYTHONS, LIBRARIES, 2, QUICK_PEERS, Path("/built"))
    assert sum(one.expected_seconds() for one in quick) < 60


def test_states_and_medians():
    found = strongest.gathered(launches())
    assert found.peers == ["A 1", "B 1", "shm", "gloo"] and found.mixed == 1
    assert found.states == {NEAR: (140.0, 150.0), FAR: (600.0, 640.0)}
    assert found.time(Spot(NEAR, *APART, 64 * K, "A 1")) == 60.0, "the median of two launches"
    assert found.time(Spot(FAR, *APART, 64 * K, "A 1")) == 80.0
    assert found.time(Spot(NEAR, *APART, 64 * K, "gloo")) == 900.0
    assert found.time(Spot(NEAR, *PLACE, 64 * K, "gloo")) == 900.0, "the better of both places"
    assert found.time(Spot(NEAR, *PLACE, 64 * K, "private", "A 1")) is None
    alone = strongest.gathered(launches(), alone=True)
    assert alone.time(Spot(FAR, *APART, 64 * K, "A 1")) == 40.0


def test_the_strongest():
    found = strongest.gathered(launches())
    assert found.strongest(NEAR, APART, 64 * K) == ("shm", 10.0)
    assert found.strongest(FAR, APART, 64 * K) == ("A 1", 80.0)
    assert found.strongest(NEAR, APART, 8) == ("", 0.0)
    assert found.ratio(NEAR, APART, 64 * K, "private", "A 1") == 0.5
    assert found.ratio(NEAR, APART, 64 * K, "symmetric", "A 1") == 2.0
    assert found.ratio(NEAR, APART, 64 * K, "private", "B 1") == 1.25
    assert found.ratio(FAR, APART, 64 * K, "private", "B 1") is None


def test_round_trip_not_known():
    rows = [row("mpi4py", 5.0), row("auto", 4.0)]
    for one in rows:
        del one.figures["line_ns"], one.figures["line_most_ns"]
    found = strongest.gathered([("", header("A"), rows)])
    assert found.ratio(ONE, APART, 64 * K, "private", "A 1") == 1.25 and found.mixed == 0
    assert "not known" in strongest.described(found, ONE)


def test_border_between_the_states():
    trips = [(120, 150), (125, 190), (600, 700), (640, 690)]
    rows = [row("auto", 5.0, line=low, most=high) for low, high in trips]
    changed = row("auto", 5.0, line=60, most=300, figures={"changed": True})
    assert 190 < strongest.border_of([*rows, changed]) < 600
    assert strongest.border_of(rows[:2]) is None and strongest.border_of([]) is None


def test_tables():
    found = strongest.gathered(launches())
    text = strongest.summary(found, strongest.gathered(launches(), alone=True))
    assert '"allreduce", "private", "**0.50**"' in text
    assert '"allreduce", "symmetric", "2.00"' in text
    assert "private arrays: allreduce 64K.  In symmetric arrays: nowhere." in text
    assert "round trip of a cache line 600 to 640 ns" in text
    assert '"A 1", "private", "**0.50**; a peer is faster in 1 of 1; calls alone' in text
    page = strongest.page(found, 3)
    assert '"64K", "60.00", "40.00", "**10.00**", "900.0", "20.00", "8.000", "5.000", ""' in page
    assert "1 row left out" in page and "A 1 2, B 1 1, shm 1, gloo 1" in page
    table = strongest.readme(found)
    assert "| near | private | **0.50** |" in table and "| far | private | **0.89** |" in table


def test_table_of_the_readme():
    text = f"before\n{strongest.BEGIN}\nold\n{strongest.END}\nafter\n"
    changed = strongest.placed(text, "| new |")
    assert changed == f"before\n{strongest.BEGIN}\n| new |\n{strongest.END}\nafter\n"
    with pytest.raises(SystemExit, match=r"README\.md: expected"):
        strongest.placed("no marks", "| new |")


FAKE = """
import json, sys
words = " ".join(sys.argv)
if "gloo" in words:
    print("it fell over"); sys.exit(7)
candidate = "oneCCL" if "oneCCL" in words else "mpi4py"
row = dict(work="allreduce", candidate=candidate, ranks=2, bytes=65536, time_us=5.0, correct=True,
    figures=dict(used_us=10.0, line_ns=140.0, line_most_ns=141.0))
content = dict(version=2, benchmark="collectives", reference="mpi4py", rows=[row],
    header={"ranks": 2, "mpi": {"vendor": "A", "version": "1"}})
json.dump(content, open(sys.argv[sys.argv.index("--json") + 1], "w"))
"""


def test_launches_on_disk(tmp_path, monkeypatch):
    (tmp_path / "mpidist").mkdir()
    (tmp_path / "mpidist" / "__main__.py").write_text(FAKE)
    monkeypatch.setattr(compare, "ROOT", tmp_path)
    monkeypatch.setenv("PYTHONPATH", "")
    here = sys.executable
    every = plan_peers([here], {"oneCCL": here, "gloo": here}, 2, QUICK_PEERS, tmp_path / "built")
    some = [one for one in every if one.place == "in place"]
    assert all(isinstance(one, PeerLaunch) for one in some)
    compare.run_missing(some, tmp_path, 1.0)
    found, _ = compare.gather_peers(some, tmp_path)
    assert found.strongest(ONE, APART, 64 * K) in [("A 1", 10.0), ("oneCCL", 10.0)]
    (note,) = found.notes
    assert "exit code 7" in note and note.startswith("FAILED") and "gloo" in note
    assert all(str(tmp_path) not in command for command in found.commands)
    content = json.loads((tmp_path / f"{some[0].name}.json").read_text())
    assert content["results"]["rows"][0]["figures"]["used_us"] == 10.0
    compare.write_peers(found, found, tmp_path / "out", 1)
    assert "FAILED" in (tmp_path / "out" / "peers-tables.inc").read_text()


def test_the_readme_has_the_means_of_the_page():
    """Both are written from the same launches: neither was changed by hand, or alone."""
    root = Path(compare.__file__).parents[1]
    page = (root / "docs" / "benchmarks_data" / "peers.inc").read_text(encoding="utf-8")
    wanted, state = {}, ""
    for line in page.splitlines():
        if line.startswith("**"):
            state = line.strip("*").partition(",")[0]
        elif line.startswith('   "mean", '):
            _, memory, *cells, _ = [cell.strip('"') for cell in line.strip().split(", ")]
            wanted[state, memory] = cells
    text = (root / "README.md").read_text(encoding="utf-8")
    table = text.partition(strongest.BEGIN)[2].partition(strongest.END)[0].strip().splitlines()
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in table[2:]]
    assert {(row[0], row[1]): row[2:] for row in rows} == wanted and len(wanted) >= 2
