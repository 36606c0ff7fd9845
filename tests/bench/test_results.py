"""What is made of measured rows: curves, the bound, and two runs beside each other."""

import json
import re

import pytest
from click.testing import CliRunner
from rich.console import Console

from mpidist import run_simulated
from mpidist.bench import Refusal, Results, Row
from mpidist.bench.compare import compare
from mpidist.bench.machine import (
    array_bytes,
    describe_stream,
    knobs,
    last_level_cache,
    measure_stream,
)
from mpidist.bench.report import bench_page, draw, draw_comparison, draw_scaling
from mpidist.bench.results import bound_percent, bound_us, tables
from mpidist.cli import main
from mpidist.commands.bench.collectives import print_results
from mpidist.errors import InvalidArgument, Unsupported
from mpidist.measure import counted, significant, spread

SIZES = [1 << k for k in range(3, 24, 2)]


def row(name, nbytes, time_us, memory="private", **more):
    fields = {"backend": "mpi", "ranks": 2, "dtype": "float32", "op": "sum", "in_place": False}
    fields |= {"algbw_gbs": 1.0, "busbw_gbs": 1.0, "ratio": 2.0, "correct": True}
    return Row("allreduce", name, bytes=nbytes, time_us=time_us, memory=memory, **fields | more)


def line(name, alpha, beta, **more):
    return [row(name, n, alpha + beta * n, **more) for n in SIZES]


# -- curves --------------------------------------------------------------------------------------


def test_distinct_styles_of_curves():
    rows = [one for k in range(14) for one in line(f"w{k}", 1 + k, 1e-3)]
    rows += line("mpi4py", 1, 1) + line("native", 1, 1) + line("w3", 1, 1, memory="symmetric")
    left, right = draw(Results({}, rows)).axes
    styles = {(one.get_color(), one.get_marker(), one.get_linestyle()) for one in left.lines[:17]}
    assert len(styles) == 17
    assert len(right.get_legend().get_texts()) == 17


# -- the bound ------------------------------------------------------------------------------------


def test_bound_us():
    assert bound_us(1_000_000_000, 2, 40.0) == pytest.approx(100_000)
    header = {"stream": {"gbs": 40.0}}
    one = row("symmetric", 1_000_000_000, 125_000.0, memory="symmetric")
    assert bound_percent(one, header) == pytest.approx(80)
    assert bound_percent(one, {}) is None
    assert bound_percent(row("ring", 8, 1.0), header) is None
    other = row("symmetric", 8, 1.0, memory="symmetric")
    other.work = "broadcast"
    assert bound_percent(other, header) is None


def test_stream_array_bytes():
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


def test_memory_is_measured_on_all_ranks_alike():
    found = run_simulated(2, lambda comm: measure_stream(comm, 1 << 20))
    assert found[0] == found[1] and found[0].gbs > 0 and found[0].array_bytes == 1 << 20
    text = describe_stream({"ranks": 2, "stream": found[0].as_header()})
    assert "GB/s" in text and "all 2 ranks" in text
    assert describe_stream({}) == ""


def test_spread():
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


def test_the_command_prints_two_runs_without_mpi(tmp_path):
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


def test_compared_runs_as_a_plot_and_a_page(tmp_path):
    first, second = runs()
    for results in (first, second):
        results.rows += [row("e", 64, 10.4 if results is second else 10.0)]
        results.rows += [Row("step", "x", 2, 10.0), Row("step", "y", 2, 10.0)]
    collective, step = draw_comparison({"b": compare(first, second)}).axes
    (ringed,) = [one for one in collective.lines if one.get_label() == "_worse"]
    assert list(ringed.get_ydata()) == [0.5]  # not e, which is 4 % slower
    ratios = {one.get_label(): list(one.get_ydata()) for one in collective.lines}
    assert ratios["a"] == [2.0] and [1, 1] in ratios.values()
    assert [text.get_text() for text in step.get_xticklabels()] == ["x", "y"]
    paths = [str(tmp_path / name) for name in ("a.json", "b.json", "c.json", "p.svg", "p.html")]
    for path, results in zip(paths, (first, second, second)):
        results.save(path)
    done = CliRunner().invoke(
        main, ["bench", "compare", *paths[:3], "--plot", paths[3], "--report", paths[4]]
    )
    assert done.exit_code == 0 and done.output.count("1 worse") == 2, done.output
    page = (tmp_path / "p.html").read_text()
    assert "<svg" in page and page.count('class="worse') == 2 and f"{paths[2]}: " in page
    assert "<svg" in (tmp_path / "p.svg").read_text()
    with pytest.raises(Unsupported, match="no row is in both runs"):
        draw_comparison({"b": compare(Results({}, first.rows[:1]), Results({}))})


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
    assert ["8", "a", "10.00", "5.000", "2.00", "2.00", "2.00", "better"] in words


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


@pytest.mark.parametrize(
    ("content", "fact"),
    [
        ({"version": 1, "header": {}, "rows": []}, "version 1: expected 2"),
        ({"version": "3", "header": {}, "rows": []}, "version '3': expected 2"),
        ({"header": {}, "rows": []}, "not a result file.*version"),
    ],
)
def test_unknown_version_is_refused(content, fact):
    with pytest.raises(InvalidArgument, match=fact):
        Results.from_json(json.dumps(content))


# -- one JSON form and one table for all benchmarks ----------------------------------------------


def step(work, name, ms, **figures):
    return Row(work, name, 2, 1000.0 * ms, figures=figures)


def test_results_of_training_are_saved_and_compared(tmp_path):
    first = Results({}, [step("step", "none", 10, share=1.0), step("step", "polls", 8, share=0.8)])
    first.benchmark, first.reference, first.notes = "ddp", "mpidist", ["auto: at most 1.0"]
    first.save(str(tmp_path / "r.json"))
    again = Results.from_json((tmp_path / "r.json").read_text())
    assert again == first
    again.rows[1].time_us /= 2
    assert [pair.verdict for pair in compare(first, again).pairs] == ["", "better"]


def test_rows_are_paired_by_deadline_and_ranks():
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


def test_empty_columns_are_left_out():
    overlap = Results({}, [step("s", "none", 10, share=1.0), step("s", "polls", 8, hidden=0.5)])
    (table,) = tables(overlap)
    assert table.heads == ["work", "candidate", "time\nµs", "time /\nnone", "hidden\n%"]
    assert [line.cells for line in table.lines] == [
        ["s", "none", "10,000", "1.00", ""],
        ["s", "polls", "8,000", "", "50"],
    ]
    rows = [row("mpi4py", 8, 2.0), row("ring", 8, 4.0), row("ring", 64, 1.0, correct=False)]
    refused = [Refusal("reduce", "chain", 8, "too slow")]
    first, second = tables(Results({}, rows, refused))
    assert first.heading == "allreduce, 2 ranks, float32, sum"
    assert [line.style for line in first.lines] == ["fastest", "", "wrong"]
    assert [line.starts_group for line in first.lines] == [True, False, True]
    assert second.lines[0].cells == ["chain", "private", "8", "too slow"]


def test_knobs_are_what_the_user_sets():
    job = {"MPIDIST_RUN_NOTES": "a1", "MPIDIST_RUN_SECRET": "b2", "MPIDIST_TERMINAL": "80"}
    assert knobs({**job, "MPIDIST_GPU": "nccl", "HOME": "/"}) == {"MPIDIST_GPU": "nccl"}
    # Intel's launcher sets 30 of these in each rank; the last two are a user's.
    names = [*("I_MPI_INFO_CPU_0", "I_MPI_PIN_INFO", "I_MPI_PIN_MAPPING", "I_MPI_HYDRA_UUID")]
    names += ["I_MPI_INTERNAL_MEM_POLICY", "MPIR_CVAR_CH3_INTERFACE_HOSTNAME"]
    user = {"I_MPI_FABRICS": "shm", "I_MPI_PIN_DOMAIN": "core"}
    assert knobs({**dict.fromkeys(names, "1"), **user}) == user


def test_numbers_as_text():
    values = (0.0, 1.32e-5, 0.99996, 9.9996, 312.8, 22437.4)
    told = [significant(value, 4) for value in values]
    assert told == ["0", "0.00001320", "1.000", "10.00", "312.8", "22,437"]
    assert [counted(n, "step") for n in (0, 1, 2000)] == ["0 steps", "1 step", "2,000 steps"]


def test_a_file_has_the_decimal_points_of_a_column_in_one_place(capsys):
    rows = [row("a", 8, 0.0038311), row("b", 8, 1.045), row("c", 8, 312.8), row("d", 8, 6133.2)]
    print_results(Results({}, rows), Console(width=200))
    lines = capsys.readouterr().out.splitlines()[2:]
    cells = [line.split()[2] for line in lines]
    assert cells == ["time", "0.003831", "1.045", "312.8", "6,133"]
    points = [line.index(".") for line in lines[1:4]]
    assert points == [points[0]] * 3 == [lines[4].index("6,133") + len("6,133")] * 3


def test_scaling_columns():
    rows = [row("auto", n, t, ranks=p) for p, t in ((2, 1.0), (4, 3.0)) for n in (8, 64)]
    (table,) = tables(Results({"nodes": {"2": 1, "4": 2}}, rows, benchmark="scaling"))
    assert table.heads[2:] == ["1 node\nµs", "2 nodes\nµs"]
    assert [line.cells for line in table.lines] == [
        ["8", "auto", "1.000", "3.000"],
        ["64", "auto", "1.000", "3.000"],
    ]


def test_scaling_marks_what_was_measured_on_two_machines():
    rows = [row("auto", 8, 1.0), row("auto", 64, 1.0)]
    rows[1].figures["changed"] = True
    (table,) = tables(Results({"nodes": {"2": 1}}, rows, benchmark="scaling"))
    assert [line.cells[2] for line in table.lines] == ["1.000", "1.000 *"]


def test_scaling_has_a_line_for_each_memory():
    rows = [
        row("auto", n, t * n, memory=memory)
        for memory, t in (("private", 1.0), ("symmetric", 0.25))
        for n in (8, 64)
    ]
    results = Results({"nodes": {"2": 1}}, rows, benchmark="scaling")
    (table,) = tables(results)
    assert {(line.cells[0], line.cells[1], float(line.cells[2])) for line in table.lines} == {
        *(("8", "auto", 8.0), ("64", "auto", 64.0)),
        *(("8", "auto in symmetric", 2.0), ("64", "auto in symmetric", 16.0)),
    }
    curves = {
        line.get_label(): len(line.get_xdata()) for line in draw_scaling(results).axes[0].lines
    }
    assert len(curves) == 2 and set(curves.values()) == {2}


def test_a_lead_within_the_spread_is_no_win():
    def row(candidate, time_us, share):
        return Row(
            **{"work": "allreduce", "candidate": candidate, "ranks": 2, "time_us": time_us},
            **{"ratio": 1.0, "correct": True, "bytes": 8, "spread": share},
        )

    for share, styles in ((1.28, ["", ""]), (0.05, ["fastest", ""])):
        rows = [row("ring", 10.0, share), row("tree", 12.0, 0.01)]
        (table,) = tables(Results({}, rows))
        assert [line.style for line in table.lines] == styles


def test_a_report_warns_of_a_busy_machine_and_follows_the_scheme():
    row = Row(
        **{"work": "allreduce", "candidate": "ring", "ranks": 2, "time_us": 1.0, "ratio": 1.0},
        **{"correct": True, "bytes": 8, "busbw_gbs": 1.0, "dtype": "float32"},
    )
    page = bench_page(Results({"busy": [("here", 2, 1.7)]}, [row]))
    assert "1.7 of the 2 cores of here" in page and 'class="warning"' in page
    assert "prefers-color-scheme: dark" in page and "currentColor" in page
    assert page.count("<svg") == 2, "a wide one and one for phones"
    assert "#000000" not in page and 'class="warning"' not in bench_page(Results({}, [row]))
