"""The measured constants and curves of the cost model."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from ..errors import ConfigError, InvalidArgument
from ..foreign import typed
from ..schedule.cost import Link, Sharing
from ..schedule.model import Curve, Messages


@dataclass(frozen=True)
class Calibration:
    """What the cost model knows of one communicator: all but `messages` may be missing.

    `kernels` are measured times of calls that no schedule of messages serves, by candidate and
    collective: only a full calibration has some, and they hold for `library`, as tuning tables name
    it, and `ranks_per_node`.
    """

    messages: Messages  # inside a node: measured curves, or straight lines
    far: Messages | None = None  # between nodes, if that was measured separately
    mapped: Sharing | None = None  # memory that the ranks of a node map: symmetric arrays
    slots: Sharing | None = None  # parts of it into which ranks copy; like `mapped` if None
    published: Sharing | None = None  # memory of other processes, which system calls read
    kernels: tuple[tuple[str, str, Curve], ...] = ()
    noise: float = 0.0  # median deviation of the measured times of `messages`, over their median
    library: str = ""
    ranks_per_node: tuple[int, ...] = ()

    @classmethod
    def straight(
        cls, alpha: float, beta: float, gamma: float, far: Link | None = None
    ) -> Calibration:
        """Return that of papers: α + nβ for each message, nγ to combine n bytes."""
        return cls(Messages.straight(alpha, beta, gamma), None if far is None else far.messages)

    def kernel(self, name: str, collective: str) -> Curve | None:
        """Return the measured times of a candidate's calls; None if there are none."""
        found = (curve for *key, curve in self.kernels if key == [name, collective])
        return next(found, None)

    def sharing(self, memory: str) -> Sharing | None:
        """Return the times of a memory of a node, by its name in schedules."""
        if memory == "published":
            return self.published
        return self.slots or self.mapped if memory == "slots" else self.mapped

    @classmethod
    def from_json(cls, value: Any, where: str) -> Calibration:
        """Return the calibration whose :func:`dataclasses.asdict` was written as JSON.

        ConfigError if a part is missing, unknown or of the wrong kind, a number is negative, or the
        sizes of a curve do not ascend: it begins with `where`, and names the part.
        """
        try:
            found = typed(value, cls)
        except (TypeError, InvalidArgument) as error:
            raise ConfigError(f"{where}: {error}") from None
        if any(number < 0 for number in _numbers(value)):
            raise ConfigError(f"{where}: it has {min(_numbers(value))}: expected numbers >= 0")
        return found


def _numbers(value: Any) -> Iterator[float]:
    """Yield all numbers in a JSON value."""
    if isinstance(value, (dict, list)):
        for part in value.values() if isinstance(value, dict) else value:
            yield from _numbers(part)
    elif isinstance(value, (int, float)):
        yield value
