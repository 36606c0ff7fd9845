"""Folding of any number of ranks onto a power of two: base, proxies and extras.

The first ``2 * extras`` ranks form pairs; in each pair one rank, the proxy, acts for both::

    7 ranks:   (0 1) (2 3) (4 5)  6        the base, a power of two: 1 3 5 6
                  ^     ^     ^
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from ..schedule.rounds import Blocks, Recv, Reduce, Round, Schedule, Send, on


@dataclass(frozen=True)
class Fold:
    """The folding of all ranks onto a power of two, and the role of this rank in it.

    The base is the power of two of ranks that run the schedule.  Each other rank, an extra, gives
    its data to its proxy, a rank of the base that acts for both.

    Attributes
    ----------
    rank : int
        This rank.
    players : tuple of int
        The ranks of the base: ``players[i]`` acts as rank `i` of a power of two.
    index : int or None
        Index of this rank in `players`; None for an extra.
    proxy, extra : int or None
        This rank's proxy if it is an extra; its extra if it is a proxy; else None.
    pairs : int
        Number of extras, whose proxies are the first players.
    """

    rank: int
    players: tuple[int, ...]
    pairs: int
    index: int | None
    proxy: int | None
    extra: int | None

    def through(
        self,
        core: Callable[[int, int], Schedule],
        arrive: type[Reduce] | type[Recv],
        brings: Callable[[int], Blocks],
        takes: Callable[[int], Blocks] | None,
        blocks: Callable[[int], Blocks] | None = None,
    ) -> Iterator[Round]:
        """Yield `core` on the base; extras send data to their proxies before, and receive after.

        Parameters
        ----------
        core : callable
            ``core(rank, size)`` returns a schedule for a power of two of ranks.
        arrive : type
            Step by which a proxy receives its extra's data: `Reduce` or `Recv`.
        brings, takes : callable
            ``brings(extra)`` returns the blocks that the rank `extra` sends to its proxy,
            ``takes(extra)`` those that it receives back; None if it receives nothing.
        blocks : callable, optional
            ``blocks(block)`` returns the blocks of the whole schedule that a block of `core`
            stands for; by default the block of the same number.
        """
        if self.index is None:
            assert self.proxy is not None
            yield Send(self.proxy, brings(self.rank))
            if takes is not None:
                yield Recv(self.proxy, takes(self.rank))
            return
        if self.extra is not None:
            yield arrive(self.extra, brings(self.extra))
        yield from on(self.players, core(self.index, len(self.players)), blocks)
        if self.extra is not None and takes is not None:
            yield Send(self.extra, takes(self.extra))

    def covered(self, index: int) -> tuple[int, ...]:
        """Return the ranks that player `index` acts for: itself, and its extra if it has one."""
        if index >= self.pairs:
            return (self.players[index],)
        return (2 * index, 2 * index + 1)


def base(size: int) -> int:
    """Return the largest power of two that is not above `size`."""
    return 1 << (size.bit_length() - 1)


def fold(rank: int, size: int, keep: int = -1) -> Fold:
    """Return the folding of `size` ranks, seen by `rank`.

    The first ranks form pairs of an extra and its proxy.  The proxy is the upper rank of the pair,
    or the lower one if that is `keep`: a reduce's root must not be an extra.
    """
    pairs = size - base(size)
    players = [2 * i if 2 * i == keep else 2 * i + 1 for i in range(pairs)]
    players += range(2 * pairs, size)
    if rank not in players:
        return Fold(rank, tuple(players), pairs, None, rank ^ 1, None)
    extra = rank ^ 1 if rank < 2 * pairs else None
    return Fold(rank, tuple(players), pairs, players.index(rank), None, extra)
