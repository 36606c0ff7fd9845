"""What the registries of algorithms and of pipeline schedules have in common."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Container, Iterable
from typing import Any

from .errors import InvalidArgument, ScheduleError


class Registered:
    """A generator that was registered; a mixin of dataclasses with the field `function`."""

    function: Callable[..., Any]

    @property
    def doc(self) -> str:
        """The generator's docstring, dedented."""
        return inspect.getdoc(self.function) or ""

    @property
    def summary(self) -> str:
        """The first sentence of the docstring."""
        return self.doc.split("\n", 1)[0]


def check_name(name: object, kind: str, reserved: Container[str]) -> None:
    """Raise InvalidArgument if nothing can be registered under a name."""
    if not isinstance(name, str) or not name or {":", "/"} & set(name) or name in reserved:
        raise InvalidArgument(
            f"{name!r} cannot name {kind}: it is reserved, empty or has a ':' or '/'"
        )


def check_made(made: object, label: str, what: str, rank: int) -> None:
    """Raise ScheduleError if a function gave nothing to go through, as one without yield does."""
    if not isinstance(made, Iterable):
        raise ScheduleError(f"{label} gave {made!r}; it must yield its {what}", rank=rank)
