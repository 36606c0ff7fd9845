"""A host call in the background whose result goes on to a GPU when it has ended."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from ..prepared import Prepared


@dataclass(slots=True)
class Landing(Prepared):
    """A prepared host call that gives an array on a GPU.

    Attributes
    ----------
    end : callable or None
        Queues what brings the result there.
    target : object
        The user's array, to be given.
    """

    end: Callable[[], None] | None = None
    target: Any = None

    @classmethod
    def of(cls, part: Prepared, end: Callable[[], None], target: Any) -> Landing:
        """Have a host call end on a GPU."""
        return cls(part.call, part.result, part.staging, part.scalar, part.shown, end, target)

    def give(self) -> Any:
        """Bring the result there, and give the user's array."""
        super(Landing, self).give()
        assert self.end is not None
        self.end()
        return self.target
