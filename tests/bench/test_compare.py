"""Two runs beside each other."""

import re

import pytest
from click.testing import CliRunner

from mpidist.bench import Results
from mpidist.bench.compare import compare
from mpidist.cli import main
from tests.support.bench_kits import row, runs, step


def test_compare_pairs_are_judged_beyond_noise():
    found = compare(*runs())
    assert [(p.first.candidate, p.ratio, p.verdict) for p in found.pairs] == [
        ("a", 2.0, "better"),
        ("b", 0.5, "worse"),
        ("c", pytest.approx(10 / 10.5), ""),
    ]
    assert [r.memory for r in found.only_first] == ["private"]
    assert [r.memory for r in found.only_second] == ["symmetric"]
    assert found.headers == [("ranks", "2", "4"), ("versions numpy", "2", "3")]


def test_compare_spread_and_wrong_results():
    first, second = Results({}, [row("a", 8, 10.0)]), Results({}, [row("a", 8, 7.0, spread=0.5)])
    assert compare(first, second).pairs[0].verdict == ""
    second.rows[0].correct = False
    assert compare(first, second).pairs[0].verdict == "worse, now WRONG"
    assert compare(second, first).pairs[0].verdict == "better, now correct"


def test_compare_command_prints_two_runs_without_mpi(tmp_path):
    paths = []
    for name, results in zip("ab", runs()):
        paths.append(str(tmp_path / f"{name}.json"))
        results.save(paths[-1])
    done = CliRunner().invoke(main, ["bench", "compare", *paths])
    assert done.exit_code == 0, done.output
    lines = [text.split() for text in done.output.splitlines()]
    named = ["allreduce", "8", "a", "private", "apart"]
    assert [*named, "10.00", "5.000", "2.00", "2.00", "2.00", "better"] in lines
    assert ["ranks", "2", "4"] in lines
    assert "only in the second run" in done.output and "1 better, 1 worse" in done.output


def test_compare_command_fits_a_narrow_terminal(tmp_path, monkeypatch):
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
    assert ["8", "a", "10.00", "5.000", "2.00", "2.00", "2.00", "better"] in words


@pytest.mark.parametrize(
    ("content", "words"),
    [(None, "No such file"), ("{", "not a result file"), ("[1]", "not a result file")],
)
def test_read_bad_file_is_named(tmp_path, content, words):
    good, bad = tmp_path / "good.json", tmp_path / "bad.json"
    runs()[0].save(str(good))
    if content is not None:
        bad.write_text(content)
    done = CliRunner().invoke(main, ["bench", "compare", str(good), str(bad)])
    assert done.exit_code == 2 and str(bad) in done.output and words in done.output


def test_compare_results_of_training(tmp_path):
    first = Results({}, [step("step", "none", 10, share=1.0), step("step", "polls", 8, share=0.8)])
    first.benchmark, first.reference, first.notes = "ddp", "mpidist", ["auto: at most 1.0"]
    first.save(str(tmp_path / "r.json"))
    again = Results.from_json((tmp_path / "r.json").read_text())
    assert again == first
    again.rows[1].time_us /= 2
    assert [pair.verdict for pair in compare(first, again).pairs] == ["", "better"]


def test_compare_pairs_by_deadline_and_ranks():
    def overhead(us):
        rows = [step("allreduce of 8 bytes", "native", us, deadline_s=d) for d in (0, 60.0)]
        rows[1].time_us *= 2
        return Results({}, rows, benchmark="overhead")

    assert [pair.ratio for pair in compare(overhead(2), overhead(1)).pairs] == [2.0, 2.0]
    rows = [row("auto", 8, 1.0, ranks=2), row("auto", 8, 3.0, ranks=4)]
    scaling = Results({"nodes": {"2": 1, "4": 2}}, rows, benchmark="scaling")
    assert [pair.ratio for pair in compare(scaling, scaling).pairs] == [1.0, 1.0]
    assert compare(scaling, Results(scaling.header)).headers == [
        ("benchmark", "scaling", "collectives")
    ]
