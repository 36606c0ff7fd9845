"""The plan of a pipeline: its schedule, as agreed by the ranks, and the tasks of each rank."""

from __future__ import annotations

import hashlib
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from ..errors import InvalidArgument, Unsupported, UnsupportedDtype
from .schedules import (
    Action,
    B,
    Costs,
    F,
    I,
    Message,
    PipelineSchedule,
    Placement,
    Span,
    Step,
    W,
    as_schedule,
)
from .schedules.automatic import automatic, check_caps
from .schedules.messages import attach
from .schedules.prove import prove_parts
from .stage import Stage

Made = TypeVar("Made")


@dataclass(frozen=True)
class Plan:
    """A schedule for given numbers.

    Attributes
    ----------
    name : str
        The schedule's.
    placement : Placement
        Where the virtual stages lie.
    steps : tuple of list of Step
        Of every rank.
    peaks : tuple of int
        The most activations of a chunk for a microbatch that are alive on each rank.
    """

    name: str
    placement: Placement
    steps: tuple[list[Step], ...]
    peaks: tuple[int, ...]

    @property
    def first(self) -> int:
        """The rank that holds the first stage."""
        return self.placement.owner(0)[0]

    @property
    def last(self) -> int:
        """The rank that holds the last stage."""
        return self.placement.owner(self.placement.stages - 1)[0]


def make_plan(
    schedule: str | PipelineSchedule | Callable, size: int, microbatches: int, chunks: int
) -> Plan:
    """Derive all steps, and prove that they can run."""
    known = as_schedule(schedule)
    placement = known.place(size, chunks)
    parts = [known.actions(rank, size, microbatches, chunks) for rank in range(size)]
    return plan_of(known.name, placement, parts, microbatches)


def plan_of(
    name: str, placement: Placement, parts: Sequence[Sequence[Action]], microbatches: int
) -> Plan:
    """Derive all steps of actions, one list for each rank, and prove that they can run."""
    steps = attach(parts, placement)
    proof = prove_parts(name, steps, placement, microbatches)
    return Plan(name, placement, steps, proof.peak)


def actions_of(plan: Plan) -> str:
    """Give what is the same for the same actions on all ranks, and in hardly any other case."""
    actions = repr([[step.action for step in part] for part in plan.steps])
    return hashlib.blake2b(actions.encode(), digest_size=8).hexdigest()


def together(comm: Any, make: Callable[[], Made], what: str) -> Made:
    """Make something on every rank; collective.

    Raises
    ------
    Exception
        On every rank if it fails on any: there what it was, elsewhere an InvalidArgument that says
        what has failed, and why.
    """
    made, failure = None, None
    try:
        made = make()
    except Exception as error:  # a generator of the user's own may raise anything
        failure = error
    told = comm.allgather_object(failure and f"{type(failure).__name__}: {failure}")
    if failure is not None:
        raise failure
    for rank, reason in enumerate(told):
        if reason:
            raise InvalidArgument(f"Pipeline: {what} fails on rank {rank}: {reason}")
    assert made is not None
    return made


def of_rank_0(comm: Any, make: Callable[[], Any]) -> Any:
    """Give every rank what rank 0 makes; collective.

    Raises
    ------
    Exception
        On every rank if it fails: on rank 0 what it was, elsewhere an InvalidArgument about it.
    """
    made, failure = None, None
    if comm.rank == 0:
        try:
            made = make()
        except Exception as error:
            failure = error
    told = failure and f"{type(failure).__name__}: {failure}"
    made, told = comm.broadcast_object((made, told))
    if failure is not None:
        raise failure
    if told:
        raise InvalidArgument(f"Pipeline: schedule='auto' fails on rank 0: {told}")
    return made


def agree(comm: Any, **settings: Any) -> None:
    """Raise InvalidArgument on every rank if ranks were given different things; collective."""
    everyone = comm.allgather_object(settings)
    for rank, found in enumerate(everyone):
        for name, value in found.items():
            if value != everyone[0][name]:
                raise InvalidArgument(
                    f"Pipeline: rank {rank} has {name} {value!r} where rank 0 has "
                    f"{everyone[0][name]!r}: they must be the same on every rank"
                )


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


STEPS = 4
"""Steps that are measured; the first one only warms up."""


class Measuring:
    """The steps before the schedule is known; collective to make.

    Parameters
    ----------
    comm : Communicator
        Of the pipeline.
    microbatches, chunks : int
        How many there are, and stages on every rank.
    cap : int or sequence of int or None
        Activations that may be alive on a rank.
    splits : bool
        Whether any stage of this rank can do backward in halves.
    placement : {"loop", "v"}
        How the chunks lie on the ranks.

    Attributes
    ----------
    plan : Plan
        What is run meanwhile: computed for stages that take equally long, under the same cap.
    """

    def __init__(
        self, comm: Any, microbatches: int, chunks: int, cap: Any, splits: bool, placement: str
    ):
        self._placement = placement
        self._comm, self._microbatches, self._chunks = comm, microbatches, chunks
        self._cap = check_caps(cap, comm.size, chunks, f"rank {comm.rank}: Pipeline: max_live")
        self._splits = any(comm.allgather_object(splits))
        self.plan, self._left = self._compute(Costs()), STEPS
        self._seconds: dict[tuple[int, str], list[float]] = {}

    def _compute(self, costs: Costs) -> Plan:
        """Have rank 0 compute what all run: ranks may have registered different schedules."""
        size, microbatches, chunks = self._comm.size, self._microbatches, self._chunks
        where = self._cap, chunks, self._placement, self._splits

        def orders() -> list[list[Action]]:
            made = automatic(size, microbatches, costs, *where)
            return [made.actions(rank, size, microbatches, chunks) for rank in range(size)]

        parts = of_rank_0(self._comm, orders)
        return plan_of("auto", Placement(size, chunks, self._placement), parts, microbatches)

    def note(self, spans: Sequence[Span]) -> tuple[Plan, Costs] | None:
        """Take down a step; after the last one give what to run from now on; collective."""
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
