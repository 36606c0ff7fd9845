"""Folding of any number of ranks onto a power of two: base, proxies and extras.

The first ``2 * extras`` ranks form pairs; in each pair one rank, the proxy, acts for both::

    7 ranks:   (0 1) (2 3) (4 5)  6        the base, a power of two: 1 3 5 6
                  ^     ^     ^
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from ..schedule.rounds import Blocks, Recv, Reduce, Round, Schedule, Send, on


@dataclass(frozen=True)
class Folding:
    """The folding of all ranks onto a power of two, and the role of this rank in it.

    The base is the power of two of ranks that run the schedule.  Each other rank, an extra, gives
    its data to its proxy, a rank of the base that acts for both.
    """

    rank: int
    players: tuple[int, ...]  # the base: players[i] acts as rank i of a power of two
    pairs: int  # number of extras, whose proxies are the first players
    index: int | None  # of this rank in `players`; None for an extra
    proxy: int | None  # of this rank, if it is an extra
    extra: int | None  # of this rank, if it is a proxy

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


def folding(rank: int, size: int, keep: int = -1) -> Folding:
    """Return the folding of `size` ranks, seen by `rank`.

    The proxy of a pair is its upper rank, or the lower one if that is `keep`: a reduce's root must
    not be an extra.
    """
    pairs = size - base(size)
    players = [2 * i if 2 * i == keep else 2 * i + 1 for i in range(pairs)]
    players += range(2 * pairs, size)
    if rank not in players:
        return Folding(rank, tuple(players), pairs, None, rank ^ 1, None)
    extra = rank ^ 1 if rank < 2 * pairs else None
    return Folding(rank, tuple(players), pairs, players.index(rank), None, extra)
