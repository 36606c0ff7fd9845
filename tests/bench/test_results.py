"""What is made of measured rows: curves, the bound, and two runs beside each other."""

import json
import re

import pytest
from click.testing import CliRunner

from mpidist import run_simulated
from mpidist.bench import Results, Row
from mpidist.bench.compare import compare
from mpidist.bench.memory import array_bytes, describe_stream, last_level_cache, measure_stream
from mpidist.bench.plots import draw
from mpidist.bench.results import bound_percent, bound_us
from mpidist.cli import main
from mpidist.measure import spread

SIZES = [1 << k for k in range(3, 24, 2)]


def row(name, nbytes, time_us, memory="private", **more):
    fields = {"backend": "mpi", "ranks": 2, "dtype": "float32", "op": "sum", "in_place": False}
    fields |= {"algbw_gbs": 1.0, "busbw_gbs": 1.0, "vs_native": 2.0, "correct": True}
    return Row("allreduce", name, bytes=nbytes, time_us=time_us, memory=memory, **fields | more)


def line(name, alpha, beta, **more):
    return [row(name, n, alpha + beta * n, **more) for n in SIZES]


# -- curves --------------------------------------------------------------------------------------


def test_many_curves_have_each_a_style_of_their_own():
    rows = [one for k in range(14) for one in line(f"w{k}", 1 + k, 1e-3)]
    rows += line("mpi4py", 1, 1) + line("native", 1, 1) + line("w3", 1, 1, memory="symmetric")
    left, right = draw(Results({}, rows)).axes
    styles = {(one.get_color(), one.get_marker(), one.get_linestyle()) for one in left.lines[:17]}
    assert len(styles) == 17
    assert len(right.get_legend().get_texts()) == 17


# -- the bound ------------------------------------------------------------------------------------


def test_the_bound_is_the_time_of_2ps_bytes():
    assert bound_us(1_000_000_000, 2, 40.0) == pytest.approx(100_000)
    header = {"stream": {"gbs": 40.0}}
    one = row("symmetric", 1_000_000_000, 125_000.0, memory="symmetric")
    assert bound_percent(one, header) == pytest.approx(80)
    assert bound_percent(one, {}) is None
    assert bound_percent(row("ring", 8, 1.0), header) is None
    other = row("symmetric", 8, 1.0, memory="symmetric")
    other.collective = "broadcast"
    assert bound_percent(other, header) is None


def test_arrays_are_four_caches_or_what_memory_allows():
    assert array_bytes(2, 260 << 20, 100 << 30) == 520 << 20
    assert array_bytes(4, 260 << 20, 100 << 30) == 260 << 20
    assert array_bytes(2, 260 << 20, 1 << 30) == 64 << 20  # a quarter of it, in four arrays
    assert array_bytes(1, 0, 0) == 16 << 20


def test_the_last_level_cache_is_read_where_the_system_tells(tmp_path):
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


def test_memory_is_measured_on_all_ranks_alike():
    found = run_simulated(2, lambda comm: measure_stream(comm, 1 << 20))
    assert found[0] == found[1] and found[0].gbs > 0 and found[0].array_bytes == 1 << 20
    text = describe_stream({"ranks": 2, "stream": found[0].as_header()})
    assert "GB/s" in text and "all 2 ranks" in text
    assert describe_stream({}) == ""


def test_the_spread_is_half_of_the_middle_half():
    assert spread([1.0, 2.0, 3.0]) is None
    assert spread([10.0] * 9) == 0
    assert spread([8.0, 9.0, 10.0, 11.0, 12.0]) == pytest.approx(0.15)


# -- two runs -------------------------------------------------------------------------------------


def runs():
    versions = {"mpidist": "1", "numpy": "2"}
    first = Results({"ranks": 2, "date": "x", "versions": versions}, [])
    second = Results({"ranks": 4, "date": "y", "versions": {**versions, "numpy": "3"}}, [])
    first.rows = [row("a", 8, 10.0), row("b", 8, 10.0), row("c", 8, 10.0), row("d", 8, 10.0)]
    second.rows = [row("a", 8, 5.0), row("b", 8, 20.0), row("c", 8, 10.5)]
    second.rows += [row("d", 8, 10.0, memory="symmetric")]
    return first, second


def test_rows_are_paired_and_judged_beyond_noise():
    found = compare(*runs())
    assert [(p.first.algorithm, p.ratio, p.verdict) for p in found.pairs] == [
        ("a", 2.0, "better"),
        ("b", 0.5, "worse"),
        ("c", pytest.approx(10 / 10.5), ""),
    ]
    assert [r.memory for r in found.only_first] == ["private"]
    assert [r.memory for r in found.only_second] == ["symmetric"]
    assert found.headers == [("ranks", "2", "4"), ("versions numpy", "2", "3")]


def test_a_wide_spread_widens_the_noise_and_wrong_is_worse():
    first, second = Results({}, [row("a", 8, 10.0)]), Results({}, [row("a", 8, 7.0, spread=0.5)])
    assert compare(first, second).pairs[0].verdict == ""
    second.rows[0].correct = False
    assert compare(first, second).pairs[0].verdict == "worse, now WRONG"
    assert compare(second, first).pairs[0].verdict == "better, now right"


def test_the_command_prints_two_runs_without_mpi(tmp_path):
    paths = []
    for name, results in zip("ab", runs()):
        paths.append(str(tmp_path / f"{name}.json"))
        results.save(paths[-1])
    done = CliRunner().invoke(main, ["bench", "compare", *paths])
    assert done.exit_code == 0, done.output
    lines = [text.split() for text in done.output.splitlines()]
    named = ["allreduce", "8", "a", "private", "apart"]
    assert [*named, "10", "5", "2.00", "2.00", "2.00", "better"] in lines
    assert ["ranks", "2", "4"] in lines
    assert "only in the second run" in done.output and "1 better, 1 worse" in done.output


def test_the_verdict_fits_a_narrow_terminal(tmp_path, monkeypatch):
    monkeypatch.setenv("MPIDIST_TERMINAL", "80")
    monkeypatch.setenv("NO_COLOR", "1")
    paths = []
    for name, results in zip("ab", runs()):
        results.rows.append(row("hierarchical_leaders", 1 << 26, 123_456.0))
        paths.append(str(tmp_path / f"{name}.json"))
        results.save(paths[-1])
    text = CliRunner().invoke(main, ["bench", "compare", *paths]).output
    text = re.sub("\x1b\\[[0-9;]*m", "", text)
    assert "…" not in text and all(len(line) <= 80 for line in text.splitlines())
    assert "allreduce, private memory, apart: first run and second run" in text
    words = [line.split() for line in text.splitlines()]
    assert ["8", "a", "10", "5", "2.00", "2.00", "2.00", "better"] in words


@pytest.mark.parametrize(
    ("content", "words"),
    [(None, "No such file"), ("{", "not a result file"), ("[1]", "not a result file")],
)
def test_bad_files_are_named(tmp_path, content, words):
    good, bad = tmp_path / "good.json", tmp_path / "bad.json"
    runs()[0].save(str(good))
    if content is not None:
        bad.write_text(content)
    done = CliRunner().invoke(main, ["bench", "compare", str(good), str(bad)])
    assert done.exit_code == 2 and str(bad) in done.output and words in done.output


def test_files_from_before_memory_and_spread_are_compared(tmp_path):
    first, second = runs()
    content = json.loads(first.to_json())
    for one in content["rows"]:
        del one["memory"], one["spread"]
    assert compare(Results.from_json(json.dumps(content)), second).pairs[0].verdict == "better"
