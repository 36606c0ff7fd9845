"""The prover's symbolic values: terms of contributions; equal terms have one number."""

from __future__ import annotations

from collections.abc import Sequence

from ..measure import plural


class Terms:
    """The values of blocks in a symbolic run, each of which has a number.

    A value is a contribution (`block` of the input of `rank`) or a combination of two values of
    the same block.  Methods take and return the numbers: equal numbers are the same expression, and
    so the same bits.
    """

    def __init__(self, size: int, idempotent: bool = False):
        self.size, self.idempotent = size, idempotent
        self._pairs: dict[tuple[int, int], int] = {}
        self._unions: dict[tuple[int, int], int] = {}
        self._folds: dict[tuple[tuple[int, ...], tuple[int, ...]], int] = {}
        self.block: list[int] = []  # of each value
        self._mask: list[int] = []  # bit r: the contribution of rank r is in it
        self._low: list[int] = []  # the first and the last rank in it, read left to right
        self._high: list[int] = []
        self._sorted: list[bool] = []
        self._trees: set[int] = set()  # the values that are subtrees of the fixed tree

    def leaves(self, rank: int, blocks: range) -> dict[int, int]:
        """Return the number of each of these blocks of the input of `rank`, by block.

        They are made all at once: one by one they took a third of the time of a proof.
        """
        start, count = len(self._mask), len(blocks)
        self.block.extend(blocks)
        self._mask.extend([1 << rank] * count)
        self._low.extend([rank] * count)
        self._high.extend([rank] * count)
        self._sorted.extend([True] * count)
        return dict(zip(blocks, range(start, start + count)))

    def combine(self, left: int, right: int) -> int:
        """Return the number of the value ``op(left, right)``.

        Raises ValueError if it mixes blocks, or has a rank's contribution twice and the operation
        is not idempotent.
        """
        known = self._pairs.get((left, right))
        if known is not None:
            return known
        block, masks = self.block[left], self._mask
        if block != self.block[right]:
            raise ValueError(f"combines block {block} with block {self.block[right]}")
        one, other = masks[left], masks[right]
        if self.idempotent:
            key = (block, one | other)
            if key not in self._unions:
                self._unions[key] = self._new(block, one | other, 0, 0, True)
            new = self._unions[key]
        else:
            if one & other:
                raise ValueError(f"counts the contribution of {self._ranks(one & other)} twice")
            low, high, ordered = self._low, self._high, self._sorted
            in_order = ordered[left] and ordered[right] and high[left] < low[right]
            new = self._new(block, one | other, low[left], high[right], in_order)
        self._pairs[left, right] = new
        return new

    def fold(self, peers: tuple[int, ...], values: list[int]) -> int:
        """Return the number of the value in which the `values` of `peers` are combined in order.

        The first one is combined with each of the others; a rank lower than the first is the left
        operand.  Raises ValueError as :meth:`combine` does.  More than two values have a number of
        their own: it differs from that of the same value combined in pairs.
        """
        if len(values) < 3 or self.idempotent:
            value = values[0]
            for peer, other in zip(peers[1:], values[1:]):
                value = self.combine(*((other, value) if peer < peers[0] else (value, other)))
            return value
        key = (peers, tuple(values))
        known = self._folds.get(key)
        if known is not None:
            return known
        first, masks = peers[0], self._mask
        block, mask = self.block[values[0]], 0
        for value in values:
            if mask & masks[value] or self.block[value] != block:
                return self._refused(mask, block, value)
            mask |= masks[value]
        # Rank 2 of 5 combines (2, 1, 0, 3, 4): 1 and then 0 on the left of 2, 3 and 4 on its right.
        lower = [value for peer, value in zip(peers, values) if peer < first]
        sequence = lower[::-1] + [v for peer, v in zip(peers, values) if peer >= first]
        low, high, ordered = self._low, self._high, self._sorted
        in_order = all(map(ordered.__getitem__, sequence)) and all(
            high[a] < low[b] for a, b in zip(sequence, sequence[1:])
        )
        new = self._new(block, mask, low[sequence[0]], high[sequence[-1]], in_order)
        self._folds[key] = new
        return new

    def _refused(self, mask: int, block: int, value: int) -> int:
        """Raise the error for a value that cannot be combined with `block` of the ranks `mask`."""
        if self.block[value] != block:
            raise ValueError(f"combines block {block} with block {self.block[value]}")
        twice = mask & self._mask[value]
        raise ValueError(f"counts the contribution of {self._ranks(twice)} twice")

    def datum(self, value: int) -> tuple[int, int]:
        """Return the rank of the leftmost contribution in a value, and the value's block."""
        return self._low[value], self.block[value]

    def single(self, value: int) -> bool:
        """Return whether a value is the contribution of one rank."""
        mask = self._mask[value]
        return mask & (mask - 1) == 0

    def joins(self, terms: Sequence[int], result: int) -> bool:
        """Return whether terms combined at once, into `result`, are combined as the fixed tree.

        It splits each range of ranks at the largest power of two below its length.  The terms, by
        the ranks that bring them, must be subtrees of one length; the last may be shorter.
        """
        masks = [self._mask[term] for term in terms]
        first, stop = (masks[0] & -masks[0]).bit_length() - 1, masks[-1].bit_length()
        each, count = masks[0].bit_length() - first, stop - first
        span = 1 << (count - 1).bit_length()
        # A subtree begins at a multiple of its span, and ends there or with the last rank.
        if first % span or (count < span and stop < self.size) or each & (each - 1):
            return False
        starts = range(first, stop, each)
        if masks != [(1 << min(at + each, stop)) - (1 << at) for at in starts]:
            return False
        if each > 1 and not all(self.single(term) or term in self._trees for term in terms):
            return False
        self._trees.add(result)
        return True

    def in_order(self, value: int) -> bool:
        """Return whether a value combines contributions in rank order."""
        return self._sorted[value]

    def fault(self, value: int, block: int, expected: tuple[int, int] | range) -> str | None:
        """Return what is wrong with a value at the end of a schedule, or None if it is right.

        The right value is the contribution `expected`, a (rank, block); or, if that is a range of
        ranks, their contributions to `block`, combined.
        """
        mask = self._mask[value]
        if not isinstance(expected, range):
            found = (self._low[value], self.block[value])
            if mask & (mask - 1) == 0 and found == expected:
                return None
            return (
                f"block {found[1]} of {self._ranks(mask)} "
                f"where block {expected[1]} of rank {expected[0]} belongs"
            )
        if self.block[value] != block:
            return f"a value of block {self.block[value]}"
        wanted = (1 << expected.stop) - (1 << expected.start)
        if wanted & ~mask:
            return f"a value that lacks {self._ranks(wanted & ~mask)}"
        if mask != wanted:
            return f"a value with the contribution of {self._ranks(mask & ~wanted)} too"
        return None

    def _new(self, block: int, mask: int, low: int, high: int, in_order: bool) -> int:
        self.block.append(block)
        self._mask.append(mask)
        self._low.append(low)
        self._high.append(high)
        self._sorted.append(in_order)
        return len(self._mask) - 1

    def _ranks(self, mask: int) -> str:
        ranks = [str(r) for r in range(self.size) if mask >> r & 1]
        more = f" and {len(ranks) - 8:,} more" if len(ranks) > 8 else ""
        return f"{plural(len(ranks), 'rank')} {', '.join(ranks[:8])}{more}"
