"""``automatic``: a schedule computed for what the stages really take, under a cap on memory."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from itertools import product
from numbers import Integral
from typing import Any

from ..errors import InvalidArgument, ScheduleError, UnknownName
from .actions import Action
from .check import check
from .costs import Costs, Times, as_costs
from .messages import attach
from .placement import SHAPES, Placement
from .planner import Planner, Rule
from .schedule import PipelineSchedule, check_count, schedules
from .simulate import run
from .timeline import Timeline

RULES = tuple(
    Rule(order, patience, lead)
    for order, patience, lead in product(("IFW", "FIW"), (1.0, 0.5, 0.0), (None, 1))
)
"""The ways to choose that :func:`automatic` tries."""


def automatic(
    size: int,
    microbatches: int,
    costs: Costs | Sequence[Times],
    cap: int | Sequence[int] | None = None,
    chunks: int = 1,
    placement: str = "loop",
    splits: bool = True,
) -> PipelineSchedule:
    """Compute a schedule for given times of F, I and W, stage by stage, under a memory cap.

    List scheduling: all ranks are simulated, and whenever one is free it takes the most urgent
    action that can begin and that the cap allows.  What is urgent, and for how long it pays to wait
    for something more urgent, is tried in a dozen ways; the registered schedules that fit the cap
    and the layout take part.  The shortest wins, of equals the one that needs least memory: so it
    is never longer than one of those.  The same arguments give the same schedule on every rank.

    Parameters
    ----------
    size, microbatches : int
        Ranks and microbatches, each ≥ 1.
    costs : Costs or sequence
        Times of F, I and W for each virtual stage, and of a message.
    cap : int or sequence of int, optional
        Activations that may be alive on a rank, one for each chunk and microbatch, for all or for
        each; at least `chunks`.  By default ``size * chunks``, what 1F1B and ZB-H1 need (for one
        chunk) and ZB-V (for two).
    chunks : int
        Virtual stages on every rank.
    placement : {"loop", "v"}
        Where they lie.
    splits : bool
        Allow I and W; else only B.

    Returns
    -------
    PipelineSchedule
        Named ``"auto"``; it serves this size, number of microbatches and chunks only.
    """
    for name, value in (("size", size), ("microbatches", microbatches), ("chunks", chunks)):
        check_count(value, name)
    if placement not in SHAPES:
        raise UnknownName("placement", placement, SHAPES)
    place = Placement(size, chunks, placement)
    known, caps = as_costs(costs), check_caps(cap, size, chunks)
    best: tuple[float, int] | None = None
    chosen: list[list[Action]] = []
    for parts in _candidates(place, microbatches, known, caps, splits):
        steps = attach(parts, place)
        try:
            check(steps, place, microbatches)
            line = Timeline("auto", place, microbatches, run(steps, place, known))
        except ScheduleError:
            continue  # somebody registered a wrong one, and did not ask for it here
        if any(peak > most for peak, most in zip(line.peak, caps)):
            continue
        rating = line.makespan, sum(line.peak)
        if best is None or rating < best:
            best, chosen = rating, parts
    return _schedule(chosen, place, microbatches)


def check_caps(cap: Any, size: int, chunks: int, name: str = "cap") -> list[int]:
    """Give each rank's cap, of one number for all, of one for each, or of None.

    Raises
    ------
    InvalidArgument
        If it is something else; the message begins with `name`.
    """
    caps = cap if isinstance(cap, (list, tuple)) else [size * chunks if cap is None else cap] * size
    for value in caps:
        if isinstance(value, bool) or not isinstance(value, Integral) or value < chunks:
            raise InvalidArgument(
                f"{name}={cap!r}: allowed are whole numbers >= {chunks}, the chunks of a rank"
            )
    if len(caps) != size:
        raise InvalidArgument(
            f"{name}={cap!r}: allowed are one number, or one for each of {size} ranks"
        )
    return list(caps)


def _candidates(
    place: Placement, microbatches: int, costs: Costs, caps: list[int], splits: bool
) -> Iterator[list[list[Action]]]:
    """Give the actions of all ranks in every way that is tried."""
    size, chunks = place.ranks, place.chunks
    # To go less far ahead than the cap allows can be shorter.
    lower = [min(cap, size * chunks) for cap in caps]
    for most in (caps, lower) if lower != caps else (caps,):
        for rule in RULES:
            yield Planner(place, microbatches, costs, most, splits, rule).run()
    for known in schedules():
        fits = known.any_chunks or known.chunks == chunks
        fits = fits and (known.placement == place.shape or chunks == 1)
        fits = fits and (splits or known.splits is False)
        if not fits or known.unsupported(size, microbatches, chunks) is not None:
            continue
        try:
            parts = [known.actions(rank, size, microbatches, chunks) for rank in range(size)]
        except Exception:  # somebody registered a wrong one, and did not ask for it here
            continue
        yield parts


def _schedule(parts: list[list[Action]], place: Placement, microbatches: int) -> PipelineSchedule:
    """Give orders that were computed as a schedule."""

    def requires(size: int, number: int, chunks: int) -> str | None:
        if (size, number) == (place.ranks, microbatches):
            return None
        return (
            f"it was computed for {place.ranks} ranks and {microbatches} microbatches, "
            f"not for {size} and {number}"
        )

    def auto(rank: int, size: int, microbatches: int) -> Iterable[Action]:
        """Computed by list scheduling, for the times that the stages really take."""
        return parts[rank]

    splits = any(action.kind == "I" for part in parts for action in part)
    return PipelineSchedule("auto", auto, place.chunks, place.shape, splits, requires)
