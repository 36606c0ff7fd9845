"""The constants and curves of the cost model, as they are written to a file and read."""

import json
from dataclasses import asdict, replace

import pytest

from mpidist.errors import ConfigError
from mpidist.schedule.cost import Link, Sharing
from mpidist.schedule.model import Curve
from mpidist.selection.calibration import Calibration
from mpidist.selection.tuning import TuningTable
from tests.support.choices import KNOWN, full, table

NEAR = Sharing.straight(1e-6, 1e-10, 1e-10, 0.0, 1e-9, 1 << 20)
EVERYTHING = replace(
    full({("native", "allreduce"): 1e-6}, (2, 2)),
    far=replace(Link(1e-4, 8e-9).messages, further=Curve.line(1e-5, 8e-9)),
    slots=replace(NEAR, call=2e-6, beyond=None, cache=0),
    published=NEAR,
    noise=0.125,
)


def test_straight_lines_are_the_papers_model():
    known = Calibration.straight(1e-5, 1e-9, 1e-10, Link(1e-4, 0.0))
    assert known.messages.one_way == Curve.line(1e-5, 1e-9)
    assert known.messages.combine == Curve.line(0.0, 1e-10)
    assert known.far == Link(1e-4, 0.0).messages and known.kernels == ()


def test_a_kernel_is_found_by_executor_and_collective():
    assert EVERYTHING.kernel("native", "allreduce").at(1 << 20) == 1e-6
    assert EVERYTHING.kernel("native", "reduce") is EVERYTHING.kernel("staged", "allreduce") is None


def test_a_memory_has_its_own_constants():
    assert EVERYTHING.sharing("published") == NEAR
    assert EVERYTHING.sharing("mapped") is None and EVERYTHING.sharing("slots").call == 2e-6
    only = replace(EVERYTHING, mapped=NEAR, slots=None)
    assert only.sharing("mapped") is only.sharing("slots") is NEAR


@pytest.mark.parametrize("known", [KNOWN, EVERYTHING], ids=["straight", "everything"])
def test_json_brings_back_what_was_written(known):
    assert Calibration.from_json(json.loads(json.dumps(asdict(known))), "here") == known


def test_a_file_keeps_calibrations_beside_entries(tmp_path):
    both = table().merged(TuningTable(calibrations=[EVERYTHING]))
    both.save(tmp_path / "machine.json")
    read = TuningTable.load(tmp_path / "machine.json")
    assert read.entries == table().entries and read.calibration("simulated", (2, 2)) == EVERYTHING
    newer = replace(EVERYTHING, noise=0.0)
    assert read.merged(TuningTable(calibrations=[newer])).calibrations == {
        ("simulated", (2, 2)): newer
    }
    assert read.tunes("simulated", (4,)) and not read.tunes("simulated", (2, 2))
    assert read.why_not("simulated", (2, 2)) is read.why_not("simulated", (4,)) is None
    assert "2 ranks on 1 node" in read.why_not("simulated", (2,))


@pytest.mark.parametrize(
    ("path", "value", "message"),
    [
        (("messages", "call"), "1", r"messages.call is '1': expected a number"),
        (("messages", "call"), -1e-6, r"it has -1e-06: expected numbers >= 0"),
        (("messages", "call"), None, r"messages.call is None: expected a number"),
        (("messages", "copy", "sizes"), [8, 8], r"ascending sizes"),
        (("messages", "copy", "sizes"), [], r"at least one"),
        (("messages", "speed"), 1.0, r"messages.speed is unknown"),
        (("messages",), {}, r"messages.call is missing"),
        (("far",), 3, r"far is 3: expected an object or null"),
        (("far",), {"alpha": 1e-4, "beta": 0.0}, r"far.alpha is unknown"),
        (("published", "read"), 1e-10, r"published.read is 1e-10: expected an object"),
        (("slots", "call"), "x", r"slots.call is 'x': expected a number"),
        (("kernels",), [["native", "allreduce"]], r"kernels\[0\].*expected a list of 3"),
        (("ranks_per_node",), [2.5], r"ranks_per_node\[0\] is 2.5: expected a whole number"),
    ],
)
def test_a_wrong_part_is_named(path, value, message):
    written = json.loads(TuningTable(calibrations=[EVERYTHING]).to_json())
    place = written["calibrations"][0]
    for name in path[:-1]:
        place = place[name]
    place[path[-1]] = value
    with pytest.raises(ConfigError, match=f"m.json: calibration 0: .*{message}"):
        TuningTable.from_json(json.dumps(written), "m.json")


def test_calibrations_are_a_list():
    text = json.dumps({"mpidist_tuning": 1, "entries": [], "calibrations": {}})
    with pytest.raises(ConfigError, match="m.json: 'calibrations' is {}: expected a list"):
        TuningTable.from_json(text, "m.json")
