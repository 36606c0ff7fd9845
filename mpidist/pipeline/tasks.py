"""The tasks of a rank: its actions, with when to post a receive, to release and to complete."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from ..errors import InvalidArgument, Unsupported, UnsupportedDtype
from .schedules import Action, Message, Placement, Step
from .stage import Stage


@dataclass(slots=True)
class Task:
    """One action of a rank with its messages, prepared for the executor."""

    action: Action
    kind: str  # this and the next two are copies of the action's fields
    microbatch: int
    chunk: int
    stage: Stage
    last: bool  # whether `stage` is the last of the pipeline
    receive: Message | None  # for which the action waits
    send: Message | None
    local: bool  # whether `receive` comes from another stage of this rank
    send_to: int  # the rank that gets `send`; -1 if it stays on this rank, or there is none
    receive_tag: int  # -1 where there is none
    send_tag: int  # -1 where there is none
    where: str  # rank and virtual stage, for error messages
    # The next message from the same stage to `stage`: posted when `receive` has arrived.
    following: Message | None = None
    following_tag: int = 0
    releases: bool = False  # whether no later action needs the microbatch's saved activations
    completes: bool = False  # whether the stage's gradients are complete: its last action

    def explain(self, error: Exception) -> None:
        """Add to an error of this task where it occurred.

        The text of InvalidArgument, Unsupported and UnsupportedDtype gets rank and stage (unless it
        begins with a rank); from Python 3.11 on, any other error gets a note with rank, stage and
        action.
        """
        text = str(error)
        if type(error) not in (InvalidArgument, Unsupported, UnsupportedDtype):
            if hasattr(error, "add_note"):  # Python 3.11
                error.add_note(f"{self.where}: in {self.action} of a pipeline")
        elif not text.startswith("rank "):
            error.args = (f"{self.where}: {text}",)


@dataclass(frozen=True)
class Tasks:
    """The tasks of one rank in one step, and the receives to post before them."""

    tasks: list[Task]
    # Source rank, tag and receiving stage of the first message from each stage on another rank.
    opening: list[tuple[int, int, Stage]]


def tasks_of(
    steps: Iterable[Step],
    rank: int,
    placement: Placement,
    stages: Sequence[Stage],
    tag: Callable[[Message], int],
) -> Tasks:
    """Return the tasks of one rank for its `steps`, which say when to post, release and complete.

    ``tag(message)`` returns the tag of a message.
    """
    tasks = [_task(step, rank, placement, stages, tag) for step in steps]
    # Backwards, since each question is about what comes later on this rank.  Rank 1 of 3 with 3
    # microbatches, by "zb-h1" (a: activation, g: gradient)::
    #
    #     task        F0   F1   I0   F2   I1   W0   I2   W1   W2      read from right to left
    #     receive     a0   a1   g0   a2   g1   -    g2   -    -
    #     following   a1   a2   g1   -    g2   -    -    -    -       posted when `receive` is there
    #     releases                             x         x    x       the last of its microbatch
    #     completes                                           x       the last of its chunk
    #     opening     a0 and g0, which no earlier task can post
    following: dict[tuple, tuple[Message, int]] = {}  # by edge; at the end, those of `opening`
    needed: set[tuple[int, int]] = set()  # (chunk, microbatch) of the tasks to the right
    incomplete: set[int] = set(range(len(stages)))
    for task in reversed(tasks):
        if task.receive is not None and not task.local:
            after = following.get(task.receive.edge)
            if after is not None:
                task.following, task.following_tag = after
            following[task.receive.edge] = task.receive, task.receive_tag
        if task.kind == "F":
            continue
        key = task.chunk, task.microbatch
        task.releases = key not in needed
        needed.add(key)
        task.completes = task.chunk in incomplete
        incomplete.discard(task.chunk)
    opening = []
    for task in tasks:  # in the order in which the messages are needed
        if task.receive is not None and following.pop(task.receive.edge, None) is not None:
            opening.append((task.receive.source, task.receive_tag, task.stage))
    return Tasks(tasks, opening)


def _task(
    step: Step,
    rank: int,
    placement: Placement,
    stages: Sequence[Stage],
    tag: Callable[[Message], int],
) -> Task:
    """Return the task of one step, without what depends on the steps after it."""
    action, receive = step.action, step.receive
    number = placement.stage(rank, action.chunk)
    send = step.sends[0] if step.sends else None
    return Task(
        action,
        action.kind,
        action.microbatch,
        action.chunk,
        stages[action.chunk],
        number == placement.stages - 1,
        receive,
        send,
        receive is not None and receive.local,
        send.target if send is not None and not send.local else -1,
        tag(receive) if receive is not None else -1,
        tag(send) if send is not None else -1,
        f"rank {rank}, stage {number}",
    )
