"""What modules with an explicit backward keep between forward and backward, per microbatch."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from ...errors import Unsupported

_MISSING: Any = object()

Kept = list[tuple[dict[str, Any], dict[str, Any]]]
"""For each module: its attributes, and the values that belong to one microbatch."""


class Keeper:
    """Takes out of a module what a forward has left in it, and puts it back for backward.

    Modules keep references there, so nothing is copied.  Those that declare ``saved`` are left with
    None; of others every attribute that any forward was seen to assign is put back, and values
    stay until the next forward replaces them.

    Parameters
    ----------
    module : object
        With the modules inside, if it has ``modules()``.
    """

    def __init__(self, module: Any):
        parts = module.modules() if callable(getattr(module, "modules", None)) else [module]
        self._declared: list[tuple[dict[str, Any], tuple[str, ...]]] = []
        self._watched: list[tuple[dict[str, Any], set[str]]] = []
        for part in parts:
            try:
                attributes = vars(part)
            except TypeError:
                raise Unsupported(
                    f"{type(part).__name__} has no __dict__: what it keeps for backward cannot be "
                    "kept for each microbatch"
                ) from None
            names = getattr(part, "saved", None)
            if names is None:
                self._watched.append((attributes, set()))
            elif names:
                self._declared.append((attributes, tuple(names)))
        self._before: list[dict[str, Any]] = []
        self._inside: Kept = []

    def watch(self) -> None:
        """Before a forward: note what is there."""
        self._before = [dict(attributes) for attributes, _ in self._watched]

    def take(self) -> Kept:
        """After a forward, or a half of backward: give what belongs to the microbatch."""
        kept: Kept = []
        for attributes, names in self._declared:
            kept.append((attributes, {name: attributes.get(name) for name in names}))
            for name in names:
                attributes[name] = None
        if self._watched:
            self._take_watched(kept)
        return kept

    def _take_watched(self, kept: Kept) -> None:
        for (attributes, assigned), before in zip(self._watched, self._before):
            for name, value in attributes.items():
                if before.get(name, _MISSING) is not value:
                    assigned.add(name)
        self._before = []
        if self._inside:  # after a backward: what it assigned stays, the rest is as it was
            kept += self._take_back()
            return
        kept += [(attributes, dict(attributes)) for attributes, _ in self._watched]

    def _take_back(self) -> Kept:
        kept: Kept = []
        for (attributes, now), (_, put) in zip(self._inside, self._put):
            kept.append((attributes, dict(attributes)))
            for name, value in put.items():
                if attributes.get(name, _MISSING) is not value:
                    continue
                if name in now:
                    attributes[name] = now[name]
                else:
                    attributes.pop(name, None)
        self._inside, self._put = [], []
        return kept

    def values(self, kept: Kept) -> Iterator[Any]:
        """Give what a forward has left, without the attributes that only lie beside it."""
        count = len(self._declared)
        for _, values in kept[:count]:
            yield from values.values()
        for (_, assigned), (_, values) in zip(self._watched, kept[count:]):
            yield from (values[name] for name in assigned if name in values)

    def put(self, kept: Kept) -> None:
        """Before backward: bring back what a microbatch has left."""
        count = len(self._declared)
        for attributes, values in kept[:count]:
            attributes.update(values)
        self._inside, self._put = [], []
        for (attributes, assigned), (_, values) in zip(self._watched, kept[count:]):
            put = {name: values[name] for name in assigned if name in values}
            self._inside.append((attributes, {n: attributes[n] for n in put if n in attributes}))
            self._put.append((attributes, put))
            attributes.update(put)

    _put: Kept = []
