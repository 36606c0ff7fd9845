"""Each rank's part of a data set: deterministic, seedable, resumable."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from itertools import islice
from typing import Any

import numpy as np

from .errors import InvalidArgument
from .frameworks.base import adapter, library

UNEVEN = ("repeat", "drop", "keep")


class Order:
    """Which samples each rank takes, epoch after epoch.

    Parameters
    ----------
    count : int
        Number of samples.
    comm : Communicator
        The ranks.
    shuffle : bool
        Whether their order changes from epoch to epoch.
    seed : int
        Of the order; the same on every rank.
    uneven : {"repeat", "drop", "keep"}
        Where ranks would get unequal numbers: the last ones take samples a second time, or all
        leave some out, or it stays so (see :meth:`DDP.join`).

    Attributes
    ----------
    epoch : int
        Of the next pass; counted on with each.
    position : int
        How many samples of the epoch all ranks together have taken.
    """

    def __init__(self, count: int, comm: Any, shuffle: bool, seed: int, uneven: str):
        self.count, self.shuffle, self.seed, self.uneven = count, shuffle, seed, uneven
        self.rank, self.size = comm.rank, comm.size
        self.epoch, self.position = 0, 0

    def _samples(self) -> np.ndarray:
        """Give what is left of the epoch, for all ranks."""
        if self.shuffle:
            order = np.random.default_rng((self.seed, self.epoch)).permutation(self.count)
        else:
            order = np.arange(self.count)
        left = order[self.position :]
        if self.uneven == "drop":
            return left[: len(left) // self.size * self.size]
        if self.uneven == "repeat" and len(left):
            # The same ones wherever the epoch was resumed: from its begin, not of what is left.
            return np.concatenate([left, np.resize(order, -len(left) % self.size)])
        return left

    def __len__(self) -> int:
        """Give how many samples this rank takes in what is left of the epoch."""
        return len(self._samples()[self.rank :: self.size])

    def __iter__(self) -> Iterator[int]:
        """Go through what is left of the epoch; the next one begins after that."""
        for index in self._samples()[self.rank :: self.size]:
            self.position = min(self.position + self.size, self.count)
            yield int(index)
        self.epoch, self.position = self.epoch + 1, 0

    def state_dict(self) -> dict[str, int]:
        """Give what resumes it, on another number of ranks too."""
        return {"seed": self.seed, "epoch": self.epoch, "position": self.position}

    def load_state_dict(self, state: Mapping[str, int]) -> None:
        """Go on where :meth:`state_dict` was called."""
        names = ("seed", "epoch", "position")
        given = state if isinstance(state, Mapping) else {}
        found: list[Any] = [given.get(name) for name in names]
        if not all(isinstance(x, (int, np.integer)) and x >= 0 for x in found):
            raise InvalidArgument(
                f"rank {self.rank}: state={state!r}: allowed is what state_dict() of a shard gave"
            )
        if found[2] > self.count:
            raise InvalidArgument(
                f"rank {self.rank}: state={state!r} is of a longer data set: this one has "
                f"{self.count} samples"
            )
        self.seed, self.epoch, self.position = (int(x) for x in found)


class Samples:
    """One rank's samples of a sequence; iterating takes one epoch, or what is left of it."""

    def __init__(self, data: Any, order: Order):
        self.data, self.order = data, order

    def __len__(self) -> int:
        return len(self.order)

    def __iter__(self) -> Iterator[Any]:
        return (self.data[index] for index in self.order)

    def state_dict(self) -> dict[str, int]:
        """Give what resumes it."""
        return self.order.state_dict()

    def load_state_dict(self, state: Mapping[str, int]) -> None:
        """Go on where :meth:`state_dict` was called."""
        self.order.load_state_dict(state)


class Stream:
    """Every p-th item of an iterable whose length is not known; each rank reads all of it."""

    def __init__(self, data: Iterable[Any], comm: Any, uneven: str):
        self._data, self._uneven = data, uneven
        self._rank, self._size = comm.rank, comm.size

    def __iter__(self) -> Iterator[Any]:
        items = iter(self._data)
        while group := list(islice(items, self._size)):
            if len(group) < self._size:
                if self._uneven == "drop":
                    return
                if self._uneven == "keep" and self._rank >= len(group):
                    return
            yield group[self._rank % len(group)]


def shard(
    data: Any, comm: Any, *, shuffle: bool | None = None, seed: int = 0, uneven: str = "repeat"
) -> Any:
    """Give this rank's part of a data set, a loader of PyTorch, or any iterable.

    Parameters
    ----------
    data : sequence, torch.utils.data.DataLoader or iterable
        The same on every rank.  Of a sequence the parts are samples; of a loader batches of its own
        size, so the global batch is that times the number of ranks; of another iterable items.
    comm : Communicator
        The ranks.
    shuffle : bool, optional
        Whether each epoch has another order; by default as the loader says, else not.
    seed : int
        Of the order.
    uneven : {"repeat", "drop", "keep"}
        What to do where parts would be unequal: see :class:`Order`.

    Returns
    -------
    iterable
        With `state_dict` and `load_state_dict` for sequences and loaders: it resumes in the middle
        of an epoch, on another number of ranks too.

    Raises
    ------
    InvalidArgument
        If `data` is a dict, a set or none of these, `uneven` or `seed` is not allowed, or `shuffle`
        is asked of an iterable without a length.
    """
    if not isinstance(getattr(comm, "rank", None), int):
        raise InvalidArgument(
            f"comm={comm!r}: allowed are communicators, as mpidist.init() gives them"
        )
    if uneven not in UNEVEN:
        raise InvalidArgument(
            f"rank {comm.rank}: uneven={uneven!r}: allowed are {', '.join(map(repr, UNEVEN))}"
        )
    if isinstance(data, (Mapping, set, frozenset)) or not (
        hasattr(data, "__iter__") or hasattr(data, "__getitem__")
    ):
        raise InvalidArgument(
            f"rank {comm.rank}: data is of {type(data).__name__}: allowed are sequences, loaders "
            "of PyTorch, and iterables that have the same order on every rank"
        )
    if isinstance(seed, bool) or not isinstance(seed, (int, np.integer)) or seed < 0:
        raise InvalidArgument(f"rank {comm.rank}: seed={seed!r}: allowed are whole numbers >= 0")
    loaders = adapter(library(data), "loader")
    loader = loaders and loaders.shard_loader(data, comm, shuffle, seed, uneven)
    if loader is not None:
        return loader
    if hasattr(data, "__len__") and hasattr(data, "__getitem__"):
        return Samples(data, Order(len(data), comm, bool(shuffle), seed, uneven))
    if shuffle:
        raise InvalidArgument(
            f"rank {comm.rank}: shuffle=True: {type(data).__name__} has no length; allowed are "
            "sequences and loaders"
        )
    return Stream(data, comm, uneven)
