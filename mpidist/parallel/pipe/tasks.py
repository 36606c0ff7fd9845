"""One rank's steps with all that does not change between runs worked out."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from ...errors import InvalidArgument, Unsupported, UnsupportedDtype
from ...pipeline import Action, B, F, I, Message, Placement, Step, W
from .stage import Stage


@dataclass(slots=True)
class Task:
    """One action, its messages, and what is to be done around it.

    Attributes
    ----------
    action : Action
        Which.
    kind : str
        Its letter.
    worker : Stage
        The chunk.
    first, last : bool
        Whether the chunk is the first or last virtual stage.
    receive, send : Message or None
        What it needs and hands on.
    receive_tag, send_tag : int
        Their tags.
    following : Message or None
        The next one to come over the same edge, whose receives are posted now.
    releases : bool
        Whether the microbatch needs nothing of this chunk after it.
    where : str
        The rank and the virtual stage, for error messages.
    completes : bool
        Whether the chunk's gradients are complete after it.
    """

    action: Action
    kind: str
    microbatch: int
    chunk: int
    worker: Stage
    first: bool
    last: bool
    receive: Message | None
    send: Message | None
    receive_tag: int
    send_tag: int
    where: str
    following: Message | None = None
    following_tag: int = 0
    releases: bool = False
    completes: bool = False


@dataclass(frozen=True)
class Program:
    """A sequence of tasks.

    Attributes
    ----------
    tasks : list of Task
        In order.
    opening : list of (Message, int, Stage)
        The first message of each edge, its tag, and who gets it: posted before the first task.
    """

    tasks: list[Task]
    opening: list[tuple[Message, int, Stage]]


def say_where(error: Exception, task: Task) -> None:
    """Add rank, stage and action to what is raised: a wrong value may be seen far from there."""
    text = str(error)
    if type(error) not in (InvalidArgument, Unsupported, UnsupportedDtype):
        if hasattr(error, "add_note"):  # Python 3.11
            error.add_note(f"{task.where}: in {task.action} of a pipeline")
    elif not text.startswith("rank "):
        error.args = (f"{task.where}: {text}",)


def compile_steps(
    steps: Sequence[Step],
    rank: int,
    placement: Placement,
    workers: Sequence[Stage],
    tag: Callable[[Message], int],
) -> Program:
    """Make a program of one rank's steps."""
    tasks = [_task(step, rank, placement, workers, tag) for step in steps]
    opening = []
    ahead: dict[tuple, tuple[Message, int]] = {}
    later: set[tuple[int, int]] = set()
    unfinished: set[int] = set(range(len(workers)))
    for task in reversed(tasks):
        if task.receive is not None and not task.receive.local:
            following = ahead.get(task.receive.edge)
            if following is not None:
                task.following, task.following_tag = following
            ahead[task.receive.edge] = task.receive, task.receive_tag
        if task.kind == "F":
            continue
        key = task.chunk, task.microbatch
        task.releases = key not in later
        later.add(key)
        task.completes = task.chunk in unfinished
        unfinished.discard(task.chunk)
    for task in tasks:
        if task.receive is not None and ahead.pop(task.receive.edge, None) is not None:
            opening.append((task.receive, task.receive_tag, task.worker))
    return Program(tasks, opening)


def _task(
    step: Step,
    rank: int,
    placement: Placement,
    workers: Sequence[Stage],
    tag: Callable[[Message], int],
) -> Task:
    action, receive = step.action, step.receive
    stage = placement.stage(rank, action.chunk)
    send = step.sends[0] if step.sends else None
    return Task(
        action,
        action.kind,
        action.microbatch,
        action.chunk,
        workers[action.chunk],
        stage == 0,
        stage == placement.stages - 1,
        receive,
        send,
        tag(receive) if receive is not None else -1,
        tag(send) if send is not None else -1,
        f"rank {rank}, stage {stage}",
    )


def forwards(steps: Sequence[Step]) -> list[Step]:
    """Give the forward half of steps."""
    return [step for step in steps if isinstance(step.action, F)]


def backwards(steps: Sequence[Step]) -> list[Step]:
    """Give the other half."""
    return [step for step in steps if isinstance(step.action, (B, I, W))]
