"""Any number of ranks folded onto a power of two: base, proxies and extras.

The first ``2 * extra`` ranks form pairs; of each pair one, the proxy, plays for both::

    7 ranks:   (0 1) (2 3) (4 5)  6        a power of two is left: 1 3 5 6
                  ^     ^     ^
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from ..schedule.rounds import Blocks, Recv, Reduce, Round, Schedule, Send, on


@dataclass(frozen=True)
class Fold:
    """How `size` ranks are folded, as one of them sees it.

    Attributes
    ----------
    rank : int
        This rank.
    players : tuple of int
        The ranks of the base: ``players[i]`` plays rank `i` of a power of two.
    index : int or None
        What this rank plays, None for an extra.
    proxy, extra : int or None
        This rank's proxy if it is an extra; its extra if it is a proxy.
    pairs : int
        Number of extras: the first so many players play for two.
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
        """Play `core` on the base; extras hand in their data before, and get results after.

        Parameters
        ----------
        core : callable
            ``(rank, size)`` to a schedule for a power of two of ranks.
        arrive : type
            How a proxy takes its extra's data in: `Reduce` or `Recv`.
        brings, takes : callable
            From an extra to the blocks that it hands in, and to those that it gets back (None:
            it gets nothing back).
        blocks : callable, optional
            Maps a block of `core` to the blocks that it stands for.
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
        """Give the ranks that player `index` plays for: itself, and its extra."""
        if index >= self.pairs:
            return (self.players[index],)
        return (2 * index, 2 * index + 1)


def base(size: int) -> int:
    """Give the largest power of two that is not above `size`."""
    return 1 << (size.bit_length() - 1)


def fold(rank: int, size: int, keep: int = -1) -> Fold:
    """Fold `size` ranks; of each pair the upper plays, but for `keep`, which plays in any case."""
    pairs = size - base(size)
    players = [2 * i if 2 * i == keep else 2 * i + 1 for i in range(pairs)]
    players += range(2 * pairs, size)
    if rank not in players:
        return Fold(rank, tuple(players), pairs, None, rank ^ 1, None)
    extra = rank ^ 1 if rank < 2 * pairs else None
    return Fold(rank, tuple(players), pairs, players.index(rank), None, extra)
