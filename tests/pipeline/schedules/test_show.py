"""Pictures of pipelines, and the commands around them."""

import inspect
import json
import re
import xml.dom.minidom
from dataclasses import replace

import pytest
from click.testing import CliRunner

from mpidist.cli import main
from mpidist.errors import ScheduleError
from mpidist.pipeline.schedules import Costs, schedules, simulate
from mpidist.pipeline.schedules.show import comparison, picture, svg, text
from mpidist.pipeline.schedules.trace import Trace, mean_costs, write
from tests.support.pipeline_kits import measured

ONE_F_ONE_B = """\
1f1b on 3 ranks, 4 microbatches: F 1, I 1, W 1
F forward   B backward   . waits

rank 0  F0 F1 F2 .  .  .  .  B0--- F3 B1--- .  B2--- .  B3---
rank 1  .  F0 F1 .  .  B0--- F2 B1--- F3 B2--- .  B3--- .  .
rank 2  .  .  F0 B0--- F1 B1--- F2 B2--- F3 B3--- .  .  .  .
makespan 18, bubble 33.3 % of all ranks' time; within a rank's own span: 6, 3, 0
peak live activations by rank: 3, 2, 1 (microbatches)
16 messages; outstanding at most, to each rank: 3, 3, 2; on one edge: 3"""

ZB_V = """\
zb-v on 2 ranks, 2 chunks each, 3 microbatches: F 1, I 1, W 1
F forward   I gradient of the input   W gradient of the weights   a, b, … chunks   . waits

rank 0  F0a F1a F2a F0b I0b W0b F1b I1b W1b I0a W0a F2b I2b W2b I1a W1a I2a W2a .
rank 1  .   F0a F0b F1a F1b I0b W0b F2a I0a W0a F2b I1b W1b I1a I2b I2a W1a W2b W2a
makespan 19, bubble 5.3 % of all ranks' time; within a rank's own span: 0, 0
peak live activations by rank: 4, 4 (chunks of microbatches)
12 messages; outstanding at most, to each rank: 3, 3; on one edge: 3"""


@pytest.fixture(autouse=True)
def no_launch(monkeypatch):
    for name in ("OMPI_COMM_WORLD_RANK", "PMI_RANK", "PMIX_RANK", "SLURM_PROCID"):
        monkeypatch.delenv(name, raising=False)


def call(*arguments, status=0):
    result = CliRunner().invoke(main, [str(a) for a in arguments], prog_name="mpidist")
    if not isinstance(result.exception, (SystemExit, type(None))):
        raise result.exception
    assert result.exit_code == status, result.output
    return result.output


def test_text():
    assert text("1f1b", 3, 4) == ONE_F_ONE_B
    assert text("zb-v", 2, 3) == ZB_V


@pytest.mark.parametrize("schedule", schedules(), ids=lambda s: s.name)
def test_every_schedule_has_its_pictures(schedule):
    for size, microbatches, costs in ((1, 1, None), (4, 8, None), (3, 5, (0.31, 0.2, 0.17, 0.05))):
        lines = text(schedule, size, microbatches, costs=costs).splitlines()
        assert lines == [line.rstrip() for line in lines]
        drawn = picture(schedule, size, microbatches, costs=costs)
        narrow = drawn.text(60).splitlines()
        assert max(len(line) for line in narrow if line.startswith("rank")) <= 60
        root = xml.dom.minidom.parseString(drawn.svg()).documentElement
        plain = root.toxml().replace('xmlns="http://www.w3.org/2000/svg"', "")
        assert root.tagName == "svg" and "http" not in plain
        line = drawn.panels[0].timeline
        boxes = [
            node
            for group in root.getElementsByTagName("g")
            if group.getAttribute("class") == "box"
            for node in group.getElementsByTagName("rect")
        ]
        kinds = {span.action.kind for part in line.spans for span in part}
        assert len(boxes) == sum(map(len, line.spans)) + len(kinds)  # and one each in the legend
        width = float(root.getAttribute("width"))
        assert all(
            float(b.getAttribute("x")) + float(b.getAttribute("width")) <= width for b in boxes
        )


@pytest.mark.parametrize("schedule", schedules(), ids=lambda s: s.name)
def test_the_docstring_says_what_the_others_say(schedule):
    """One sentence, bubble and peak, the paper, and the picture that the code gives."""
    doc = inspect.getdoc(schedule.function)
    assert re.match(r"[^\n]+\.\n", doc)
    for words in ("Bubble: ", "Peak live activations: ", "Source: "):
        assert words in " ".join(doc.split())
    size, microbatches = map(int, re.search(r"(\d) ranks, (\d) microbatches", doc).groups())
    figure = [li for li in text(schedule, size, microbatches).splitlines() if li[:4] == "rank"]
    drawn = [li.strip() for li in doc.splitlines() if li.strip()[:4] == "rank"]
    assert drawn == figure


def test_short_actions_are_seen_or_counted():
    """One column where the rank waits behind them; what has none is told."""
    made = picture("1f1b", 4, 6, costs=Costs(20.3, 0.51, 0.49))
    drawn = made.text()
    kinds = [kind for line in made.lines() for _, kind in line]
    shown = kinds.count("B")
    assert kinds.count("F") == 24 and 12 < shown < 24
    assert f"{24 - shown} actions too short to be drawn here" in drawn
    assert "too short" not in picture("1f1b", 4, 6).text()


def test_narrow_boxes_have_a_number_rather_than_a_letter():
    def rows(columns):
        lines = picture("1f1b", 2, 12).lines(columns)
        pieces = [(text.rstrip(" -"), kind) for line in lines for text, kind in line]
        words = [text for text, _ in pieces]
        return any("number alone" in word for word in words), [
            text for text, kind in pieces if kind in ("F", "B")
        ]

    told, labels = rows(200)
    assert not told and {*labels} == {f"{kind}{k}" for kind in "FB" for k in range(12)}
    told, labels = rows(60)
    bare = {label for label in labels if label.isdigit()}
    assert told and {len(label) for label in bare} == {1, 2} and "F0" in labels
    assert all(label[:1] in "FB" for label in labels if label not in bare)


def test_nothing_wrong_is_drawn():
    def wrong(rank, size, microbatches):
        yield from ()

    with pytest.raises(ScheduleError, match=r"rank 0, stage 0, step 0: .*F\(0\)"):
        svg(wrong, 2, 1)


def test_measured_under_predicted():
    run = measured()
    drawn = comparison(Trace(run, Costs(0.020, 0.021, 0.018, 0.001), (3, 3, 3)))
    above, below = (panel.timeline.makespan for panel in drawn.panels)
    assert [panel.heading for panel in drawn.panels] == ["predicted", "measured"]
    assert below == pytest.approx(1.05 * above)
    lines = drawn.text(100).splitlines()
    assert lines.index("predicted") < lines.index("measured")
    assert sum("bubble" in line for line in lines) == 2 == sum("peak live" in li for li in lines)
    assert f"makespan {1000 * above:.3g} ms" in drawn.text()
    assert "counted" not in drawn.text() and "e-1" not in drawn.text()
    off = comparison(Trace(run, Costs(), (9, 3, 3))).text()
    assert "3, 3, 3 (microbatches); counted by the run: 9, 3, 3" in off


def test_show(tmp_path):
    assert call("show", "1f1b", "--stages", 3, "--microbatches", 4).rstrip() == ONE_F_ONE_B
    assert "on 4 ranks, 8 microbatches" in call("show", "gpipe")
    assert "3 chunks each" in call("show", "interleaved", "--chunks", 3)
    uneven = call("show", "zb-h1", "--stages", 2, "--costs", "1:2,1,0.5,0.25")
    assert "F 1/2, I 1, W 0.5, message 0.25" in uneven
    made = call("show", "auto", "--stages", 2, "--microbatches", 3, "--costs", "1:2,1,1")
    assert made.startswith("auto on 2 ranks, 3 microbatches: F 1/2, I 1, W 1")
    drawn, dots = tmp_path / "a.svg", tmp_path / "a.png"
    assert str(dots) in call("show", "zb-v", "--svg", drawn, "--png", dots)
    assert drawn.read_text().startswith("<svg") and dots.read_bytes()[1:4] == b"PNG"


def test_show_in_a_terminal(monkeypatch):
    monkeypatch.setenv("MPIDIST_TERMINAL", "90")
    coloured = call("show", "zb-h1")
    assert "\x1b[" in coloured
    plain = re.sub("\x1b\\[[0-9;]*m", "", coloured).splitlines()
    assert sum(line.startswith("rank ") for line in plain) == 4  # no line is broken
    assert all(len(line) <= 90 for line in plain if line.startswith("rank "))


def test_show_a_trace(tmp_path):
    run = measured()
    path = tmp_path / "run.json"
    write(path, Trace(run, mean_costs(run), run.peak))
    told = call("show", "zb-h1", "--stages", 3, "--microbatches", 4, "--trace", path)
    assert told == call("show", "--trace", path) and "measured" in told
    assert told != call("show", "--trace", path, "--costs", "1,1,1")
    assert f"schedule 1f1b: the run of {path} had zb-h1" in call(
        "show", "1f1b", "--trace", path, status=2
    )
    assert "--stages 4: the run" in call("show", "--stages", 4, "--trace", path, status=2)
    picture_of = tmp_path / "a.png"
    call("show", "--trace", path, "--png", picture_of)
    assert picture_of.stat().st_size > 10_000


OWN = """
from mpidist.pipeline import B, F

def depth_first(rank, size, microbatches):
    '''One microbatch at a time.'''
    for microbatch in range(microbatches):
        yield F(microbatch)
        yield B(microbatch)

def crossed(rank, size, microbatches):
    yield from (F(0), F(1), B(rank), B(1 - rank))

number = 3
"""


def test_a_generator_of_ones_own(tmp_path, monkeypatch):
    (tmp_path / "own_schedule.py").write_text(OWN)
    monkeypatch.chdir(tmp_path)
    for name in ("own_schedule:depth_first", "own_schedule.py:depth_first"):
        assert "bubble 66.7 %" in call("show", name, "--stages", 3)
        assert "all proved" in call("prove", "--pipeline", name)
    case = ("--ranks", "2", "--microbatches", "2")
    broken = call("prove", "--pipeline", "own_schedule:crossed", *case, status=1)
    assert "counter-example: pipeline schedule crossed: 2 ranks, 2 microbatches: rank 0, " in broken
    assert "1 schedule, 0 proofs of 0 messages" in broken and "1 NOT proved" in broken
    assert "rank 0, stage 0, step 2: B(0) takes" in call(
        *("show", "own_schedule:crossed", "--stages", 2, "--microbatches", 2), status=1
    )
    for name, message in (
        ("own_schedule:none", "own_schedule has no function none"),
        ("own_schedule:number", "own_schedule has no function number"),
        ("no_such_file:x", "no_such_file:x: no such file"),
        ("math:sqrt", "schedule=sqrt: it must take (rank, size, microbatches)"),
    ):
        assert message in call("show", name, status=2)


def test_prove_pipelines():
    told = call("prove", "--pipeline", "--ranks", "1-3", "--microbatches", "1-4")
    variants = 5 + 3  # five schedules, and the interleaved one with 1, 2 and 3 chunks
    proofs = variants * 3 * 4  # numbers of ranks, numbers of microbatches
    assert told.splitlines()[-1].endswith("all proved")
    assert f"6 schedules, {proofs} proofs" in told
    report = json.loads(call("prove", "--pipeline", "1f1b,zb-v", "--ranks", "2", "--json"))
    assert report["proved"] and [row["name"] for row in report["rows"]] == ["1f1b", "zb-v"]
    assert report["rows"][0]["sizes"] == [2]
    assert report["proofs"] == 2 * 16  # schedules, and 1 to 16 microbatches by default


def test_list_pipelines():
    rows = json.loads(call("list", "pipeline", "--json"))
    assert [row["schedule"] for row in rows] == [schedule.name for schedule in schedules()]
    assert all(row["summary"].endswith(".") for row in rows)
    for told in (call("list"), call("list", "pipeline")):
        assert all(f"\n{schedule.name} " in told for schedule in schedules())


@pytest.mark.parametrize(
    "arguments, message",
    [
        (("show",), "expected a COLLECTIVE and an ALGORITHM, or a pipeline SCHEDULE"),
        (("show", "allreduce"), "allreduce is a collective: expected an algorithm after it"),
        (("show", "a", "b", "c"), "expected a COLLECTIVE and an ALGORITHM"),
        (("show", "2f2b"), "unknown SCHEDULE or COLLECTIVE '2f2b'; did you mean '1f1b'"),
        (("show", "1f1b", "--stages", "0"), "--stages … 0 is not … x>=1"),
        (("show", "1f1b", "--microbatches", "-1"), "--microbatches … -1 is not … x>=1"),
        (("show", "auto", "--chunks", "0"), "--chunks … 0 is not … x>=1"),
        (("show", "1f1b", "--costs", "1,2"), "--costs … '1,2' … expected three numbers, or four"),
        (("show", "1f1b", "--costs", "1,2,x"), "--costs … '1,2,x' … expected three numbers"),
        (("show", "1f1b", "--costs", "1,-2,1"), "costs: I=-2.0: expected finite numbers >= 0"),
        (("show", "1f1b", "--costs", "1:2,1,1"), "F has 2 times; expected one, or one for each"),
        (("show", "1f1b", "--png", "a.jpg"), "--png … a.jpg … ends in .png"),
        (
            ("show", "1f1b", "--svg", "/none/a.svg"),
            "--svg … /none/a.svg cannot be written … an existing folder",
        ),
        (("show", "--trace", "none.json"), "trace none.json: cannot be read"),
        (("prove", "--pipeline", ","), "--pipeline … ',' … expected names with commas"),
        (("prove", "--pipeline", "1f2b"), "unknown pipeline schedule '1f2b'"),
        (("prove", "--pipeline", "1f1b", "--arity", "2"), "--arity: only for algorithms"),
        (
            ("prove", "--pipeline", "interleaved,1f1b", "--chunks", "1-3"),
            "chunks 2 … 1f1b has 1 on each rank … any number is possible with interleaved",
        ),
        (("prove", "--chunks", "2"), "--chunks: only for pipeline schedules"),
        (("prove", "--pipeline", "--microbatches", "0"), "--microbatches … 0 is too small … >= 1"),
    ],
)
def test_what_is_asked_wrongly(arguments, message):
    """The message has all of this, in this order: option, value, what is expected."""
    pattern = ".*".join(re.escape(part) for part in message.split(" … "))
    text = call(*arguments, status=2)
    assert re.search(pattern, text, re.DOTALL), text


def test_error_names_schedules_for_the_chunks():
    told = call("show", "zb-v", "--chunks", "3", status=1)
    assert "zb-v: chunks=3: expected 2 on each rank; chunks=3 is possible with interleaved" in told


def test_timeline_peaks():
    run = measured()
    assert run.peak == simulate("zb-h1", 3, 4).peak
    assert replace(run, name="other").peak == run.peak
