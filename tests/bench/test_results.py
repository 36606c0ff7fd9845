"""Rows and results: their JSON, the bound of an allreduce, and tables."""

import json

import pytest
from rich.console import Console

from mpidist.bench import Refusal, Results, Row
from mpidist.bench.report import draw_scaling
from mpidist.bench.results import bound_percent, bound_us, tables
from mpidist.commands.bench.benchmark import print_results
from mpidist.errors import InvalidArgument
from tests.support.bench_kits import example, row, step


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
    assert second.heads == ["not measured", "memory", "bytes", "reason"]
    assert second.lines[0].cells == ["chain", "private", "8", "too slow"]


def test_a_refusal_of_work_without_a_size_is_below_the_rows_of_such_work():
    refused = [Refusal("step of b", "gloo", None, "no CUDA tensors")]
    results = Results({}, [step("step of a", "none", 10)], refused)
    first, second = tables(results)
    assert [line.cells[0] for line in first.lines] == ["step of a"]
    assert second.heads == ["work", "not measured", "reason"]
    assert second.lines[0].cells == ["step of b", "gloo", "no CUDA tensors"]
    assert Results.from_json(results.to_json()).unsupported == refused


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


def test_from_json_reads_what_was_saved(tmp_path):
    results = example()
    results.save(str(tmp_path / "r.json"))
    again = Results.from_json((tmp_path / "r.json").read_text())
    assert again == results
    with pytest.raises(InvalidArgument, match="not a result file"):
        Results.from_json('{"rows": [{"bytes": 1}]}')
