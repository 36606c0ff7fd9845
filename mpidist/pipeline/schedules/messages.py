"""The messages that a schedule needs: derived from its actions, never written by hand."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

from .actions import Action, Placement
from .schedule import PipelineSchedule, as_schedule


class Message(NamedTuple):
    """An activation or a gradient, handed from one virtual stage to the next or the one before.

    Attributes
    ----------
    source, target : int
        Ranks; the same where both stages lie on one rank (:attr:`local`).
    stage : int
        The virtual stage that consumes it.
    microbatch : int
        Which microbatch it belongs to.
    kind : {"activation", "gradient"}
        An activation comes from ``stage - 1``, a gradient from ``stage + 1``.
    """

    source: int
    target: int
    stage: int
    microbatch: int
    kind: str

    @property
    def local(self) -> bool:
        """It stays on its rank: handed over in memory, and never sent."""
        return self.source == self.target

    @property
    def edge(self) -> tuple[int, int, int, str]:
        """The edge that it takes; messages of one edge are matched by their order."""
        return self.source, self.target, self.stage, self.kind


class Step(NamedTuple):
    """One action of a rank, with what it needs and what it hands on.

    Attributes
    ----------
    action : Action
        What is computed.
    receive : Message or None
        What must have come before; None at the ends of the pipeline, and for W.
    sends : tuple of Message
        What goes out after it: none or one.
    """

    action: Action
    receive: Message | None = None
    sends: tuple[Message, ...] = ()


def derive(
    schedule: str | PipelineSchedule | Callable,
    size: int,
    microbatches: int,
    chunks: int | None = None,
) -> tuple[list[Step], ...]:
    """Give every rank's actions, each with its messages.

    Parameters
    ----------
    schedule : str, PipelineSchedule or callable
        A name, a schedule, or a generator function of your own.
    size, microbatches : int
        Ranks and microbatches, each ≥ 1.
    chunks : int, optional
        Virtual stages on every rank; by default what the schedule declares.

    Returns
    -------
    tuple of list of Step
        One list for each rank.

    Raises
    ------
    Unsupported
        If the schedule does not serve these numbers; the message says what it serves.
    ScheduleError
        If it yields something that is no action, or none of this pipeline.  Whether the order can
        run is for :func:`~mpidist.pipeline.prove` to say.
    """
    known = as_schedule(schedule)
    placement = known.place(size, chunks)
    parts = [known.actions(rank, size, microbatches, chunks) for rank in range(size)]
    return attach(parts, placement)


def attach(parts: Sequence[Sequence[Action]], placement: Placement) -> tuple[list[Step], ...]:
    """Give actions that are already listed, one list for each rank, their messages."""
    owners = [placement.owner(stage)[0] for stage in range(placement.stages)]
    last = placement.stages - 1

    def step(action: Action, stage: int) -> Step:
        microbatch, _, kind = action
        if kind == "W":
            return Step(action)
        what = "activation" if kind == "F" else "gradient"
        before, after = (stage - 1, stage + 1) if kind == "F" else (stage + 1, stage - 1)
        here = owners[stage]
        receive: Message | None = None
        sends: tuple[Message, ...] = ()
        if 0 <= before <= last:
            receive = Message(owners[before], here, stage, microbatch, what)
        if 0 <= after <= last:
            sends = (Message(here, owners[after], after, microbatch, what),)
        return Step(action, receive, sends)

    made = []
    for rank, part in enumerate(parts):
        stages = [placement.stage(rank, chunk) for chunk in range(placement.chunks)]
        made.append([step(action, stages[action.chunk]) for action in part])
    return tuple(made)
