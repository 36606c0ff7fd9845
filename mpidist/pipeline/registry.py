"""Where pipeline schedules are found: ``@pipeline_schedule`` and lookup."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable

from ..errors import InvalidArgument, UnknownName
from ..registered import check_name
from .actions import Action
from .placement import SHAPES
from .schedule import PipelineSchedule, check_count

RESERVED = ("auto",)
"""Names of choices that are no schedules of their own."""


_registry: dict[str, PipelineSchedule] = {}


def pipeline_schedule(
    name: str,
    *,
    chunks: int = 1,
    placement: str = "loop",
    splits: bool | None = None,
    requires: Callable[[int, int, int], str | None] | None = None,
) -> Callable[[Callable[..., Iterable[Action]]], Callable[..., Iterable[Action]]]:
    """Register a generator of actions as a pipeline schedule.

    Parameters
    ----------
    name : str
        What users write in ``schedule=``; registering a name again replaces the older one.
    chunks, placement, splits, requires
        See :class:`PipelineSchedule`.

    Returns
    -------
    callable
        A decorator that returns the generator unchanged.
    """
    check_name(name, "a pipeline schedule", RESERVED)
    check_count(chunks, "chunks")
    if placement not in SHAPES:
        raise UnknownName("placement", placement, SHAPES)

    def register(function: Callable[..., Iterable[Action]]) -> Callable[..., Iterable[Action]]:
        _registry[name] = PipelineSchedule(name, function, chunks, placement, splits, requires)
        return function

    return register


def schedules() -> list[PipelineSchedule]:
    """List the registered schedules, in order of registration."""
    return list(_registry.values())


def find_schedule(name: str) -> PipelineSchedule:
    """Look a schedule up by name.

    Raises
    ------
    UnknownName
        With the nearest names, if there is none.
    """
    if name not in _registry:
        raise UnknownName("pipeline schedule", name, _registry)
    return _registry[name]


def as_schedule(schedule: str | PipelineSchedule | Callable) -> PipelineSchedule:
    """Give the schedule: by its name, as it is, or made from a generator function.

    A function that is not registered has the default of its keyword ``chunks`` as number of chunks,
    1 if it takes none, laid out as a loop.

    Raises
    ------
    UnknownName
        If nothing is registered under the name.
    InvalidArgument
        If it is none of these.
    """
    if isinstance(schedule, PipelineSchedule):
        return schedule
    if isinstance(schedule, str):
        return find_schedule(schedule)
    if not callable(schedule):
        raise InvalidArgument(
            f"schedule={schedule!r}: allowed are a name ({', '.join(_registry)}), "
            "a PipelineSchedule, or a generator function (rank, size, microbatches)"
        )
    for known in _registry.values():
        if known.function is schedule:
            return known
    signature = _signature(schedule)
    keyword = signature.parameters.get("chunks")
    name = getattr(schedule, "__name__", "schedule")
    chunks = keyword.default if keyword and keyword.default is not keyword.empty else 1
    check_count(chunks, f"schedule={name}: its default of chunks")
    return PipelineSchedule(name, schedule, chunks)


def _signature(function: Callable) -> inspect.Signature:
    """Give a generator's signature; InvalidArgument if it cannot take what it will get."""
    try:
        signature = inspect.signature(function)
        signature.bind(0, 1, 1)
    except (TypeError, ValueError):
        name = getattr(function, "__name__", function)
        raise InvalidArgument(
            f"schedule={name}: it must take (rank, size, microbatches), and chunks= if it will"
        ) from None
    return signature


def unregister_schedule(name: str) -> None:
    """Forget a schedule, for example one that a test registered."""
    _registry.pop(name, None)
