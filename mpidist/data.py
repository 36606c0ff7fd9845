"""Each rank's part of a data set: deterministic, seedable, resumable."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from itertools import islice
from typing import Any

import numpy as np

from .arguments import one_of, whole
from .communicator.communicator import Communicator
from .errors import InvalidArgument
from .frameworks.base import adapter, library

UNEVEN = ("repeat", "drop", "keep")


class Order:
    """Decides which samples of a data set each rank takes, and in which order, in every epoch.

    Parameters
    ----------
    count : int
        Number of samples.
    comm : Communicator
        The ranks.
    shuffle : bool
        Whether the samples are in random order, another one in each epoch.
    seed : int
        Seed of the order; the same on every rank.
    uneven : {"repeat", "drop", "keep"}
        What to do if the ranks would get unequal numbers of samples: repeat some on the last
        ranks, leave the last samples out, or keep the numbers unequal, which needs
        :meth:`DDP.join` in training.
    block : int
        Number of samples that go to the ranks in order, each a range of as many; 0 for single
        samples by turns.

    Attributes
    ----------
    epoch : int
        Number of the present epoch, from 0; between two epochs, of the next one.
    position : int
        Number of samples that all ranks together have taken in this epoch, if each has taken as
        many as this one.
    """

    def __init__(
        self,
        count: int,
        comm: Communicator,
        shuffle: bool,
        seed: int,
        uneven: str,
        block: int = 0,
    ):
        self.count, self.shuffle, self.seed, self.uneven = count, shuffle, seed, uneven
        self.rank, self.size, self.block = comm.rank, comm.size, block
        self.epoch, self.position = 0, 0

    @property
    def together(self) -> int:
        """Number of samples that all ranks take before each has taken as many as the others."""
        return self.block or self.size

    def _samples(self) -> np.ndarray:
        """Return the indices of the samples left in this epoch.

        With `uneven` "drop" or "repeat" the array is cut, or filled with repeats, to a multiple of
        what all ranks take together.
        """
        if self.shuffle:
            order = np.random.default_rng((self.seed, self.epoch)).permutation(self.count)
        else:
            order = np.arange(self.count)
        left = order[self.position :]
        if self.uneven == "drop":
            return left[: len(left) // self.together * self.together]
        if self.uneven == "repeat" and len(left):
            # Repeats come from the begin of the epoch: the same ones wherever it was resumed.
            return np.concatenate([left, np.resize(order, -len(left) % self.together)])
        return left

    def _mine(self) -> np.ndarray:
        """Return this rank's indices in the rest of the epoch."""
        samples = self._samples()
        if not self.block:
            return samples[self.rank :: self.size]
        # Two ranks and blocks of 6::
        #
        #     samples   0 1 2 3 4 5   6 7 8 9 10 11
        #     rank      0 0 0 1 1 1   0 0 0 1 1  1
        return samples.reshape(-1, self.size, self.block // self.size)[:, self.rank].ravel()

    def __len__(self) -> int:
        """Return the number of this rank's samples in the rest of the epoch."""
        return len(self._mine())

    def __iter__(self) -> Iterator[int]:
        """Yield this rank's indices in the rest of the epoch; at its end, move on to the next."""
        each = self.together // self.size
        for number, index in enumerate(self._mine(), 1):
            # Before the yield: a state saved in the loop's body has this sample behind it.
            if number % each == 0:
                self.position = min(self.position + self.together, self.count)
            yield int(index)
        self.epoch, self.position = self.epoch + 1, 0

    def state_dict(self) -> dict[str, int]:
        """Return seed, epoch and position, from which any number of ranks can resume."""
        return {"seed": self.seed, "epoch": self.epoch, "position": self.position}

    def load_state_dict(self, state: Mapping[str, int]) -> None:
        """Restore a :meth:`state_dict`, which may be that of another number of ranks."""
        names = ("seed", "epoch", "position")
        given = state if isinstance(state, Mapping) else {}
        values: list[Any] = [given.get(name) for name in names]
        if not all(isinstance(x, (int, np.integer)) and x >= 0 for x in values):
            raise InvalidArgument(
                f"rank {self.rank}: state={state!r}: expected the result of state_dict() of a shard"
            )
        if values[2] > self.count:
            raise InvalidArgument(
                f"rank {self.rank}: state={state!r} comes from a longer data set: this one has "
                f"{self.count} samples"
            )
        self.seed, self.epoch, self.position = (int(x) for x in values)


class Samples:
    """One rank's samples of a sequence; an iteration yields those that are left in the epoch."""

    def __init__(self, data: Any, order: Order):
        self.data, self.order = data, order

    def __len__(self) -> int:
        return len(self.order)

    @property
    def epoch(self) -> int:
        """Number of the present epoch, from 0; between two epochs, of the next one."""
        return self.order.epoch

    def __iter__(self) -> Iterator[Any]:
        return (self.data[index] for index in self.order)

    def state_dict(self) -> dict[str, int]:
        """Return seed, epoch and position, from which any number of ranks can resume."""
        return self.order.state_dict()

    def load_state_dict(self, state: Mapping[str, int]) -> None:
        """Restore a :meth:`state_dict`, which may be that of another number of ranks."""
        self.order.load_state_dict(state)


class Stream:
    """The items of this rank in an iterable of unknown length: every p-th on p ranks.

    Each rank reads all items.  If less than p are left at the end, `uneven` decides: "repeat" gives
    the ranks without an item one of these again, "drop" gives them to no rank, "keep" to the first
    ranks only.
    """

    def __init__(self, data: Iterable[Any], comm: Communicator, uneven: str):
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
    data: Any,
    comm: Communicator,
    *,
    shuffle: bool | None = None,
    seed: int = 0,
    uneven: str = "repeat",
    microbatches: int = 0,
) -> Any:
    """Return this rank's part of a data set, a loader of PyTorch, or any iterable.

    Parameters
    ----------
    data : sequence, torch.utils.data.DataLoader or iterable
        The same on every rank.  A sequence is divided into samples, another iterable into items.
        A loader becomes one loader per rank with the same batch size, so that the global batch is
        that size times the number of ranks.
    comm : Communicator
        The ranks.
    shuffle : bool, optional
        Whether each epoch has a random order of its own; by default as in the loader, else False.
    seed : int
        Seed of the order.
    uneven : {"repeat", "drop", "keep"}
        Whether unequal parts repeat or drop samples, or are kept: see :class:`Order`.
    microbatches : int
        Number of items of a sequence, or batches of a loader, that make up a step of all ranks;
        each takes a range of them, as ``DDP(reproducible=…)`` needs it.  0: single samples go to
        the ranks by turns.

    Returns
    -------
    iterable
        The rank's part.  That of a sequence or loader has `epoch`, the number of the present epoch
        (between two epochs, of the next one), and `state_dict` and `load_state_dict`, which resume
        in the middle of an epoch, on another number of ranks too.

    Raises
    ------
    InvalidArgument
        If `data` is a dict, a set or not iterable, `uneven` or `seed` is wrong, or `shuffle` is
        given for an iterable without a length.
    """
    if not isinstance(getattr(comm, "rank", None), int):  # nothing but rank and size is needed
        raise InvalidArgument(f"comm={comm!r}: expected a communicator, such as mpidist.init()")
    one_of("uneven", uneven, UNEVEN, f"rank {comm.rank}: ")
    if isinstance(data, (Mapping, set, frozenset)) or not (
        hasattr(data, "__iter__") or hasattr(data, "__getitem__")
    ):
        raise InvalidArgument(
            f"rank {comm.rank}: data has type {type(data).__name__}: expected a sequence, a loader "
            "of PyTorch, or an iterable with the same order on every rank"
        )
    whole("seed", seed, 0, f"rank {comm.rank}: ")
    whole("microbatches", microbatches, 0, f"rank {comm.rank}: ")
    if microbatches % comm.size:
        raise InvalidArgument(
            f"rank {comm.rank}: microbatches={microbatches} on {comm.size} ranks: expected a "
            "multiple of the ranks"
        )
    if microbatches and uneven == "keep":
        raise InvalidArgument(
            f"rank {comm.rank}: microbatches={microbatches} with uneven='keep': expected 'repeat' "
            "or 'drop'"
        )
    loaders = adapter(library(data), "loader")
    loader = loaders and loaders.shard_loader(data, comm, shuffle, seed, uneven, microbatches)
    if loader is not None:
        return loader
    if hasattr(data, "__len__") and hasattr(data, "__getitem__"):
        return Samples(data, Order(len(data), comm, bool(shuffle), seed, uneven, microbatches))
    if shuffle or microbatches:
        wrong = "shuffle=True" if shuffle else f"microbatches={microbatches}"
        raise InvalidArgument(
            f"rank {comm.rank}: {wrong}: {type(data).__name__} has no length; expected a "
            "sequence or a loader"
        )
    return Stream(data, comm, uneven)
