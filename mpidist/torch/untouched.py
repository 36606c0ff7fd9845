"""Layers of PyTorch that are tried out, and then are as if they had not been."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch

from ..parallel.pipe.attributes import put_back
from ..parallel.pipe.random_states import drawn_again, random_states
from ..parallel.pipe.untouched import without_gradients
from .replay import BESIDE, kept_by, restore


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
