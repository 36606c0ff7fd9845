"""A forward of a module computed once more as it was: random numbers, buffers, autocast."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch.utils.weak import WeakIdKeyDictionary


class Moment(NamedTuple):
    """What a forward began with."""

    random: Any
    autocast: tuple[bool, Any]
    buffers: list[tuple[Any, Any]]


class Replay:
    """Has a module's forward begin again where it began before.

    Which buffers a forward changes is found out by comparing them; those that it leaves alone are
    not copied any more.

    Parameters
    ----------
    module : torch.nn.Module
        The module.
    """

    def __init__(self, module: Any):
        self._module = module
        self._constant: Any = WeakIdKeyDictionary()  # their versions when they were compared

    def before(self) -> Moment:
        """Before a forward: take down what it begins with."""
        return Moment(torch.get_rng_state(), _autocast(), self._copies())

    def after(self, moment: Moment) -> Moment:
        """After it: drop what it has not changed."""
        alone = _changed_unseen(self._module)
        for buffer, copy in moment.buffers:
            if id(buffer) not in alone and torch.equal(buffer, copy):
                self._constant[buffer] = buffer._version
        return moment._replace(buffers=[(b, c) for b, c in moment.buffers if self._moves(b)])

    @contextmanager
    def again(self, moment: Moment) -> Iterator[None]:
        """Within it the forward is computed once more; what it changed before stays as it is."""
        now = self._copies()
        enabled, kind = moment.autocast
        try:
            _restore(moment.buffers)
            with torch.random.fork_rng(devices=[]):
                torch.set_rng_state(moment.random)
                with torch.autocast("cpu", dtype=kind, enabled=enabled):
                    yield
        finally:
            _restore(now)

    def _copies(self) -> list[tuple[Any, Any]]:
        return [(b, b.clone()) for b in self._module.buffers() if self._moves(b)]

    def _moves(self, buffer: Any) -> bool:
        return self._constant.get(buffer) != buffer._version


def _autocast() -> tuple[bool, Any]:
    if hasattr(torch, "get_autocast_dtype"):
        return torch.is_autocast_enabled("cpu"), torch.get_autocast_dtype("cpu")
    return torch.is_autocast_cpu_enabled(), torch.get_autocast_cpu_dtype()  # before 2.4


def _restore(copies: list[tuple[Any, Any]]) -> None:
    for buffer, copy in copies:
        buffer.data.copy_(copy)  # by .data, or a graph that has the buffer would be void


def _changed_unseen(module: Any) -> set[int]:
    """Find the buffers that are changed without a new version: running statistics."""
    norms = (m for m in module.modules() if isinstance(m, torch.nn.modules.batchnorm._NormBase))
    return {id(b) for m in norms for b in m.buffers(recurse=False)}
