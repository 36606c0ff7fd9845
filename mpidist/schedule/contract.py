"""The contracts of the collectives: the blocks each rank starts with, and must end with.

The meaning of a collective is defined here once, independent of any algorithm.  A *datum* is
written ``(origin, block)``: block `block` of the input of rank `origin`.  The buffer ``out`` is the
working copy and starts as this rank's input (nothing is copied: the engine reads untouched blocks
from the input).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

BlockRange = Callable[[int, int, int, int], range]  # (rank, size, root, number of blocks)
RankRange = Callable[[int, int], range]  # (rank, size)
Datum = tuple[int, int]


@dataclass(frozen=True)
class Contract:
    """The start and end state of one collective.

    Attributes
    ----------
    name : str
        Name of the collective.
    input_blocks, output_blocks : callable
        ``f(rank, size, root, n)`` returns the range of the rank's input blocks, or of the blocks
        that it must end with in ``out``; `n` is the number of blocks the data are cut into.
    input_buffer : {"out", "in"}
        The buffer that holds the input at the start.
    rooted : bool
        Whether the collective has a root.
    contributions : callable or None
        For collectives that combine: ``f(rank, size)`` returns the range of ranks whose
        contributions an output block of `rank` has, each of them once.
    idempotent : bool
        Whether the same contribution may be combined more than once, as in a barrier.
    per_rank : bool
        Whether the data are cut into at least one block per rank.
    origin : callable or None
        For collectives that only move data: ``f(rank, block, size, root, n)`` returns the datum
        ``(origin, input block)`` that output block `block` of `rank` must hold.
    reduces : bool
        Whether contributions are combined; else data only move.
    averages : bool
        Whether a mean is defined: every result has the contributions of all ranks.
    same_length : bool
        Whether the result is as long as the input, and may take its place block by block.
    rereads : bool
        Whether input is still read when the result is written, so that in place needs a copy.
    """

    name: str
    input_blocks: BlockRange
    output_blocks: BlockRange
    input_buffer: str = "out"
    rooted: bool = False
    contributions: RankRange | None = None
    idempotent: bool = False
    per_rank: bool = False
    origin: Callable[[int, int, int, int, int], Datum] | None = None
    reduces: bool = field(init=False)
    averages: bool = field(init=False)
    same_length: bool = field(init=False)
    rereads: bool = field(init=False)

    def __post_init__(self) -> None:
        derived = {
            "reduces": self.contributions is not None,
            "averages": self.contributions is _all_ranks,
            "same_length": not self.per_rank and self.input_buffer == "out",
            "rereads": self.input_buffer == "in" or (self.per_rank and self.contributions),
        }
        for name, holds in derived.items():  # fields: every call reads them
            object.__setattr__(self, name, bool(holds))

    def default_blocks(self, size: int) -> int:
        """Return the block count if an algorithm declares none: `size` if `per_rank`, else 1."""
        return size if self.per_rank else 1

    def length_key(self, rank: int, buffer: str, block: int, size: int, n: int) -> object:
        """Return a key of a block's length; the data are cut into `n` blocks.

        Blocks with equal keys have equal numbers of elements; others may differ in length.
        """
        if self.name != "alltoall":
            return block
        if buffer == "in":
            return (rank, block)
        each = n // size
        return (block // each, rank * each + block % each)


def _every(rank: int, size: int, root: int, n: int) -> range:
    return range(n)


def _own(rank: int, size: int, root: int, n: int) -> range:
    each = n // size
    return range(rank * each, (rank + 1) * each)


def _at_root(rank: int, size: int, root: int, n: int) -> range:
    return range(n) if rank == root else range(0)


def _after_rank_0(rank: int, size: int, root: int, n: int) -> range:
    return range(n) if rank else range(0)


def _all_ranks(rank: int, size: int) -> range:
    return range(size)


def _up_to_own(rank: int, size: int) -> range:
    return range(rank + 1)


def _below_own(rank: int, size: int) -> range:
    return range(rank)


def _from_root(rank: int, block: int, size: int, root: int, n: int) -> Datum:
    return root, block


def _from_owner(rank: int, block: int, size: int, root: int, n: int) -> Datum:
    return block // (n // size), block


def _transposed(rank: int, block: int, size: int, root: int, n: int) -> Datum:
    each = n // size
    return block // each, rank * each + block % each


COLLECTIVES: dict[str, Contract] = {
    contract.name: contract
    for contract in (
        Contract("allreduce", _every, _every, contributions=_all_ranks),
        Contract("reduce", _every, _at_root, rooted=True, contributions=_all_ranks),
        Contract("broadcast", _at_root, _every, rooted=True, origin=_from_root),
        Contract("allgather", _own, _every, per_rank=True, origin=_from_owner),
        Contract("reduce_scatter", _every, _own, contributions=_all_ranks, per_rank=True),
        Contract("gather", _own, _at_root, rooted=True, per_rank=True, origin=_from_owner),
        Contract("scatter", _at_root, _own, rooted=True, per_rank=True, origin=_from_root),
        Contract("alltoall", _every, _every, input_buffer="in", per_rank=True, origin=_transposed),
        Contract("scan", _every, _every, contributions=_up_to_own),
        Contract("exscan", _every, _after_rank_0, input_buffer="in", contributions=_below_own),
        Contract("barrier", _every, _every, contributions=_all_ranks, idempotent=True),
    )
}
"""The collectives by name."""
