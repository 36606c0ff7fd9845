"""What messages cost on a machine: curves of seconds over bytes, by what a round does."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median_low

from ..errors import InvalidArgument


def rising(values: Sequence[float]) -> tuple[float, ...]:
    """Return the ascending numbers >= 0 that differ least from `values`, in the sum.

    Values that fall are pooled, and become their median (of two the lower one): isotonic regression
    of absolute differences, by pool-adjacent-violators (Barlow, Bartholomew, Bremner and Brunk,
    Statistical Inference under Order Restrictions, Wiley, 1972).  So a value that is too high or
    too low moves none of those behind it.
    """
    # 1 100 3 4   the pools   1 | 100     1 | 100 3     1 | 3 3 | 4   are   1 3 3 4
    pools: list[list[float]] = []
    for value in values:
        pools.append([max(value, 0.0)])
        while len(pools) > 1 and median_low(pools[-2]) > median_low(pools[-1]):
            last = pools.pop()
            pools[-1] += last
    return tuple([median_low(pool) for pool in pools for _ in pool])


@dataclass(frozen=True)
class Curve:
    """Seconds over bytes: straight lines between measured sizes.

    Linear, not by logarithms: within one protocol and one level of caches time is linear in the
    bytes.  Below the first size it is constant.

    Attributes
    ----------
    sizes : tuple of int
        Ascending numbers of bytes.
    seconds : tuple of float
        Seconds of each size, none less than that of a smaller one.
    slope : float
        Seconds of each byte beyond the last size.
    """

    sizes: tuple[int, ...]
    seconds: tuple[float, ...]
    slope: float

    def __post_init__(self) -> None:
        sizes = self.sizes
        ascend = all(first < second for first, second in zip(sizes, sizes[1:]))
        if not sizes or not ascend or len(sizes) != len(self.seconds):
            raise InvalidArgument(
                f"curve of {len(self.seconds)} seconds at sizes={sizes!r:.60}: expected ascending "
                "sizes, at least one, and as many seconds"
            )

    @classmethod
    def through(cls, sizes: Sequence[int], seconds: Sequence[float]) -> Curve:
        """Return the curve near measured points, which noise may not make fall; see :func:`rising`.

        Beyond the last size it goes on as between the last two, or where noise made these fall, as
        from the nearest lower one; of one point it is constant.
        """
        fitted = rising(seconds)
        before = max([k for k, each in enumerate(fitted) if each < fitted[-1]], default=None)
        slope = 0.0
        if before is not None:
            slope = (fitted[-1] - fitted[before]) / (sizes[-1] - sizes[before])
        return cls(tuple(sizes), fitted, slope)

    @classmethod
    def line(cls, first: float, slope: float) -> Curve:
        """Return the straight line of `first` seconds for no bytes, and `slope` for each."""
        return cls((0,), (first,), slope)

    def at(self, nbytes: float) -> float:
        """Return the seconds of so many bytes."""
        sizes, seconds = self.sizes, self.seconds
        after = bisect_right(sizes, nbytes)
        if after == 0:
            return seconds[0]
        if after == len(sizes):
            return seconds[-1] + (nbytes - sizes[-1]) * self.slope
        part = (nbytes - sizes[after - 1]) / (sizes[after] - sizes[after - 1])
        return seconds[after - 1] + part * (seconds[after] - seconds[after - 1])


@dataclass(frozen=True)
class Messages:
    """The times of messages between ranks, and of what a rank does beside them.

    A line is *written* if the call itself has received or combined it: it is in the cache of the
    rank that sends it on, not where the user's program has left it.

    Attributes
    ----------
    call : float
        Seconds of a call, beside its rounds.
    strand : Curve
        Seconds of each strand of a ``parallel``, over the bytes that the rank sends in it: those of
        messages of one rank that are in flight together disturb each other.
    further : Curve
        What another message of the same round adds to one: the seconds for which a message occupies
        the port of its rank.  The rest is latency, which overlaps with the next message's.
    onward : Curve
        What a message of the next round adds to one: the seconds after which its rank goes on, less
        than those of a message if the library keeps it until it is received, as it does short ones.
    one_way, both_ways : Curve
        A round of ranks that only send or only receive; one of ranks that do both.
    one_way_written, both_ways_written : Curve
        The same of lines that the call has written.
    combine, combine_apart : Curve
        Combining in place, and of two operands into a third place.
    copy : Curve
        Copying in a rank's own memory.
    occupies : bool
        Whether messages keep the processors of both ranks busy, as within a node but not between
        nodes, so that neither combines meanwhile.
    """

    call: float
    strand: Curve
    further: Curve
    onward: Curve
    one_way: Curve
    both_ways: Curve
    one_way_written: Curve
    both_ways_written: Curve
    combine: Curve
    combine_apart: Curve
    copy: Curve
    occupies: bool = True

    @classmethod
    def straight(cls, alpha: float, beta: float, gamma: float) -> Messages:
        """Return the model of papers: α + nβ for each message and nγ to combine, all else free."""
        line, combine, free = Curve.line(alpha, beta), Curve.line(0.0, gamma), Curve.line(0.0, 0.0)
        return cls(0.0, free, line, line, line, line, line, line, combine, combine, free, False)

    def message(self, nbytes: int, both_ways: bool, written: bool) -> tuple[float, float, float]:
        """Return the seconds until a message has arrived, its ports are free, its rank goes on."""
        if both_ways:
            curve = self.both_ways_written if written else self.both_ways
        else:
            curve = self.one_way_written if written else self.one_way
        seconds = curve.at(nbytes)
        onward = min(self.onward.at(nbytes), seconds)
        return seconds, min(max(seconds - self.latency(nbytes), 0.0), seconds), onward

    def latency(self, nbytes: float) -> float:
        """Return the seconds of a message that overlap with the next one's."""
        return max(self.one_way.at(nbytes) - self.further.at(nbytes), 0.0)

    def combining(self, nbytes: int, apart: bool) -> float:
        """Return the seconds of combining `nbytes` with as many, `apart` or in place."""
        return (self.combine_apart if apart else self.combine).at(nbytes)
