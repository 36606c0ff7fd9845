"""A pipeline schedule: a generator of actions with its declared properties; the registry."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial
from numbers import Integral
from typing import Any

from ...arguments import whole
from ...errors import InvalidArgument, MpidistError, ScheduleError, UnknownName, Unsupported
from ...schedule.registry import Registered, check_made, check_name
from .actions import KINDS, SHAPES, Action, Placement

_KNOWN = frozenset(KINDS.values())


@dataclass(frozen=True)
class ActionCheck:
    """Checker of one rank's generator: it must yield valid actions, and end."""

    name: str
    rank: int
    placement: Placement
    microbatches: int
    splits: bool | None  # whether I and W may occur; None: either

    def check(self, make: Callable[[], Iterable[Action]]) -> list[Action]:
        """List the actions of the generator that ``make()`` returns, after checking each.

        Repeated actions are left to the prover, whose error names the first one.  ScheduleError,
        with rank, step and reason, if the generator fails, does not end, or yields anything else.
        """
        # Twice what can be right: enough for the prover to name an action done again, and an end
        # for a generator that has none.
        most = 2 * 3 * self.microbatches * self.placement.chunks
        actions: list[Action] = []
        try:
            made = make()
            check_made(made, f"pipeline schedule {self.name}", "actions", self.rank)
            for action in made:
                wrong = self._wrong(action)
                if len(actions) == most:
                    wrong = f"yields more than {most} actions, {self._usual()}: does it end?"
                if wrong:
                    raise self._error(wrong, len(actions), action)
                actions.append(action)
        except MpidistError:
            raise
        except Exception as error:
            reason = f"the generator failed: {type(error).__name__}: {error}"
            raise self._error(reason, len(actions)) from error
        return actions

    def _wrong(self, action: Action) -> str | None:
        """Return what is wrong with an action, as text; None if nothing is."""
        if type(action) not in _KNOWN:
            return f"yields {action!r}; it must yield F, B, I or W of mpidist.pipeline"
        if not _among(action.microbatch, self.microbatches):
            return f"{action}: there are microbatches 0 … {self.microbatches - 1}"
        if not _among(action.chunk, self.placement.chunks):
            return f"{action}: there are chunks 0 … {self.placement.chunks - 1}"
        if self.splits is False and action.kind in "IW":
            return f"{action}, but the schedule declares splits=False: it has F and B only"
        return None

    def _usual(self) -> str:
        """Return the largest allowed number of actions as text, for the error of too many."""
        chunks = self.placement.chunks
        of = f" in {chunks} chunks" if chunks > 1 else ""
        return f"twice F, I and W of each of {self.microbatches} microbatches{of}"

    def _error(self, wrong: str, step: int, action: object = None) -> ScheduleError:
        chunk = getattr(action, "chunk", None)
        if not _among(chunk, self.placement.chunks):
            chunk = 0 if self.placement.chunks == 1 else None
        stage = None if chunk is None else self.placement.stage(self.rank, chunk)
        return ScheduleError(wrong, rank=self.rank, stage=stage, step=step)


def _among(value: object, count: int) -> bool:
    if type(value) is not int and (isinstance(value, bool) or not isinstance(value, Integral)):
        return False
    return 0 <= value < count  # type: ignore[operator]


@dataclass(frozen=True)
class PipelineSchedule(Registered):
    """One pipeline schedule: a generator and its declared properties.

    Attributes
    ----------
    name : str
        Name for ``schedule=`` and the command line.
    function : callable
        The generator ``(rank, size, microbatches, *, chunks)`` of the actions of one rank; it has
        the keyword `chunks` only if it serves any number of chunks per rank.
    chunks : int
        Number of virtual stages on every rank: the only one, or the default if it serves any.
    placement : {"loop", "v"}
        Which rank holds which virtual stage, see :class:`~mpidist.pipeline.Placement`.
    splits : bool or None
        Whether it splits B into I and W; None if that is not declared, and either is allowed.
    requires : callable, optional
        ``requires(size, microbatches, chunks)`` returns as text why the schedule cannot serve
        these numbers, or None if it can.
    """

    name: str
    function: Callable[..., Iterable[Action]]
    chunks: int = 1
    placement: str = "loop"
    splits: bool | None = None
    requires: Callable[[int, int, int], str | None] | None = None

    @property
    def any_chunks(self) -> bool:
        """Whether the schedule serves any number of chunks per rank."""
        return "chunks" in inspect.signature(self.function).parameters

    def count_chunks(self, chunks: int | None = None) -> int:
        """Return the number of chunks per rank: `chunks`, or the default for None.

        Raises
        ------
        InvalidArgument
            If `chunks` is not a whole number ≥ 1.
        Unsupported
            If the schedule does not serve it.
        """
        if chunks is None:
            return self.chunks
        whole("chunks", chunks)
        if chunks != self.chunks and not self.any_chunks:
            able = [s.name for s in schedules() if s.any_chunks or s.chunks == chunks]
            raise Unsupported(
                f"pipeline schedule {self.name}: chunks={chunks}: expected {self.chunks} on each "
                f"rank; chunks={chunks} is possible with {', '.join(able)}"
            )
        return chunks

    def place(self, size: int, chunks: int | None = None) -> Placement:
        """Return the placement of the virtual stages on `size` ranks."""
        whole("size", size)
        return Placement(size, self.count_chunks(chunks), self.placement)

    def unsupported(self, size: int, microbatches: int, chunks: int | None = None) -> str | None:
        """Return why the schedule cannot serve these numbers, or None if it can."""
        if self.requires is None:
            return None
        return self.requires(size, microbatches, self.count_chunks(chunks))

    def actions(
        self, rank: int, size: int, microbatches: int, chunks: int | None = None
    ) -> list[Action]:
        """Return the actions of one rank.

        Raises
        ------
        Unsupported
            If the schedule does not serve these numbers; the message says why.
        ScheduleError
            If the generator fails, does not end, or yields anything but actions of these
            microbatches and chunks.
        """
        whole("size", size)
        whole("microbatches", microbatches)
        chunks = self.count_chunks(chunks)
        reason = self.unsupported(size, microbatches, chunks)
        if reason is not None:
            raise Unsupported(f"pipeline schedule {self.name}: {reason}")
        keywords = {"chunks": chunks} if self.any_chunks else {}
        made = partial(self.function, rank, size, microbatches, **keywords)
        place = self.place(size, chunks)
        return ActionCheck(self.name, rank, place, microbatches, self.splits).check(made)


RESERVED = ("auto",)
"""Values of the argument `schedule` that no registered schedule may have as its name."""


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
        Name for ``schedule=``; registering a name again replaces the earlier schedule.
    chunks, placement, splits, requires
        See :class:`PipelineSchedule`.

    Returns
    -------
    callable
        A decorator that returns the generator unchanged.
    """
    check_name(name, "a pipeline schedule", RESERVED)
    whole("chunks", chunks)
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
    """Return the schedule registered under a name.

    Raises
    ------
    UnknownName
        With the nearest names, if no schedule has this name.
    """
    if name not in _registry:
        raise UnknownName("pipeline schedule", name, _registry)
    return _registry[name]


def as_schedule(schedule: str | PipelineSchedule | Callable) -> PipelineSchedule:
    """Return the schedule that a name, a schedule or a generator function stands for.

    A function that is not registered gets the name of the function, the placement "loop", and as
    many chunks as the default of its keyword ``chunks`` (1 without one).

    Raises
    ------
    UnknownName
        If no schedule has this name.
    InvalidArgument
        If `schedule` is none of these.
    """
    if isinstance(schedule, PipelineSchedule):
        return schedule
    if isinstance(schedule, str):
        return find_schedule(schedule)
    if not callable(schedule):
        raise InvalidArgument(
            f"schedule={schedule!r}: expected a name ({', '.join(_registry)}), "
            "a PipelineSchedule, or a generator function (rank, size, microbatches)"
        )
    for known in _registry.values():
        if known.function is schedule:
            return known
    signature = _signature(schedule)
    keyword = signature.parameters.get("chunks")
    name = getattr(schedule, "__name__", "schedule")
    chunks = keyword.default if keyword and keyword.default is not keyword.empty else 1
    whole(f"schedule={name}: its default of chunks", chunks)
    return PipelineSchedule(name, schedule, chunks)


def _signature(function: Callable) -> inspect.Signature:
    """Return the signature of a schedule's generator function; InvalidArgument for a wrong one."""
    try:
        signature = inspect.signature(function)
        signature.bind(0, 1, 1)
    except (TypeError, ValueError):
        name = getattr(function, "__name__", function)
        raise InvalidArgument(
            f"schedule={name}: it must take (rank, size, microbatches), and optionally chunks="
        ) from None
    return signature


def unregister_schedule(name: str) -> None:
    """Remove a schedule from the registry if it is there, such as one that a test registered."""
    _registry.pop(name, None)


def describe(schedule: PipelineSchedule) -> dict[str, Any]:
    """Return name, summary and declared properties of a schedule, as JSON listings have them."""
    return {
        "schedule": schedule.name,
        "chunks": schedule.chunks,
        "any_chunks": schedule.any_chunks,
        "placement": schedule.placement,
        "splits": schedule.splits,
        "summary": schedule.summary,
    }
