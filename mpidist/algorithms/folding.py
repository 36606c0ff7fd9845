"""Folding of any number of ranks onto a power of two: base, proxies and extras.

The first ``2 * extras`` ranks form pairs; in each pair one rank, the proxy, acts for both::

    7 ranks:   (0 1) (2 3) (4 5)  6        the base, a power of two: 1 3 5 6
                  ^     ^     ^
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from ..schedule.ranks import choose
from ..schedule.rounds import Blocks, Recv, Reduce, Round, Schedule, Send, on


@dataclass(frozen=True)
class Folding:
    """The folding of `size` ranks onto a power of two, seen by `rank`.

    The base is the power of two of ranks that run the schedule.  Each other rank, an extra, gives
    its data to its proxy, a rank of the base that acts for both.  The proxy of a pair is its upper
    rank, or the lower one if that is `keep`: a reduce's root must not be an extra.
    """

    rank: int
    size: int
    keep: int = -1

    @property
    def pairs(self) -> int:
        """The number of pairs, and so of extras."""
        return self.size - base(self.size)

    def player(self, index: int) -> int:
        """Return the rank that acts as rank `index` of the power of two."""
        paired = 2 * index + (2 * index != self.keep)
        return choose(index < self.pairs, paired, index + self.pairs)

    def index(self, rank: int) -> int:
        """Return the index of a player, or of the proxy of an extra."""
        return choose(rank < 2 * self.pairs, rank // 2, rank - self.pairs)

    def through(
        self,
        core: Callable[[int, int], Schedule],
        arrive: type[Reduce] | type[Recv],
        brings: Callable[[int], Blocks],
        takes: Callable[[int], Blocks] | None,
        blocks: Callable[[int], Blocks] | None = None,
    ) -> Iterator[Round]:
        """Yield `core` on the base; extras send data to their proxies before, and receive after.

        An extra sends the blocks ``brings(extra)``, which its proxy receives by `arrive`, and gets
        ``takes(extra)`` back.  ``blocks(block)`` are those of the whole schedule for which a block
        of ``core(rank, size)`` stands, by default the one of the same number.
        """
        other = self.rank ^ 1  # in its pair, if it is in one
        index = self.index(self.rank)
        if self.rank != self.player(index):
            yield Send(other, brings(self.rank))
            if takes is not None:
                yield Recv(other, takes(self.rank))
            return
        if index < self.pairs:
            yield arrive(other, brings(other))
        yield from on(self.player, core(index, base(self.size)), blocks)
        if index < self.pairs and takes is not None:
            yield Send(other, takes(other))

    def covered(self, index: int) -> tuple[int, ...]:
        """Return the ranks that player `index` acts for: itself, and its extra if it has one."""
        if index >= self.pairs:
            return (self.player(index),)
        return (2 * index, 2 * index + 1)


def base(size: int) -> int:
    """Return the largest power of two that is not above `size`."""
    return 1 << (size.bit_length() - 1)
