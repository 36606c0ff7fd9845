"""The file of a measured run, and the mean costs of its actions."""

import json
import re

import pytest

from mpidist.errors import InvalidArgument, ScheduleError
from mpidist.pipeline.schedules import Costs, simulate
from mpidist.pipeline.schedules.trace import Trace, mean_costs, read, write
from tests.support.pipeline_kits import measured


def test_trace_round_trip(tmp_path):
    run = measured("zb-v")
    write(tmp_path / "run.json", Trace(run, mean_costs(run), run.peak))
    found = read(tmp_path / "run.json")
    again, first = found.measured, run.begin
    assert (again.name, again.placement, again.microbatches) == ("zb-v", run.placement, 4)
    assert found.peak == run.peak
    for part, other in zip(again.spans, run.spans, strict=True):
        assert [span.action for span in part] == [span.action for span in other]
        times = [(begin - first, end - first) for _, begin, end in other]
        assert [span[1:] for span in part] == [pytest.approx(pair, abs=2e-9) for pair in times]
    assert pytest.approx(mean_costs(run).F, abs=2e-9) == found.costs.F
    data = json.loads((tmp_path / "run.json").read_text())
    actions = [event for event in data["traceEvents"] if event.get("cat") == "pipeline"]
    assert len(actions) == 3 * 2 * 3 * 4
    assert (actions[0]["pid"], actions[0]["name"], actions[0]["ph"]) == (0, "F(0)", "X")


def test_costs_of_a_run():
    line = simulate("zb-h1", 2, 3, costs=([2, 3], 1, 4))
    assert mean_costs(line, 5) == Costs([2, 3], [1, 1], [4, 4], 5)
    whole = simulate("1f1b", 2, 3, costs=([2, 3], 1, 4))
    assert mean_costs(whole) == Costs([2, 3], [5, 5], [0, 0])
    assert Trace(whole, mean_costs(whole), whole.peak).predict() == whole


def test_a_trace_that_is_wrong(tmp_path):
    run = measured()
    path = tmp_path / "run.json"
    write(path, Trace(run, Costs(), run.peak))
    good = json.loads(path.read_text())
    events = good["traceEvents"]
    step = next(n for n, event in enumerate(events) if event.get("cat") == "pipeline step")
    action = step + 1  # rank 0's F(0)

    def changed(number, *path, to):
        """Return the file with one fact of one event changed, or (None) missing."""
        event = json.loads(json.dumps(events[number]))
        facts = event if len(path) == 1 else event["args"]
        facts[path[-1]] = to
        if to is None:
            del facts[path[-1]]
        return good | {"traceEvents": [*events[:number], event, *events[number + 1 :]]}

    for data, message in (
        (good | {"otherData": {"format": "else"}}, "its format is not"),
        (good | {"traceEvents": events[: step - 1]}, "no step of a pipeline in it"),
        (changed(step, "args", "stages", to=2), "no step of a pipeline in it"),
        (changed(step, "args", "chunks", to=0), "expected whole numbers >= 1"),
        (changed(step, "args", "placement", to="w"), "placement 'w': expected loop, v"),
        (changed(action, "args", "microbatch", to=9), "no such rank, chunk or microbatch"),
        (changed(action, "args", "kind", to="X"), "expected F, B, I or W, with dur >= 0"),
        (changed(action, "dur", to=-1), "expected F, B, I or W, with dur >= 0"),
        (changed(step, "args", "peak", to=None), "args.peak is missing"),
    ):
        path.write_text(json.dumps(data))
        with pytest.raises(InvalidArgument, match=re.escape(f"trace {path}: ")) as failure:
            read(path)
        assert message in str(failure.value)
    path.write_text(json.dumps(good | {"traceEvents": events[:action] + events[action + 1 :]}))
    with pytest.raises(ScheduleError, match=r"I\(0\).*F\(0\)"):
        read(path).predict()
