"""What a schedule's generator yields, looked at one action after the other."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from numbers import Integral

from ..errors import MpidistError, ScheduleError
from ..schedule.registry import check_made
from .actions import KINDS, Action
from .placement import Placement

_KNOWN = frozenset(KINDS.values())


@dataclass(frozen=True)
class Yielded:
    """Looks at the actions of one rank.

    Attributes
    ----------
    name : str
        The schedule.
    rank, placement, microbatches
        Which rank, where the virtual stages lie, how many microbatches.
    splits : bool or None
        Whether there may be I and W, as of :class:`~mpidist.pipeline.PipelineSchedule`.
    """

    name: str
    rank: int
    placement: Placement
    microbatches: int
    splits: bool | None

    def of(self, make: Callable[[], Iterable[Action]]) -> list[Action]:
        """List what a generator yields: what can be actions of this pipeline, and not for ever.

        What is yielded twice is left to the prover, which says where it was before.

        Raises
        ------
        ScheduleError
            With rank, step and reason; with the virtual stage, where the action or the placement
            says which it is.
        """
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
            told = f"the generator failed: {type(error).__name__}: {error}"
            raise self._error(told, len(actions)) from error
        return actions

    def _wrong(self, action: Action) -> str | None:
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
        """Say how many are the most that could make sense."""
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
