"""What modules keep as attributes, taken down and put back: counters, lists, what has been seen."""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Iterable
from typing import Any

_CONTAINERS = (list, dict, set, deque, OrderedDict)


class Kept:
    """An attribute, and what was in it if it is a container."""

    __slots__ = ("value", "inside")

    def __init__(self, value: Any):
        self.value = value
        self.inside = value.copy() if type(value) in _CONTAINERS else None

    def back(self) -> Any:
        """Give the object, with what was in it."""
        if self.inside is not None and _parts(self.value) != _parts(self.inside):
            self.value.clear()
            fill = self.value.update if hasattr(self.value, "update") else self.value.extend
            fill(self.inside)
        return self.value


def _parts(container: Any) -> list[int]:
    if isinstance(container, dict):
        return [id(x) for item in container.items() for x in item]
    return [id(x) for x in container]


Attributes = list[tuple[dict[str, Any], dict[str, Kept]]]
"""For each dict of attributes what it had."""


def attributes_of(places: Iterable[dict[str, Any]], beside: frozenset[str]) -> Attributes:
    """Take down dicts of attributes, without the names in `beside`."""
    return [
        (place, {name: Kept(value) for name, value in place.items() if name not in beside})
        for place in places
    ]


def put_back(attributes: Attributes, beside: frozenset[str]) -> None:
    """Make attributes what they were; others, but for those in `beside`, are new and go."""
    for place, values in attributes:
        for name in [n for n in place if n not in values and n not in beside]:
            del place[name]
        for name, kept in values.items():
            place[name] = kept.back()
