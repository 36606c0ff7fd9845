"""What each collective promises: which blocks a rank starts with, and which it must end with.

The meaning of a collective is stated here once, apart from every algorithm.  A *datum* is written
``(origin, block)``: block `block` of what rank `origin` brought.  The buffer ``out`` is the working
copy and starts as this rank's input (nothing is copied: the engine reads untouched blocks from the
input).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

BlockRange = Callable[[int, int, int, int], range]  # (rank, size, root, number of blocks)
Datum = tuple[int, int]


@dataclass(frozen=True)
class Contract:
    """The start and end state of one collective.

    Attributes
    ----------
    name : str
        The collective.
    input_blocks, output_blocks : callable
        ``(rank, size, root, n)`` to the range of blocks that the rank brings, and that it must end
        with in ``out``; `n` is the number of blocks the data are cut into.
    input_buffer : {"out", "in"}
        Where the input is found at the start.
    rooted : bool
        Whether one rank, the root, plays a special part.
    reduces : bool
        Whether contributions are combined: every output block holds each rank's contribution once.
    idempotent : bool
        Whether combining is set union, so that hearing of a rank twice does no harm (barrier).
    per_rank : bool
        Whether the data are cut into at least one block per rank.
    origin : callable or None
        For collectives that only move data: ``(rank, block, size, root, n)`` to the datum that must
        stand in output block `block` of `rank`.
    """

    name: str
    input_blocks: BlockRange
    output_blocks: BlockRange
    input_buffer: str = "out"
    rooted: bool = False
    reduces: bool = False
    idempotent: bool = False
    per_rank: bool = False
    origin: Callable[[int, int, int, int, int], Datum] | None = None

    def default_blocks(self, size: int) -> int:
        """Give the number of blocks where an algorithm declares none."""
        return size if self.per_rank else 1

    def slot(self, rank: int, buffer: str, block: int, size: int, n: int) -> object:
        """Name the length of a block's place, so that unequal blocks are never mixed up.

        Two places hold the same number of elements for certain only if this gives the same value.
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
        Contract("allreduce", _every, _every, reduces=True),
        Contract("reduce", _every, _at_root, rooted=True, reduces=True),
        Contract("broadcast", _at_root, _every, rooted=True, origin=_from_root),
        Contract("allgather", _own, _every, per_rank=True, origin=_from_owner),
        Contract("reduce_scatter", _every, _own, reduces=True, per_rank=True),
        Contract("gather", _own, _at_root, rooted=True, per_rank=True, origin=_from_owner),
        Contract("scatter", _at_root, _own, rooted=True, per_rank=True, origin=_from_root),
        Contract("alltoall", _every, _every, input_buffer="in", per_rank=True, origin=_transposed),
        Contract("barrier", _every, _every, reduces=True, idempotent=True),
    )
}
"""The nine collectives by name."""
