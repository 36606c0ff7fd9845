"""A forward of a module computed once more as it was: random numbers, what it keeps, autocast."""

from __future__ import annotations

from collections.abc import Container, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any, NamedTuple
from weakref import WeakValueDictionary

import torch
from torch.utils.weak import WeakIdKeyDictionary

from ..pipeline.state import (
    Attributes,
    States,
    attributes_of,
    drawn_again,
    put_back,
    random_states,
    without_gradients,
)

BESIDE = frozenset(vars(torch.nn.Module()))
"""What PyTorch itself keeps in a module."""


class Copy:
    """The values that a buffer had at a version."""

    __slots__ = ("buffer", "values", "version", "__weakref__")

    def __init__(self, buffer: Any):
        self.buffer, self.version = buffer, buffer._version
        self.values = buffer.detach().clone()


class Moment(NamedTuple):
    """What a forward began with."""

    random: Any
    others: States
    autocast: tuple[bool, Any]
    attributes: Attributes
    buffers: list[Copy]


class Replay:
    """Has a module's forward begin again where it began before.

    Which buffers a forward changes is found out by comparing them; of those that it leaves alone
    the moments share one copy.  Buffers that are assigned anew, and other attributes, are the
    objects that they were, lists and dicts with what was in them.

    Parameters
    ----------
    module : torch.nn.Module
        The module.
    """

    def __init__(self, module: Any):
        self._module = module
        self._constant: Any = WeakIdKeyDictionary()  # their versions when they were compared
        self._shared: Any = WeakValueDictionary()

    def before(self) -> Moment:
        """Before a forward: take down what it begins with."""
        module = self._module
        sources = torch.get_rng_state(), random_states(module), _autocast()
        return Moment(*sources, kept_by(module), self._copies())

    def after(self, moment: Moment) -> Moment:
        """After it: find out what it has not changed."""
        alone = _changed_unseen(self._module)
        for copy in moment.buffers:
            buffer = copy.buffer
            if id(buffer) in alone or not self._moves(buffer):
                continue
            if torch.equal(buffer, copy.values):
                self._constant[buffer] = copy.version = buffer._version
        return moment

    @contextmanager
    def again(self, moment: Moment) -> Iterator[None]:
        """Within it the forward is computed once more; what it changed before stays as it is."""
        now, attributes = self._copies(), kept_by(self._module)
        restored: set[int] = set()
        enabled, kind = moment.autocast
        try:
            put_back(moment.attributes, BESIDE)
            restored = self._restore(moment.buffers)
            with torch.random.fork_rng(devices=[]), drawn_again(moment.others):
                torch.set_rng_state(moment.random)
                with torch.autocast("cpu", dtype=kind, enabled=enabled):
                    yield
        finally:
            put_back(attributes, BESIDE)
            self._restore(now, restored)

    def _copies(self) -> list[Copy]:
        return [self._copy(buffer) for buffer in self._module.buffers()]

    def _copy(self, buffer: Any) -> Copy:
        if self._moves(buffer):
            return Copy(buffer)
        made = self._shared.get(id(buffer))
        if made is None or made.buffer is not buffer or made.version != buffer._version:
            made = self._shared[id(buffer)] = Copy(buffer)
        return made

    def _restore(self, copies: list[Copy], also: Container[int] = ()) -> set[int]:
        """Give buffers their values if they may have others, or are among `also`; say which."""
        found = set()
        for copy in copies:
            buffer = copy.buffer
            if self._moves(buffer) or copy.version != buffer._version or id(buffer) in also:
                restore(buffer, copy.values)  # which makes no new version
                found.add(id(buffer))
        return found

    def _moves(self, buffer: Any) -> bool:
        return self._constant.get(buffer) != buffer._version


def kept_by(module: Any) -> Attributes:
    """Take down what the modules keep, but no contents of tensors."""
    parts = list(module.modules())
    places = [vars(part) for part in parts] + [part._buffers for part in parts]
    return attributes_of(places, BESIDE)


def _autocast() -> tuple[bool, Any]:
    if hasattr(torch, "get_autocast_dtype"):
        return torch.is_autocast_enabled("cpu"), torch.get_autocast_dtype("cpu")
    return torch.is_autocast_cpu_enabled(), torch.get_autocast_cpu_dtype()  # before 2.4


def restore(buffer: Any, values: Any) -> None:
    """Give a buffer these values."""
    buffer.data.copy_(values)  # by .data, or a graph that has the buffer would be void


def _changed_unseen(module: Any) -> set[int]:
    """Find the buffers that are changed without a new version: running statistics."""
    norms = (m for m in module.modules() if isinstance(m, torch.nn.modules.batchnorm._NormBase))
    return {id(b) for m in norms for b in m.buffers(recurse=False)}


@contextmanager
def untouched(layers: Sequence[Any]) -> Iterator[None]:
    """Give back buffers, attributes, gradients and random states; graphs are made within it."""
    known = [layer for layer in layers if not _lazy(layer)]  # those are made in their first forward
    attributes = [kept_by(layer) for layer in known]
    copies = [(b, b.detach().clone()) for layer in known for b in layer.buffers()]
    with ExitStack() as stack:
        stack.enter_context(without_gradients(known))
        stack.enter_context(torch.random.fork_rng(devices=[]))
        stack.enter_context(torch.enable_grad())
        for layer in layers:
            stack.enter_context(drawn_again(random_states(layer)))
        try:
            yield
        finally:
            for kept in attributes:
                put_back(kept, BESIDE)
            for buffer, values in copies:
                restore(buffer, values)


def _lazy(layer: Any) -> bool:
    every = [*layer.parameters(), *layer.buffers()]
    return any(torch.nn.parameter.is_lazy(x) for x in every)
