"""Buckets: which parameters share one, its memory, and the algorithm that is pinned for it."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import Any

import numpy as np

from ..communicator.communicator import Communicator
from ..device.recognise import describe
from ..errors import Unsupported
from ..frameworks.base import Framework
from ..schedule.registry import RESERVED, find
from .bucket import Bucket


def assign_buckets(
    nbytes: Sequence[int],
    kinds: Sequence[Hashable],
    bucket_bytes: int,
    first_bucket_bytes: int,
    order: Sequence[int] | None = None,
) -> list[tuple[int, ...]]:
    """Assign parameters to buckets in the order in which a backward pass computes gradients.

    The first bucket is smaller so that communication begins early (the rule of PyTorch's reducer).

    Parameters
    ----------
    nbytes : sequence of int
        Size of each parameter in bytes.
    kinds : sequence
        Parameters of different kinds (dtypes) never share a bucket.
    bucket_bytes, first_bucket_bytes : int
        Most bytes in a bucket, and in the first one.  A larger parameter has a bucket for itself.
    order : sequence of int, optional
        The parameters' indices as their gradients become ready; by default the last parameter is
        the first, as in a module whose layers stand in the order in which forward meets them.

    Returns
    -------
    list of tuple of int
        Indices of parameters; buckets in the order in which they become complete.

    Examples
    --------
    >>> assign_buckets([4, 4, 4, 4], "aaaa", 8, 4)
    [(3,), (2, 1), (0,)]
    """
    order = list(reversed(range(len(nbytes)))) if order is None else list(order)
    closed: list[list[int]] = []
    filling: dict[Hashable, list[int]] = {}
    room: dict[Hashable, int] = {}
    limit = first_bucket_bytes
    for index in order:
        kind = kinds[index]
        if kind in filling and nbytes[index] > room[kind]:
            closed.append(filling.pop(kind))
        if kind not in filling:
            filling[kind], room[kind] = [], limit
            limit = bucket_bytes
        filling[kind].append(index)
        room[kind] -= nbytes[index]
    complete = {index: moment for moment, index in enumerate(order)}
    return sorted(map(tuple, [*closed, *filling.values()]), key=lambda b: complete[b[-1]])


UNSTEADY = ("native", "staged", "single_copy")
"""Ways that "auto" leaves out here: MPI does not promise equal bits on every rank, and the others
serve no call in the background."""


def choose_algorithms(
    comm: Communicator, nbytes: Sequence[int], asked: str, symmetric: bool, collective: str
) -> list[str]:
    """Choose an algorithm for each size in bytes, on rank 0, for all ranks; collective.

    The precedence is that of a communicator; what the call or the configuration asks for by name is
    taken even if it is native.

    Raises
    ------
    UnknownName
        If `asked` is neither "auto" nor an algorithm.
    """
    if asked != "auto":
        if asked not in RESERVED:
            find(collective, asked)
        return [asked] * len(nbytes)
    memory = "symmetric" if symmetric else "private"

    def name(size: int) -> str:
        try:
            return comm.explain(collective, size, "mean", memory, without=UNSTEADY)[0].name
        except Unsupported:  # the configuration asks for one of those
            return comm.explain(collective, size, "mean", memory)[0].name

    return comm.broadcast_object([name(size) for size in nbytes] if comm.rank == 0 else None)


def allocate(comm: Communicator, count: int, dtype: Any) -> Any:
    """Make a flat array in symmetric memory, or give None where there is none; collective."""
    try:
        return comm.empty(count, dtype)
    except Unsupported:
        return None


def allocate_on_device(comm: Communicator, count: int, framework: Framework, p: Any) -> Any:
    """Make a flat array of zeros in symmetric memory of the GPUs; None if it is of no use there.

    Collective.  The memory is taken as bytes: libraries do not have all dtypes of each other.
    """
    values = framework.values(p)
    if not comm.gpu.sums_in_place(describe(values, comm.rank).dtype):
        return None
    nbytes = count * values.itemsize
    try:
        return framework.on_device(comm.empty(nbytes, "uint8", device="cuda"), p)
    except Unsupported:
        return None


def choose_on_device(
    comm: Communicator, adviser: Any, flat: Any, asked: str, collective: str
) -> str:
    """Choose the algorithm of an array on a GPU, once and for all ranks; collective.

    What the GPUs themselves serve gives the same bits every time; what goes through the host goes
    in chunks, and is chosen as one of them would be.
    """
    gpu = comm.gpu
    if asked != "auto" or gpu.serves_alone(flat, collective):
        return asked
    (name,) = choose_algorithms(
        adviser, [min(int(flat.nbytes), gpu.chunk_bytes)], asked, False, collective
    )
    return name


def release(bucket: Bucket) -> None:
    """Give the symmetric memory of a bucket back that is no more; collective."""
    if bucket.lane is None or bucket.comm.size == 1:
        return
    if bucket.comm.gpu.holds(bucket.flat):
        bucket.comm.free(bucket.flat)


def real(dtype: Any) -> bool:
    """Tell whether numbers of a dtype, of numpy or torch, have a mean of the same dtype."""
    if isinstance(dtype, np.dtype):
        return dtype.kind in "fc" or dtype.name == "bfloat16"
    return bool(dtype.is_floating_point or dtype.is_complex)


Layout = list[tuple[int, ...]]


class Grouping:
    """All parameters of a model in buckets.

    Parameters
    ----------
    framework : Framework
        Of the parameters.
    named : sequence of (str, parameter)
        The parameters, the same on every rank.
    sizes : tuple of int
        Most bytes in a bucket, and in the first one.
    algorithm : str
        Of the allreduces; "auto" to have one chosen for each bucket.
    adviser : Communicator
        Who chooses: the user's, which has the strategies for several nodes too.

    Attributes
    ----------
    buckets : tuple of Bucket
        In the order in which a backward pass completes them.
    layout : list of tuple of int
        The parameters of each bucket, by number.
    where : dict of int to (int, int)
        The bucket of a parameter, and its place there.
    algorithm, adviser
        As given.
    symmetric : bool
        Whether the buffers of parameters in host memory are in symmetric memory.
    on_device : bool
        Whether there are parameters on a GPU.
    """

    def __init__(
        self,
        framework: Framework,
        named: Sequence[tuple[str, Any]],
        sizes: tuple[int, int],
        algorithm: str,
        adviser: Any,
    ):
        self.framework, self.named, self.adviser = framework, list(named), adviser
        self.symmetric = False
        self.on_device = any(framework.stream(p) is not None for _, p in self.named)
        self.buckets: tuple[Bucket, ...] = ()
        self.where: dict[int, tuple[int, int]] = {}
        self._sizes, self.algorithm = sizes, algorithm
        self._nbytes = [int(framework.values(p).nbytes) for _, p in self.named]
        self._kinds = [framework.kind(p) for _, p in self.named]
        self._copies = 0  # in buckets that are no more
        self.layout = self.plan(None)

    def plan(self, order: Sequence[int] | None) -> Layout:
        """Say which parameters will share a bucket if gradients become ready in this order."""
        return assign_buckets(self._nbytes, self._kinds, *self._sizes, order)

    def make(
        self, comm: Communicator, layout: Layout, algorithms: Sequence[str] | None = None
    ) -> tuple[Bucket, ...]:
        """Put the parameters into buckets; gradients keep their values; collective.

        Parameters
        ----------
        comm : Communicator
            Who will send them.
        layout : list of tuple of int
            As :meth:`plan` gives it.
        algorithms : sequence of str, optional
            Of the buckets; chosen if it is not given.
        """
        if layout != self.layout or not self.buckets:
            self._copies = self.copies
            self.layout, before = layout, self.buckets
            self.buckets = tuple(
                Bucket(b, [self.named[i] for i in chosen], self.framework, comm, self.allocate)
                for b, chosen in enumerate(layout)
            )
            self.where = {
                i: (b, k) for b, chosen in enumerate(layout) for k, i in enumerate(chosen)
            }
            if comm.size > 1:
                for bucket in self.buckets:
                    bucket.adopt()
                for bucket in before:
                    release(bucket)
        if algorithms is None:
            sizes = [sum(self._nbytes[i] for i in chosen) for chosen in layout]
            algorithms = self.choose(sizes, "allreduce")
        for bucket, algorithm in zip(self.buckets, algorithms, strict=True):
            bucket.algorithm = algorithm
        return self.buckets

    def choose(self, nbytes: Sequence[int], collective: str) -> list[str]:
        """Choose algorithms for messages in buckets, by their bytes; collective."""
        names = choose_algorithms(self.adviser, nbytes, self.algorithm, self.symmetric, collective)
        if self.on_device:
            for k, bucket in enumerate(self.buckets):
                if bucket.lane is not None and bucket.comm.size > 1:
                    names[k] = choose_on_device(
                        bucket.comm, self.adviser, bucket.flat, self.algorithm, collective
                    )
        return names

    def allocate(self, p: Any, count: int, comm: Communicator) -> Any:
        """Make a flat array of zeros for `count` elements like those of `p`; collective."""
        values = self.framework.values(p)
        flat = None
        if comm.size > 1 and type(values) is np.ndarray:
            flat = allocate(comm, count, values.dtype)
            self.symmetric = flat is not None
        elif comm.size > 1:
            flat = allocate_on_device(comm, count, self.framework, p)
        return self.framework.like(p, count) if flat is None else flat

    @property
    def copies(self) -> int:
        """How many gradients had to be copied into their buckets so far."""
        return self._copies + sum(bucket.copies for bucket in self.buckets)

    @property
    def nbytes(self) -> int:
        """Bytes of all gradients."""
        return sum(self._nbytes)

    def names(self) -> list[list[str]]:
        """Name the parameters of each bucket."""
        return [list(bucket.names) for bucket in self.buckets]

    def layout_of(self, names: Sequence[Sequence[str]]) -> Layout | None:
        """Give the layout whose buckets have these parameters, None if it is none of this model."""
        number = {name: index for index, (name, _) in enumerate(self.named)}
        flat = [name for bucket in names for name in bucket]
        if sorted(flat) != sorted(number):
            return None
        return [tuple(number[name] for name in bucket) for bucket in names]
