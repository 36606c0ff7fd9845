"""The buckets of a model: which parameters they hold, where they lie, how they are sent."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from .bucket import Bucket
from .framework import Framework
from .layout import assign_buckets
from .on_device import allocate_on_device, choose_on_device, release
from .pins import allocate, choose_algorithms

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
        self, comm: Any, layout: Layout, algorithms: Sequence[str] | None = None
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

    def allocate(self, p: Any, count: int, comm: Any) -> Any:
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
