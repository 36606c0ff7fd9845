"""The division of parameters into buckets, with the buckets' memory and pinned algorithms."""

from __future__ import annotations

from collections.abc import Collection, Hashable, Iterable, Sequence
from typing import Any

import numpy as np

from ..communicator.agreement import from_rank_0
from ..communicator.communicator import Communicator
from ..device.recognise import as_device_array
from ..errors import Unsupported
from ..frameworks.base import Framework
from ..schedule.registry import find, reserved
from .bucket import Bucket
from .gradient import Gradient


def assign_buckets(
    nbytes: Sequence[int],
    kinds: Sequence[Hashable],
    bucket_bytes: int,
    first_bucket_bytes: int,
    order: Sequence[int] | None = None,
) -> list[tuple[int, ...]]:
    """Assign parameters to buckets in the order in which a backward pass computes gradients.

    The first bucket is smaller so that communication begins early, as in PyTorch's reducer.  A
    bucket holds parameters of one of `kinds` (the dtype, say); a parameter larger than the limits
    has one of its own.  `order` has the indices of the parameters as their gradients become ready;
    by default the reverse, which is right if forward uses the parameters in their order.  The
    result has the indices of each bucket, in the order in which buckets become complete.

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
    # Buckets of several kinds are filled at the same time: their last gradients decide the order.
    complete = {index: moment for moment, index in enumerate(order)}
    return sorted(map(tuple, [*closed, *filling.values()]), key=lambda b: complete[b[-1]])


UNSTEADY = ("native", "staged", "single_copy")
"""Executors that "auto" leaves out here: MPI does not promise equal bits on every rank, and the
other two serve no call in the background."""


def choose_algorithms(
    comm: Communicator, nbytes: Sequence[int], asked: str, symmetric: bool, collective: str
) -> list[str]:
    """Return the algorithm for each size in bytes, chosen on rank 0 for all ranks; collective.

    An algorithm that `asked` or the communicator's configuration names is used in any case
    (UnknownName if there is none of that name).  Otherwise executors are left out that may give
    other bits on each rank ("native") or cannot run in the background.
    """
    if asked != "auto":
        if asked not in reserved():
            find(collective, asked)
        return [asked] * len(nbytes)
    memory = "symmetric" if symmetric else "private"

    def name(size: int) -> str:
        try:
            return comm.explain(collective, size, "mean", memory, without=UNSTEADY)[0].name
        except Unsupported:  # the configuration names one of UNSTEADY
            return comm.explain(collective, size, "mean", memory)[0].name

    # Strategies and tuning tables may differ between ranks, which would deadlock: one decides.
    return from_rank_0(comm, lambda: [name(size) for size in nbytes], "algorithm='auto'")


def allocate(comm: Communicator, count: int, dtype: Any) -> Any:
    """Return a flat array of `count` elements in symmetric memory, or None; collective.

    It is None if symmetric memory is unavailable.
    """
    try:
        return comm.empty(count, dtype)
    except Unsupported:
        return None


def allocate_on_device(comm: Communicator, count: int, framework: Framework, p: Any) -> Any:
    """Return `count` zeros of the dtype of `p` in symmetric GPU memory, or None; collective.

    It is None if no GPU executor sums this dtype in symmetric memory.  The memory is allocated as
    bytes because a library (PyTorch, cupy) may lack a dtype of another one.
    """
    values = framework.values(p)
    if not comm.gpu.sums_in_place(as_device_array(values, comm.rank).dtype):
        return None
    nbytes = count * values.itemsize
    try:
        return framework.from_device(comm.empty(nbytes, "uint8", device="cuda"), p)
    except Unsupported:
        return None


def choose_on_device(
    comm: Communicator, chooser: Communicator, flat: Any, asked: str, collective: str
) -> str:
    """Return the algorithm for the buffer `flat` on a GPU, the same on all ranks; collective.

    It is `asked`, such as "auto", if the user names one or the GPU's executors serve the call: they
    give the same bits in every call.  Otherwise the buffer is staged through the host in chunks,
    and `chooser` chooses for the size of one chunk.
    """
    gpu = comm.gpu
    if asked != "auto" or gpu.serves_alone(flat, collective):
        return asked
    (name,) = choose_algorithms(
        chooser, [min(int(flat.nbytes), gpu.chunk_bytes)], asked, False, collective
    )
    return name


def release(bucket: Bucket) -> None:
    """Free the symmetric GPU memory of a bucket that is no longer used; collective."""
    if bucket.streams is None or bucket.comm.size == 1:
        return
    if bucket.comm.gpu.holds(bucket.flat):
        bucket.comm.free(bucket.flat)


def has_mean(dtype: Any) -> bool:
    """Return whether the mean of numbers of this dtype (numpy's or torch's) has the same dtype."""
    if isinstance(dtype, np.dtype):
        return dtype.kind in "fc" or dtype.name == "bfloat16"
    return bool(dtype.is_floating_point or dtype.is_complex)


Layout = list[tuple[int, ...]]


def on_device(framework: Framework, named: Sequence[tuple[str, Any]]) -> bool:
    """Return whether any of the named parameters is on a GPU."""
    return any(framework.stream(p) is not None for _, p in named)


class Grouping:
    """All trainable parameters of a model, divided into buckets.

    `limits` are the largest sizes in bytes of a bucket, and of the first one.  `chooser` is the
    user's communicator, which chooses algorithms by its strategies and tuning.  Parameters named in
    `sparse` are in no bucket.
    """

    def __init__(
        self,
        framework: Framework,
        named: Sequence[tuple[str, Any]],
        limits: tuple[int, int],
        algorithm: str,
        chooser: Communicator,
        sparse: Collection[str] = (),
    ):
        self.framework, self.named, self._chooser = framework, list(named), chooser
        self.symmetric = False  # whether buckets on the host are in symmetric memory
        self.fixed = False  # whether parameters stay in their buckets, whatever order is observed
        self.on_device = on_device(framework, self.named)
        self.buckets: tuple[Bucket, ...] = ()  # in the order in which backward completes them
        self.made = 0  # how often `make` has changed them
        self._limits, self._algorithm = limits, algorithm
        self.gradients = [
            Gradient(i, name, p, int(framework.values(p).nbytes), name in sparse)
            for i, (name, p) in enumerate(self.named)
        ]
        self.sparse = [gradient for gradient in self.gradients if gradient.sparse]
        self._copies = 0  # in buckets that were replaced
        self.layout = self.plan(None)

    def plan(self, order: Iterable[int] | None) -> Layout:
        """Return the layout: the indices of the parameters in each bucket.

        `order` has the indices of the parameters in the order in which their gradients become ready
        in backward; None means the reverse of the parameters' order.
        """
        order = reversed(range(len(self.named))) if order is None else order
        bucketed = [i for i in order if not self.gradients[i].sparse]
        nbytes = [gradient.nbytes for gradient in self.gradients]
        kinds = [self.framework.kind(p) for _, p in self.named]
        return assign_buckets(nbytes, kinds, *self._limits, bucketed)

    def make(
        self, comm: Communicator, layout: Layout, algorithms: Sequence[str] | None = None
    ) -> tuple[Bucket, ...]:
        """Divide the parameters into new buckets by `layout`, and return these; collective.

        Gradients keep their values.  With the present layout only the `algorithms` of the buckets'
        allreduces are set; by default they are chosen.  `comm` sends the buckets.
        """
        if layout != self.layout or not self.buckets:
            self._copies = self.copies
            self.layout, before = layout, self.buckets
            self.buckets = tuple(
                Bucket(b, [self.gradients[i] for i in chosen], self.framework, comm, self.allocate)
                for b, chosen in enumerate(layout)
            )
            if comm.size > 1:
                # The new buckets first: gradients are still views of the old buffers.
                for bucket in self.buckets:
                    bucket.adopt()
                for bucket in before:
                    release(bucket)
        if algorithms is None:
            sizes = [sum(self.gradients[i].nbytes for i in chosen) for chosen in layout]
            algorithms = self.choose(sizes, "allreduce")
        for bucket, algorithm in zip(self.buckets, algorithms, strict=True):
            bucket.algorithm = algorithm
        self.made += 1
        return self.buckets

    def choose(self, nbytes: Sequence[int], collective: str) -> list[str]:
        """Return an algorithm of the collective for each bucket, by size in bytes; collective."""
        names = choose_algorithms(
            self._chooser, nbytes, self._algorithm, self.symmetric, collective
        )
        if self.on_device:
            for k, bucket in enumerate(self.buckets):
                if bucket.streams is not None and bucket.comm.size > 1:
                    names[k] = choose_on_device(
                        bucket.comm, self._chooser, bucket.flat, self._algorithm, collective
                    )
        return names

    def allocate(self, p: Any, count: int, comm: Communicator) -> Any:
        """Return a flat array of `count` zeros of the dtype of `p`; collective.

        It is in symmetric memory if that is available.
        """
        values = self.framework.values(p)
        flat = None
        if comm.size > 1 and type(values) is np.ndarray:
            flat = allocate(comm, count, values.dtype)
            self.symmetric = flat is not None
        elif comm.size > 1:
            flat = allocate_on_device(comm, count, self.framework, p)
        return self.framework.zeros(p, count) if flat is None else flat

    @property
    def copies(self) -> int:
        """Number of gradients that were copied into their buckets so far."""
        return self._copies + sum(bucket.copies for bucket in self.buckets)

    @property
    def nbytes(self) -> int:
        """Size in bytes of all gradients in buckets."""
        return sum(gradient.nbytes for gradient in self.gradients if not gradient.sparse)

    def names(self) -> list[list[str]]:
        """Return the names of the parameters in each bucket."""
        return [list(bucket.names) for bucket in self.buckets]

    def layout_of(self, names: Sequence[Sequence[str]]) -> Layout | None:
        """Return the layout (indices of the parameters in each bucket) for names by bucket.

        This is the inverse of :meth:`names`.  Return None if the parameters have other names.
        """
        number = {
            gradient.name: gradient.index for gradient in self.gradients if not gradient.sparse
        }
        flat = [name for bucket in names for name in bucket]
        if sorted(flat) != sorted(number):
            return None
        return [tuple(number[name] for name in bucket) for bucket in names]
