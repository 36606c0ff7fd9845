"""``simulate``: the time of each action of a schedule, from the times of forward and backward."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from numbers import Real

from ...errors import InvalidArgument
from .actions import Placement
from .gantt import Span, Timeline
from .messages import Message, Step, derived
from .schedule import PipelineSchedule
from .walk import check, walk

Times = float | Sequence[float]


@dataclass(frozen=True)
class Costs:
    """Times of the actions, in seconds or any other unit.

    Attributes
    ----------
    F, I, W : float or sequence of float
        Times of forward and of the two halves of backward: one number, or one for each virtual
        stage, ≥ 0.  B takes I + W.
    message : float
        Time from the end of an action to the arrival of its message on another rank, ≥ 0.  It
        occupies no rank.  Messages that stay on their rank take no time.
    """

    F: Times = 1.0
    I: Times = 1.0  # noqa: E741
    W: Times = 1.0
    message: float = 0.0

    def __post_init__(self) -> None:
        for name in ("F", "I", "W"):
            given = getattr(self, name)
            if isinstance(given, Sequence) and not isinstance(given, str):
                times = tuple(_time(t, f"{name}[{stage}]") for stage, t in enumerate(given))
                object.__setattr__(self, name, times)
            else:
                object.__setattr__(self, name, _time(given, name))
        object.__setattr__(self, "message", _time(self.message, "message"))

    def table(self, stages: int) -> dict[str, list[float]]:
        """Return a dict from F, B, I and W to the list of that action's times, stage by stage.

        InvalidArgument if the length of a sequence is not the number of virtual stages.
        """
        times = {name: self._spread(name, stages) for name in ("F", "I", "W")}
        times["B"] = [i + w for i, w in zip(times["I"], times["W"])]
        return times

    def _spread(self, name: str, stages: int) -> list[float]:
        """Return one time for each stage, given one for all or one for each."""
        given = getattr(self, name)
        if isinstance(given, float):
            return [given] * stages
        if len(given) != stages:
            raise InvalidArgument(
                f"costs: {name} has {len(given)} times; expected one, or one for each of the "
                f"{stages} virtual stages"
            )
        return list(given)


def as_costs(costs: Costs | Sequence[Times] | None) -> Costs:
    """Return Costs, given Costs, (F, I, W), (F, I, W, message), or None for 1, 1, 1 and 0."""
    if costs is None:
        return Costs()
    if isinstance(costs, Costs):
        return costs
    if not isinstance(costs, Sequence) or isinstance(costs, str) or len(costs) not in (3, 4):
        raise InvalidArgument(f"costs={costs!r}: expected Costs, or (F, I, W[, message])")
    return Costs(*costs)  # type: ignore[arg-type]


def _time(value: object, name: str) -> float:
    if isinstance(value, Real) and not isinstance(value, bool):
        time = float(value)
        if math.isfinite(time) and time >= 0:
            return time
    raise InvalidArgument(f"costs: {name}={value!r}: expected finite numbers >= 0")


def simulate(
    schedule: str | PipelineSchedule | Callable,
    size: int,
    microbatches: int,
    chunks: int | None = None,
    costs: Costs | Sequence[Times] | None = None,
) -> Timeline:
    """Return the times of all actions, if each begins when its rank is free and its message there.

    Parameters
    ----------
    schedule, size, microbatches, chunks
        As for :func:`~mpidist.pipeline.derive`.
    costs : Costs or sequence, optional
        Times of F, I and W, or of F, I, W and a message; by default 1, 1, 1 and 0.

    Returns
    -------
    Timeline
        Times, with makespan, bubble and peak live activations.

    Raises
    ------
    ScheduleError
        If the schedule is wrong; as :func:`~mpidist.pipeline.prove` raises it.
    Unsupported
        If the schedule does not serve these numbers.
    """
    it = derived(schedule, size, microbatches, chunks)
    check(it.parts, it.placement, microbatches)
    spans = run(it.parts, it.placement, as_costs(costs))
    return Timeline(it.name, it.placement, microbatches, spans)


def run(
    parts: Sequence[Sequence[Step]], placement: Placement, costs: Costs
) -> tuple[tuple[Span, ...], ...]:
    """Return the spans of each rank's actions, given checked steps; see :func:`simulate`."""
    table = costs.table(placement.stages)
    times = [
        {
            (kind, chunk): table[kind][placement.stage(rank, chunk)]
            for kind in table
            for chunk in range(placement.chunks)
        }
        for rank in range(placement.ranks)
    ]
    clock = [0.0] * len(parts)
    arrival: dict[Message, float] = {}
    spans: list[list[Span]] = [[] for _ in parts]
    for rank, _, step in walk(parts, placement):
        action = step.action
        begin = clock[rank]
        if step.receive is not None:
            begin = max(begin, arrival[step.receive])
        end = begin + times[rank][action.kind, action.chunk]
        spans[rank].append(Span(action, begin, end))
        clock[rank] = end
        for message in step.sends:
            arrival[message] = end if message.local else end + costs.message
    return tuple(map(tuple, spans))
