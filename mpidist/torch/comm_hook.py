"""Hooks of PyTorch: ``register_comm_hook(state, hook)`` of DistributedDataParallel."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from ..device import tensors
from ..errors import InvalidArgument
from ..parallel.bucket import Bucket


class GradBucket:
    """A bucket as hooks of PyTorch take it (``torch.distributed.GradBucket``)."""

    def __init__(self, bucket: Bucket, count: int):
        self._bucket, self._count = bucket, count
        flat, dtype = bucket.flat, bucket.parameters[0].dtype
        self._buffer = flat if isinstance(flat, torch.Tensor) else tensors.as_tensor(flat, dtype)

    def index(self) -> int:
        """Return the index of the bucket among those of a step, from 0."""
        return self._bucket.index

    def is_last(self) -> bool:
        """Return whether this is the last bucket of a step."""
        return self._bucket.index == self._count - 1

    def buffer(self) -> torch.Tensor:
        """Return the gradients as one flat tensor."""
        return self._buffer

    def set_buffer(self, buffer: torch.Tensor) -> None:
        """Copy the values of `buffer` into the flat tensor."""
        if buffer is not self._buffer:
            self._buffer.copy_(tensors.unwrapped(buffer).reshape(-1))

    def gradients(self) -> list[torch.Tensor]:
        """Return the gradients, views of the flat tensor, in the order of :meth:`parameters`."""
        return list(self._bucket.views)

    def parameters(self) -> list[torch.Tensor]:
        """Return the parameters whose gradients the bucket holds, in the flat tensor's order."""
        return list(self._bucket.parameters)


class CommHook:
    """Adapts a communication hook of PyTorch, so that mpidist.DDP calls it for each bucket.

    ``hook(state, bucket)`` takes a :class:`GradBucket` and returns a ``torch.futures.Future`` of
    one flat tensor, the mean of the bucket over the ranks; ``count()`` returns the number of
    buckets.
    """

    def __init__(self, state: Any, hook: Callable[..., Any], count: Callable[[], int], rank: int):
        self._state, self._hook, self._count, self._rank = state, hook, count, rank

    def __call__(self, bucket: Bucket) -> _Pending:
        """Call PyTorch's hook with a bucket; return an object that waits for the hook's future."""
        given = GradBucket(bucket, self._count())
        future = self._hook(self._state, given)
        if not callable(getattr(future, "wait", None)):
            raise InvalidArgument(
                f"rank {self._rank}: register_comm_hook: the hook returned a "
                f"{type(future).__name__}: expected a torch.futures.Future of the flat tensor"
            )
        return _Pending(future, given)


class _Pending:
    """A bucket in flight: waits for the future that PyTorch's hook returned."""

    def __init__(self, future: Any, bucket: GradBucket):
        self._future, self._bucket = future, bucket

    def test(self) -> bool:
        """Return whether the averaging has ended, and its result is in the bucket."""
        if self._future is not None and self._future.done():
            self.wait()
        return self._future is None

    def wait(self) -> None:
        """Wait for the future, and copy its value into the bucket."""
        if self._future is not None:
            found = self._future.wait()
            self._bucket.set_buffer(found[0] if isinstance(found, (list, tuple)) else found)
            self._future = None
