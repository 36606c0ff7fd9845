"""The plan of a pipeline: the schedule that the ranks agreed on, and the tasks of each rank."""

from __future__ import annotations

import hashlib
import statistics
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, TypeVar

from ..communicator.communicator import Communicator
from ..errors import InvalidArgument, Unsupported, UnsupportedDtype
from .schedules import (
    Action,
    Costs,
    Message,
    PipelineSchedule,
    Placement,
    Span,
    Step,
    as_schedule,
)
from .schedules.automatic import automatic, check_caps
from .schedules.messages import attach
from .schedules.prove import prove_parts
from .stage import Stage

Made = TypeVar("Made")


@dataclass(frozen=True)
class Plan:
    """A proved schedule for given numbers of ranks, microbatches and chunks."""

    name: str
    placement: Placement
    steps: tuple[list[Step], ...]  # of every rank
    # Largest number of live activations (of a chunk for a microbatch) on each rank.
    peaks: tuple[int, ...]

    @cached_property
    def first(self) -> int:
        """The rank that holds the first stage."""
        return self.placement.owner(0)[0]

    @cached_property
    def last(self) -> int:
        """The rank that holds the last stage."""
        return self.placement.owner(self.placement.stages - 1)[0]

    def digest(self) -> str:
        """Return a digest of the actions of all ranks, by which ranks compare their plans."""
        actions = repr([[step.action for step in part] for part in self.steps])
        return hashlib.blake2b(actions.encode(), digest_size=8).hexdigest()


def make_plan(
    schedule: str | PipelineSchedule | Callable, size: int, microbatches: int, chunks: int
) -> Plan:
    """Return the plan of a schedule, after proving it; ScheduleError if it is wrong."""
    known = as_schedule(schedule)
    placement = known.place(size, chunks)
    parts = [known.actions(rank, size, microbatches, chunks) for rank in range(size)]
    return plan_of(known.name, placement, parts, microbatches)


def plan_of(
    name: str, placement: Placement, parts: Sequence[Sequence[Action]], microbatches: int
) -> Plan:
    """Return the plan of given actions (`parts`: one list per rank), after proving it."""
    steps = attach(parts, placement)
    proof = prove_parts(name, steps, placement, microbatches)
    return Plan(name, placement, steps, proof.peak)


# -- agreement between ranks --------------------------------------------------------------------


def on_all_ranks(comm: Communicator, make: Callable[[], Made], what: str) -> Made:
    """Call ``make()`` on every rank and return this rank's result; collective.

    If it fails on any rank, its own error is raised there, and on the others InvalidArgument with
    that rank and the reason; `what`, such as "schedule", says what the call checks.
    """
    made, failure = None, None
    try:
        made = make()
    except Exception as error:  # a user's own generator may raise anything
        failure = error
    reasons = comm.allgather_object(failure and f"{type(failure).__name__}: {failure}")
    if failure is not None:
        raise failure
    for rank, reason in enumerate(reasons):
        if reason:
            raise InvalidArgument(f"Pipeline: {what} fails on rank {rank}: {reason}")
    return made  # type: ignore[return-value]


def from_rank_0(comm: Communicator, make: Callable[[], Made], what: str) -> Made:
    """Call ``make()`` on rank 0 and return its result on every rank; collective.

    Errors are raised as by :func:`on_all_ranks`.
    """
    made = on_all_ranks(comm, lambda: make() if comm.rank == 0 else None, what)
    return comm.broadcast_object(made)


def check_equal(comm: Communicator, **settings: Any) -> None:
    """Raise InvalidArgument on every rank if a setting differs between ranks; collective."""
    everyone = comm.allgather_object(settings)
    for rank, found in enumerate(everyone):
        for name, value in found.items():
            if value != everyone[0][name]:
                raise InvalidArgument(
                    f"Pipeline: rank {rank} has {name} {value!r} where rank 0 has "
                    f"{everyone[0][name]!r}: expected the same on every rank"
                )


# -- the tasks of a rank ------------------------------------------------------------------------


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


# -- schedule="auto" ----------------------------------------------------------------------------

STEPS = 4
"""Number of measured steps; the first one only warms up."""


class Measuring:
    """The first steps of ``schedule="auto"``, which measure the stages; created collectively.

    `cap` is the largest number of live activations on a rank: one for all, one for each, or None
    for the number of virtual stages; `splits` is whether backward of any stage of this rank has
    halves.
    """

    def __init__(
        self,
        comm: Communicator,
        microbatches: int,
        chunks: int,
        cap: Any,
        splits: bool,
        placement: str,
    ):
        self._placement = placement
        self._comm, self._microbatches, self._chunks = comm, microbatches, chunks
        self._cap = check_caps(cap, comm.size, chunks, f"rank {comm.rank}: Pipeline: max_live")
        self._splits = any(comm.allgather_object(splits))
        # Nothing is known yet: the plan is one for stages of equal times, under the same cap.
        self.plan, self._left = self._compute(Costs()), STEPS
        self._seconds: dict[tuple[int, str], list[float]] = {}

    def _compute(self, costs: Costs) -> Plan:
        """Return the plan that rank 0 computes (ranks may have different schedules registered)."""
        size, microbatches, chunks = self._comm.size, self._microbatches, self._chunks
        where = self._cap, chunks, self._placement, self._splits

        def orders() -> list[list[Action]]:
            made = automatic(size, microbatches, costs, *where)
            return [made.actions(rank, size, microbatches, chunks) for rank in range(size)]

        parts = from_rank_0(self._comm, orders, "schedule='auto'")
        return plan_of("auto", Placement(size, chunks, self._placement), parts, microbatches)

    def note(self, spans: Sequence[Span]) -> tuple[Plan, Costs] | None:
        """Record a step's spans; after the last one return the new plan and the measured costs.

        Collective.  Before the last step it returns None.
        """
        self._left -= 1
        if self._left < STEPS - 1:
            for action, begin, end in spans:
                stage = self.plan.placement.stage(self._comm.rank, action.chunk)
                kind = "I" if action.kind == "B" else action.kind
                self._seconds.setdefault((stage, kind), []).append(end - begin)
        if self._left:
            return None
        medians = {key: statistics.median(times) for key, times in self._seconds.items()}
        found: dict[tuple[int, str], float] = {}
        for part in self._comm.allgather_object(medians):
            found.update(part)
        stages = range(self.plan.placement.stages)
        forward, halves, weights = (
            [found.get((stage, kind), 0.0) for stage in stages] for kind in "FIW"
        )
        costs = Costs(forward, halves, weights)
        return self._compute(costs), costs
