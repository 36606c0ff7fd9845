"""The same weights on any number of ranks: the gradients of microbatches, added as one tree.

A sum that each rank begins by itself is rounded otherwise on another number of ranks.  So a batch
is cut into a fixed number of microbatches, and their gradients are added as one binary tree over
the numbers of the microbatches.  It halves each range of even length, and splits one of odd length
at the largest power of two below.  Each rank has a range, and adds what of the tree lies within::

    12 microbatches       0 1 2 3 4 5 6 7 8 9 10 11
    the tree              (((01)2)((34)5))(((67)8)((9 10)11))
    on 2 ranks            rank 0: 0-5    rank 1: 6-11
    on 3 ranks            rank 0: 0-2, 3    rank 1: 4, 5, 6-7    rank 2: 8, 9-11
    on 4 ranks            rank 0: 0-2    rank 1: 3-5    rank 2: 6-8    rank 3: 9-11

What the ranks then have are subtrees, which are added on as the tree goes on; of a power of two of
ranks each has one.

A microbatch that is a right child in the tree is added to its sibling by the backward pass itself:
that sum stays in the bucket, where other sums are taken out of it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import chain, islice
from operator import iadd
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

Splits = dict[tuple[int, int], int]
"""The inner nodes of a tree: first microbatch and number, and how many are in the left half."""


def power_below(count: int) -> int:
    """Return the largest power of two below a number."""
    return 1 << (count - 1).bit_length() - 1


def tree(first: int, count: int) -> Splits:
    """Return the tree over `count` microbatches from `first` on."""
    if count == 1:
        return {}
    left = power_below(count) if count % 2 else count // 2
    return {(first, count): left, **tree(first, left), **tree(first + left, count - left)}


def add(
    splits: Splits,
    subtrees: list[Subtree],
    first: int,
    count: int,
    total: Any,
    join: Callable[[Any, Any], Any] = iadd,
) -> None:
    """Add a subtree behind others: as long as two are the halves of a node, they become that."""
    while subtrees:
        start, length, before = subtrees[-1]
        if splits.get((start, length + count)) != length:
            break
        subtrees.pop()
        first, count, total = start, length + count, join(before, total)
    subtrees.append((first, count, total))


def follows_ranks(splits: Splits, each: int, first: int, ranks: int) -> bool:
    """Return whether a tree goes on over ranks with `each` microbatches as ``order="tree"``."""
    if ranks == 1:
        return True
    left = power_below(ranks)
    return (
        splits.get((first * each, ranks * each)) == left * each
        and follows_ranks(splits, each, first, left)
        and follows_ranks(splits, each, first + left, ranks - left)
    )


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
        # A pass has added to a gradient twice, or a hook has changed one: only what begins at zero
        # has that pass alone.
        self._apart = False
        # Memory of sums that are no longer needed.
        self._spare: WeakKeyDictionary[Bucket, list[Any]] = WeakKeyDictionary()
        # In each step: the sums so far; the last one is still in its bucket if `joins`.
        self._kept: WeakKeyDictionary[Bucket, list[Subtree]] = WeakKeyDictionary()
        self._joins = False  # the next microbatch is added to the last sum by its backward pass
        self._splits = tree(0, total)
        # Of each microbatch that is a right child: where its sibling begins.
        self._siblings = {
            first + left: first
            for (first, count), left in self._splits.items()
            if count - left == 1
        }
        self._follows_ranks = follows_ranks(self._splits, self.each, 0, comm.size)
        # What each rank has when its last microbatch is added: first one and number of each sum.
        self._shapes: list[list[tuple[int, int]]] = []
        for rank in range(comm.size):
            subtrees: list[Subtree] = []
            for number in range(rank * self.each, (rank + 1) * self.each):
                add(self._splits, subtrees, number, 1, 0)
            self._shapes.append([(first, count) for first, count, _ in subtrees])

    @property
    def last(self) -> bool:
        """Whether it is this rank's last one of the step."""
        return self.done == self.each - 1

    def _add(self, bucket: Bucket, into_flat: bool) -> list[Subtree]:
        """Add the bucket's microbatch to the sums before it; return all, the last in either."""
        if self.done and bucket not in self._kept:
            raise InvalidArgument(
                f"rank {self._rank}: the buckets have changed within a step with reproducible="
                f"{self.total}: expected a state to be loaded before the first forward of a step"
            )
        subtrees, flat = self._kept.setdefault(bucket, []), bucket.flat
        first, count, total = self.first + self.done, 1, flat
        if self._joins:
            first, length, _ = subtrees.pop()
            count += length

        def join(before: Any, after: Any) -> Any:
            self._release(bucket, before if into_flat else after)
            return np.add(before, after, out=flat if into_flat else before)

        add(self._splits, subtrees, first, count, total, join)
        return subtrees

    def _release(self, bucket: Bucket, total: Any) -> None:
        """Keep the memory of a sum for later ones: the system zeroes new memory page by page."""
        if total is not bucket.flat:
            self._spare.setdefault(bucket, []).append(total)

    def _copy(self, bucket: Bucket) -> Any:
        """Return a copy of a bucket, in memory that another sum had if there is some."""
        spare = self._spare.get(bucket)
        total = spare.pop() if spare else np.empty_like(bucket.flat)
        total[...] = bucket.flat
        return total

    def keep(self, buckets: Sequence[Bucket]) -> None:
        """Take the gradients of a microbatch out of the buckets, which are zero then.

        They stay there if the next one is to be added to their sum.
        """
        if self._joins:
            self._check_joined([g for bucket in buckets for g in bucket.gradients])
        for bucket in buckets:
            bucket.collect()
            self._check_changes(bucket)
        following = self.first + self.done + 1
        joins = not self._apart and self._siblings.get(following, -1) >= self.first
        for bucket in buckets:
            subtrees, flat = self._add(bucket, joins), bucket.flat
            if joins:
                continue
            first, count, total = subtrees[-1]
            if total is flat:  # in no sum yet
                subtrees[-1] = (first, count, self._copy(bucket))
            flat[...] = 0
        self.done, self._joins = self.done + 1, joins

    def begin(self) -> None:
        """Begin a step: forget what is kept."""
        self.done, self.full, self.extra, self._joins = 0, False, 0, False
        for bucket, subtrees in self._kept.items():
            for _, _, total in subtrees:
                self._release(bucket, total)
        self._kept.clear()

    def check_again(self, again: Gradient) -> None:
        """Note that a pass adds to a gradient once more, as for a layer that is used twice.

        InvalidArgument if the sum of the microbatches before is there, and so rounded otherwise.
        """
        self._apart = True
        if self._joins:
            self.extra = 1
            raise InvalidArgument(
                f"rank {self._rank}: {again.name} was added to more than once in a backward pass "
                f"with reproducible={self.total}, and in none before: expected it in the first "
                "pass of a rank already; zero_grad() and the same step again will do from now on"
            )

    def note_changes(self, buckets: Sequence[Bucket]) -> None:
        """Note before a backward pass how often gradients were changed in place."""
        for bucket in buckets:
            for gradient, view in zip(bucket.gradients, bucket.views, strict=True):
                gradient.changes = bucket.framework.changes(view)

    def _check_changes(self, bucket: Bucket) -> None:
        """Note that gradients were changed by other means than additions, as by a hook.

        InvalidArgument if they had the sum of the microbatches before.
        """
        for gradient in bucket.gradients:
            before, after = gradient.changes, bucket.framework.changes(gradient.view)
            if before is None or after is None or after - before == gradient.count:
                continue
            self._apart = True
            if self._joins:
                raise InvalidArgument(
                    f"rank {self._rank}: the gradient of {gradient.name} was changed in place in "
                    f"or after a backward pass with reproducible={self.total}, and not in the first"
                    " of this rank: expected changes by Tensor.register_hook, in each pass alike, "
                    "or when all gradients are averaged"
                )

    def _check_joined(self, gradients: Sequence[Gradient]) -> None:
        """Raise InvalidArgument if a gradient lacks the sum to which the last pass was to add."""
        for gradient in gradients:
            if gradient.parameter.grad is not gradient.view:
                raise InvalidArgument(
                    f"rank {self._rank}: the gradient of {gradient.name} was set to None, or "
                    "replaced, as by backward(create_graph=True), between two backward passes of "
                    f"a step with reproducible={self.total}: expected that to come after the last "
                    "one only"
                )

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
        self._check_changes(bucket)
        subtrees = self._add(bucket, True)
        del self._kept[bucket]
        if self._follows_ranks and comm.size > 1:
            yield comm.iallreduce(flat, out=flat, order="tree")
        elif comm.size > 1:  # each rank gets all subtrees of its part of the bucket
            parts = [slice(part.start, part.stop) for part in blocks(flat.size, comm.size)]
            sizes = [part.stop - part.start for part in parts]
            sent = np.concatenate([total[part] for part in parts for _, _, total in subtrees])
            for _, _, total in subtrees:
                self._release(bucket, total)
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
            add(self._splits, subtrees, first, count, received[number * size :][:size])
        return subtrees[0][2]
