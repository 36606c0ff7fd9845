"""What IPython asks objects for: pictures of schedules and timelines, tables of proofs, results."""

import pytest

import mpidist.pipeline
from mpidist.bench.results import Results, Row
from mpidist.pipeline.schedules.prove import prove as prove_pipeline
from mpidist.pipeline.schedules.show import svg as pipeline_svg
from mpidist.schedule import prove
from mpidist.schedule.notebook import html_table
from mpidist.schedule.reading import read
from mpidist.schedule.show import svg


@pytest.mark.parametrize(
    "shown",
    [
        read("allreduce", "ring", 4),
        svg("broadcast", "binomial", 3),
        mpidist.pipeline.simulate("1f1b", 2, 4),
        pipeline_svg("gpipe", 2, 4),
    ],
    ids=["reading", "svg", "timeline", "pipeline svg"],
)
def test_pictures(shown):
    text = shown._repr_svg_()
    assert text.startswith("<svg ") and text.rstrip().endswith("</svg>")


def test_proofs():
    proof = prove("allreduce", "ring", 4)
    assert f'<td>messages</td><td style="text-align: right">{proof.messages}</td>' in (
        proof._repr_html_()
    )
    assert "<td>microbatches</td>" in prove_pipeline("1f1b", 2, 4)._repr_html_()


def test_results():
    rows = [Row("allreduce", name, 2, time, bytes=8) for name, time in (("a<b", 1.0), ("c", 2.0))]
    text = Results({}, rows, notes=["1 < 2"])._repr_html_()
    assert "<th>candidate</th>" in text and "a&lt;b" in text and "<p>1 &lt; 2</p>" in text


def test_numbers_are_right_aligned():
    text = html_table([("x", "1,234"), ("y", -1.5)])
    assert text.count("text-align: right") == 2
