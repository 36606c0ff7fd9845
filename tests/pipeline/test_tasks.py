"""The tasks of a rank: what is posted when, and what is released."""

import sys
from types import SimpleNamespace

from mpidist.errors import InvalidArgument
from mpidist.pipeline.plan import make_plan
from mpidist.pipeline.tasks import tasks_of


def tasks(schedule, rank, size, microbatches, chunks=1):
    plan = make_plan(schedule, size, microbatches, chunks)
    stages = [SimpleNamespace(number=k) for k in range(chunks)]
    tags = {}
    made = tasks_of(
        plan.steps[rank], rank, plan.placement, stages, lambda m: tags.setdefault(m, len(tags))
    )
    return made, tags


def test_tasks_of_the_middle_rank():
    """The picture in tasks_of: rank 1 of 3 with 3 microbatches, by zb-h1."""
    made, tags = tasks("zb-h1", 1, 3, 3)
    name = {tag: f"{message.kind[0]}{message.microbatch}" for message, tag in tags.items()}
    rows = [
        (
            f"{task.kind}{task.microbatch}",
            "-" if task.receive is None else name[task.receive_tag],
            "-" if task.following is None else name[task.following_tag],
            task.releases,
            task.completes,
        )
        for task in made.tasks
    ]
    assert [row[0] for row in rows] == ["F0", "F1", "I0", "F2", "I1", "W0", "I2", "W1", "W2"]
    assert [row[1] for row in rows] == ["a0", "a1", "g0", "a2", "g1", "-", "g2", "-", "-"]
    assert [row[2] for row in rows] == ["a1", "a2", "g1", "-", "g2", "-", "-", "-", "-"]
    assert [row[0] for row in rows if row[3]] == ["W0", "W1", "W2"]
    assert [row[0] for row in rows if row[4]] == ["W2"]
    opening = [(source, name[tag]) for source, tag, _ in made.opening]
    assert opening == [(0, "a0"), (2, "g0")]


def test_tasks_between_chunks_of_a_rank_send_nothing():
    """zb-v: rank 1 of 2 holds stages 1 and 2, next to each other."""
    made, _ = tasks("zb-v", 1, 2, 4, chunks=2)
    first = next(
        task for task in made.tasks if (task.kind, task.microbatch, task.chunk) == ("F", 0, 0)
    )
    assert first.send is not None and first.send_to == -1 and first.send_tag >= 0
    taken = [task for task in made.tasks if task.local]
    assert taken and all(task.following is None for task in taken)
    assert not {tag for _, tag, _ in made.opening} & {task.receive_tag for task in taken}


def test_explain_says_where():
    """In the text of an error of ours that has no rank; in a note of any other."""
    task = tasks("1f1b", 1, 2, 2)[0].tasks[0]
    for text, told in (("x", "rank 1, stage 1: x"), ("rank 0: x", "rank 0: x")):
        task.explain(error := InvalidArgument(text))
        assert str(error) == told
    task.explain(error := ValueError("x"))
    assert str(error) == "x"
    if sys.version_info >= (3, 11):
        assert error.__notes__ == ["rank 1, stage 1: in F(0) of a pipeline"]
