"""Loaders of PyTorch, divided among the ranks."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch.utils.data import DataLoader, IterableDataset, RandomSampler

from ..communicator.communicator import Communicator
from ..data import Order
from ..errors import Unsupported


class Loader:
    """One rank's batches of a loader; an iteration is one epoch, or the rest of a resumed one.

    The position in the epoch counts the samples in yielded batches, on all ranks, and not those
    that workers have fetched ahead.  The options of the loader are kept, but `order` is the
    sampler.
    """

    def __init__(self, loader: DataLoader, order: Order):
        self.order = order
        self.loader = DataLoader(
            loader.dataset,
            batch_size=loader.batch_size,
            sampler=order,
            num_workers=loader.num_workers,
            collate_fn=loader.collate_fn,
            pin_memory=loader.pin_memory,
            drop_last=loader.drop_last,
            timeout=loader.timeout,
            worker_init_fn=loader.worker_init_fn,
            multiprocessing_context=loader.multiprocessing_context,
            generator=loader.generator,
            prefetch_factor=loader.prefetch_factor,
            persistent_workers=loader.persistent_workers,
        )

    def __len__(self) -> int:
        return len(self.loader)

    @property
    def epoch(self) -> int:
        """Number of the present epoch, from 0; between two epochs, of the next one."""
        return self.order.epoch

    def __iter__(self) -> Iterator[Any]:
        order = self.order
        epoch, position = order.epoch, order.position
        step = order.size * (self.loader.batch_size or 1)
        each = order.together // step or 1  # batches of this rank until all ranks have as many
        # An iterator draws the seed of its workers; the one that began this epoch has drawn it.
        source = self.loader.generator or torch.default_generator
        drawn = source.get_state() if position else None
        batches = iter(self.loader)
        if drawn is not None:
            source.set_state(drawn)
        for number, batch in enumerate(batches, 1):
            # The sampler is ahead of the batches by what workers prefetch: its count is replaced.
            if number % each == 0:
                position = min(position + each * step, order.count)
            order.epoch, order.position = epoch, position
            yield batch
        order.epoch, order.position = epoch + 1, 0

    def state_dict(self) -> dict[str, int]:
        """Return the position in the epoch, from which :meth:`load_state_dict` resumes."""
        return self.order.state_dict()

    def load_state_dict(self, state: Mapping[str, int]) -> None:
        """Continue at the position that a :meth:`state_dict` holds."""
        self.order.load_state_dict(state)


def shard_loader(
    data: Any, comm: Communicator, shuffle: bool | None, seed: int, uneven: str, microbatches: int
) -> Loader | None:
    """Return this rank's part of a loader; None if `data` is not a loader with a length.

    The other arguments are those of :func:`mpidist.data.shard`.  Unsupported if the loader has a
    sampler or batch sampler that cannot be divided: the user's own, or one that does not take each
    sample once.
    """
    if not isinstance(data, DataLoader) or isinstance(data.dataset, IterableDataset):
        return None
    known = type(data.sampler).__name__ in ("SequentialSampler", "RandomSampler")
    if data.batch_size is None or not known:
        raise Unsupported(
            f"rank {comm.rank}: the loader has a {type(data.sampler).__name__} or a batch sampler "
            "of its own: shard the data set, or divide that sampler"
        )
    if len(data.sampler) != len(data.dataset) or getattr(data.sampler, "replacement", False):
        raise Unsupported(
            f"rank {comm.rank}: the loader's {type(data.sampler).__name__} takes "
            f"{len(data.sampler)} of {len(data.dataset)} samples, or some twice: shard the data "
            "set, or divide that sampler"
        )
    shuffles = isinstance(data.sampler, RandomSampler) if shuffle is None else shuffle
    block = microbatches * data.batch_size
    return Loader(data, Order(len(data.dataset), comm, shuffles, seed, uneven, block))
