"""The same weights on any number of ranks: the gradients of microbatches, added as one tree.

A sum that each rank begins by itself is rounded otherwise on another number of ranks.  So a batch
is cut into a fixed number of microbatches, and their gradients are added as one binary tree over
the numbers of the microbatches, which splits each range at the largest power of two below its
length.  Each rank has a range of them, and adds what of the tree lies within it::

    12 microbatches       0 1 2 3 4 5 6 7 8 9 10 11
    the tree              (((01)(23))((45)(67)))((89)(10 11))
    on 2 ranks            rank 0: 0-3, 4-5    rank 1: 6-7, 8-11
    on 3 ranks            rank 0: 0-3    rank 1: 4-7    rank 2: 8-11

What the ranks then have are subtrees, which are added on as the tree goes on.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import chain, islice
from typing import Any
from weakref import WeakKeyDictionary

import numpy as np

from ..arguments import whole
from ..communicator.communicator import Communicator
from ..errors import InvalidArgument
from ..measure import counted
from ..schedule import blocks
from .bucket import Bucket
from .gradient import RECEIVED, Gradient
from .transport import chained

Subtree = tuple[int, int, Any]
"""First microbatch, their number, and the sum of their gradients."""


def add(subtrees: list[Subtree], first: int, count: int, total: Any) -> None:
    """Add a subtree behind others; two of equal size become one where the tree has their sum."""
    while subtrees:
        start, length, before = subtrees[-1]
        if length != count or start % (2 * count):
            break
        subtrees.pop()
        before += total
        first, count, total = start, 2 * count, before
    subtrees.append((first, count, total))


def summed(subtrees: Sequence[Subtree]) -> Any:
    """Return the sum of all: of what is left, each is added to the sum of those behind it."""
    *others, (_, _, total) = subtrees
    for _, _, before in reversed(others):
        before += total
        total = before
    return total


def is_nonzero(gradient: Any) -> bool:
    """Return whether a gradient is there, and is not zero everywhere."""
    return gradient is not None and bool((gradient != 0).any())


class Microbatches:
    """The microbatches of each step, and the hook that averages their gradients.

    Of the `total` on all ranks this one has `each`, from `first` on; the gradients of those `done`
    in the present step are kept.
    """

    def __init__(self, total: int, comm: Communicator):
        whole("reproducible", total, 1, f"rank {comm.rank}: ")
        if total % comm.size:
            divisors = ", ".join(str(n) for n in range(1, total + 1) if total % n == 0)
            raise InvalidArgument(
                f"rank {comm.rank}: reproducible={total} microbatches on {comm.size} ranks: "
                f"expected a multiple of the ranks; {total} run on {divisors}"
            )
        self.total, self.each, self.done = total, total // comm.size, 0
        self.full = False  # a forward came after the last one: nothing may be added any more
        self.extra = 0  # passes that were added nevertheless
        self.first = comm.rank * self.each
        self._rank = comm.rank
        self._kept: WeakKeyDictionary[Bucket, list[Subtree]] = WeakKeyDictionary()
        # What each rank has when its last microbatch is added: first one and number of each sum.
        self._shapes: list[list[tuple[int, int]]] = []
        for rank in range(comm.size):
            subtrees: list[Subtree] = []
            for number in range(rank * self.each, (rank + 1) * self.each):
                add(subtrees, number, 1, 0)
            self._shapes.append([(first, count) for first, count, _ in subtrees])

    @property
    def last(self) -> bool:
        """Whether it is this rank's last one of the step."""
        return self.done == self.each - 1

    def keep(self, buckets: Sequence[Bucket]) -> None:
        """Take the gradients of a microbatch out of the buckets, which are zero then."""
        for bucket in buckets:
            bucket.collect()
            subtrees, flat = self._kept.setdefault(bucket, []), bucket.flat
            add(subtrees, self.first + self.done, 1, flat)
            if subtrees[-1][2] is flat:  # in no sum yet
                subtrees[-1] = (*subtrees[-1][:2], flat.copy())
            flat[...] = 0
        self.done += 1

    def begin(self) -> None:
        """Begin a step: forget what is kept."""
        self.done, self.full, self.extra = 0, False, 0
        self._kept.clear()

    def check_first(self, added: Gradient, gradients: Sequence[Gradient]) -> None:
        """Raise InvalidArgument if the first addition of a backward pass cannot be one of a step.

        Before the first pass gradients are None or zero, or the mean of the step before would be
        counted by each rank once; between passes they are the parts of their buckets.
        """
        others = [g for g in gradients if g is not added]
        if self.done:
            wrong = [g.name for g in gradients if g.parameter.grad is not g.view]
            what = "set to None, or replaced, between a forward and its backward pass"
        else:
            found = (g.name for g in others if g.state is RECEIVED and is_nonzero(g.parameter.grad))
            wrong, what = list(islice(found, 1)), "not zero before the first one of a step"
        if wrong:
            raise InvalidArgument(
                f"rank {self._rank}: {counted(self.done + 1, 'backward pass', 'es')} with "
                f"reproducible={self.total}, and the gradient of {wrong[0]} was {what}: call "
                "zero_grad() before the first forward of each step"
            )

    def check_full(self) -> None:
        """Raise InvalidArgument at an addition after the last microbatch."""
        if self.full:
            self.extra = 1
            raise InvalidArgument(
                f"rank {self._rank}: more than {self.each} backward passes since the last step: "
                f"reproducible={self.total} has {self.each} microbatches on each rank"
            )

    def check_step(self, passes: int, what: str) -> None:
        """Raise InvalidArgument unless this rank's backward passes of a step are all there."""
        if passes != self.each:
            raise InvalidArgument(
                f"rank {self._rank}: {what} after {counted(passes, 'backward pass', 'es')}: "
                f"reproducible={self.total} has {self.each} on each rank in each step; call "
                "zero_grad() only before the first"
            )

    @chained
    def __call__(self, bucket: Bucket) -> Iterator[Any]:
        """Start to average the gradients of all microbatches, of which this rank's last is here."""
        comm, flat = bucket.comm, bucket.flat
        subtrees = self._kept.pop(bucket, [])
        add(subtrees, self.first + self.each - 1, 1, flat)
        if comm.size == 1:
            flat[...] = summed(subtrees)
        elif max(map(len, self._shapes)) == 1:  # the tree over the ranks is the rest of the tree
            yield comm.iallreduce(subtrees[0][2], out=flat, order="tree")
        else:  # each rank gets all subtrees of its part of the bucket
            parts = [slice(part.start, part.stop) for part in blocks(flat.size, comm.size)]
            sizes = [part.stop - part.start for part in parts]
            sent = np.concatenate([total[part] for part in parts for _, _, total in subtrees])
            counts: Any = [[len(shapes) * size for size in sizes] for shapes in self._shapes]
            work = comm.ialltoall(sent, counts=counts)
            yield work
            mine = self._owned(work.wait(), sizes[comm.rank])
            yield comm.iallgather(mine, out=flat, counts=sizes)
        flat /= self.total

    def _owned(self, received: Any, size: int) -> Any:
        """Return the sum of all ranks' subtrees, of the elements that this rank has received."""
        subtrees: list[Subtree] = []
        for number, (first, count) in enumerate(chain.from_iterable(self._shapes)):
            add(subtrees, first, count, received[number * size : (number + 1) * size])
        return summed(subtrees)
