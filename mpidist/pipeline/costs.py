"""What the actions cost: times of F, I and W for every virtual stage, and of a message."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from numbers import Real

from ..errors import InvalidArgument

Times = float | Sequence[float]


@dataclass(frozen=True)
class Costs:
    """Times of the actions, in seconds or in any other unit.

    Attributes
    ----------
    F, I, W : float or sequence of float
        Forward and the two halves of backward: one number, or one for each virtual stage, ≥ 0.
        B takes I + W.
    message : float
        From the end of an action to when its message is at hand on another rank, ≥ 0.  It occupies
        nobody.  What stays on its rank is at hand at once.
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
        """Give the times of each virtual stage, by the letters of the actions.

        Raises
        ------
        InvalidArgument
            If a sequence has another length than there are virtual stages.
        """
        times = {name: self._spread(name, stages) for name in ("F", "I", "W")}
        times["B"] = [i + w for i, w in zip(times["I"], times["W"])]
        return times

    def _spread(self, name: str, stages: int) -> list[float]:
        given = getattr(self, name)
        if isinstance(given, float):
            return [given] * stages
        if len(given) != stages:
            raise InvalidArgument(
                f"costs: {name} has {len(given)} times; allowed are one, or one for each of the "
                f"{stages} virtual stages"
            )
        return list(given)


def as_costs(costs: Costs | Sequence[Times] | None) -> Costs:
    """Give costs: as they are, made from (F, I, W) or (F, I, W, message), or 1 for each action."""
    if costs is None:
        return Costs()
    if isinstance(costs, Costs):
        return costs
    if not isinstance(costs, Sequence) or isinstance(costs, str) or len(costs) not in (3, 4):
        raise InvalidArgument(f"costs={costs!r}: allowed are Costs, or (F, I, W[, message])")
    return Costs(*costs)  # type: ignore[arg-type]


def _time(value: object, name: str) -> float:
    if isinstance(value, Real) and not isinstance(value, bool):
        time = float(value)
        if math.isfinite(time) and time >= 0:
            return time
    raise InvalidArgument(f"costs: {name}={value!r}: allowed are finite numbers >= 0")
