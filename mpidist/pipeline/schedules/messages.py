"""The messages of a schedule: derived from its actions, never written by hand."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

from .actions import Action, Placement
from .schedule import PipelineSchedule, as_schedule


class Message(NamedTuple):
    """An activation or a gradient, from one virtual stage to its neighbour.

    Attributes
    ----------
    source, target : int
        Ranks of the sending and the receiving stage; equal if both are on one rank (:attr:`local`).
    stage : int
        The virtual stage that receives the message.
    microbatch : int
        Number of the microbatch.
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
        """Whether the message stays on its rank, where it is passed in memory and never sent."""
        return self.source == self.target

    @property
    def edge(self) -> tuple[int, int, int, str]:
        """Source, target, stage and kind: messages with the same edge keep their order."""
        return self.source, self.target, self.stage, self.kind


class Step(NamedTuple):
    """One action of a rank, with its messages.

    Attributes
    ----------
    action : Action
        The action.
    receive : Message or None
        The message that the action waits for; None for F on the first stage, for the backward on
        the last, and for W.
    sends : tuple of Message
        The messages sent after the action: none or one.
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
    """Return the steps of every rank: its actions, each with its messages.

    Parameters
    ----------
    schedule : str, PipelineSchedule or callable
        A name, a schedule, or a generator function of your own.
    size, microbatches : int
        Numbers of ranks and of microbatches, each ≥ 1.
    chunks : int, optional
        Number of virtual stages on every rank; by default the schedule's own.

    Returns
    -------
    tuple of list of Step
        One list for each rank.

    Raises
    ------
    Unsupported
        If the schedule does not serve these numbers; the message says what it serves.
    ScheduleError
        If the generator fails, does not end, or yields anything but actions of these microbatches
        and chunks.  Whether the order can run is checked by :func:`~mpidist.pipeline.prove`.
    """
    return derived(schedule, size, microbatches, chunks).parts


class Derived(NamedTuple):
    """A schedule for given numbers of ranks, microbatches and chunks, with its steps."""

    name: str
    placement: Placement
    parts: tuple[list[Step], ...]  # the steps of every rank


def derived(
    schedule: str | PipelineSchedule | Callable, size: int, microbatches: int, chunks: int | None
) -> Derived:
    """Return the steps, placement and name of a schedule; for the parameters see :func:`derive`."""
    known = as_schedule(schedule)
    placement = known.place(size, chunks)
    parts = [known.actions(rank, size, microbatches, chunks) for rank in range(size)]
    return Derived(known.name, placement, with_messages(parts, placement))


def with_messages(
    parts: Sequence[Sequence[Action]], placement: Placement
) -> tuple[list[Step], ...]:
    """Return the steps for given actions, one list per rank: each action with its messages."""
    owners = [placement.owner(stage)[0] for stage in range(placement.stages)]
    last = placement.stages - 1

    def step(action: Action, stage: int) -> Step:
        # F receives from the stage before and sends to the next; B and I the other way round.
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
