"""The boxes and labels of a picture."""

from mpidist.pipeline.schedules.gantt import COLOURS
from mpidist.pipeline.schedules.show import picture


def test_boxes_stand_where_the_actions_are():
    drawn = picture("gpipe", 2, 2).sheet()
    boxes = drawn.boxes[2:]
    slot = boxes[0].width
    assert [round((b.x - boxes[0].x) / slot) for b in boxes] == [0, 1, 5, 7, 1, 2, 3, 5]
    assert [b.text for b in boxes] == list("01100110")
    assert [b.colour for b in boxes[:3]] == [COLOURS["F"]] * 2 + [COLOURS["B"]]
    assert boxes[4].y > boxes[3].y
