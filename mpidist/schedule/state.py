"""The state of all ranks in the fast proofs: which terms are in their cells, and the end state.

A *seat* is one rank of one of the proofs, each of which has its root: seat ``i * size + rank``.
Every seat has its own *cells*, one for each block of "in", of "out", and of other buffers.

Terms are those of :mod:`.terms`, as arrays.  They are equal if their hashes of 64 bits are: so
`Proof.identical` could be wrong with a probability of 2^-64 for each pair of terms, and nothing
else depends on hashes.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Any

import numpy as np

from .contract import Contract
from .machine import Proof
from .ranks import Unfit, cases

_WORD = 64  # ranks in a word of a mask
_MIX = (np.uint64(0x9E3779B97F4A7C15), np.uint64(0xC2B2AE3D27D4EB4F), np.uint64(29))


def _mixed(left: np.ndarray, right: np.ndarray) -> np.ndarray:
    """Return the hash of a term of two terms with these hashes, in this order."""
    mixed = (left ^ (left >> _MIX[2])) * _MIX[0] + (right ^ (right >> _MIX[2])) * _MIX[1]
    return (mixed ^ (mixed >> _MIX[2])) * _MIX[0]


class TermArrays:
    """Terms by number: block, mask of ranks, first and last rank, whether in order, and hash."""

    def __init__(self, capacity: int, size: int, idempotent: bool):
        self.used, self.idempotent = 0, idempotent
        self.block = np.empty(capacity, np.int32)
        self.mask = np.zeros((-(-size // _WORD), capacity), np.uint64)
        self.low, self.high = np.empty((2, capacity), np.int32)
        self.sorted = np.ones(capacity, bool)
        self.hash = np.empty(capacity, np.uint64)

    def reserve(self, count: int) -> None:
        """Make room for so many new terms."""
        more = self.used + count - len(self.block)
        if more <= 0:
            return
        self.mask = np.concatenate([self.mask, np.zeros((len(self.mask), more), np.uint64)], axis=1)
        for name in ("block", "low", "high", "hash"):
            old = getattr(self, name)
            setattr(self, name, np.concatenate([old, np.empty(more, old.dtype)]))
        self.sorted = np.concatenate([self.sorted, np.ones(more, bool)])

    def _new(self, count: int) -> slice:
        if self.used + count > len(self.block):
            self.reserve(max(count, len(self.block)))
        self.used += count
        return slice(self.used - count, self.used)

    def fold(self, peers: np.ndarray, values: np.ndarray) -> np.ndarray:
        """Return the terms of values combined as in :meth:`.terms.Terms.fold`.

        Both arrays have a row for each operand, in the order of combination.
        """
        if len(values) < 3:
            if len(values) == 1:
                return values[0]
            left = peers[1] < peers[0]
            return self.combine(
                np.where(left, values[1], values[0]), np.where(left, values[0], values[1])
            )
        new = self._new(values.shape[1])
        first = values[0]
        block = self.block[first]
        if self.idempotent or (self.block[values] != block).any():
            raise Unfit("combines different blocks")
        for mask in self.mask:
            union = mask[first]
            for value in values[1:]:
                other = mask[value]
                if (union & other).any():
                    raise Unfit("counts a contribution twice")
                union = union | other
            mask[new] = union
        low, high, in_order = self.low[first], self.high[first], self.sorted[first]
        mixed = _mixed(self.hash[first], peers[0].astype(np.uint64))
        for peer, value in zip(peers[1:], values[1:]):
            left, least, most = peer < peers[0], self.low[value], self.high[value]
            in_order = in_order & self.sorted[value] & np.where(left, most < low, high < least)
            low, high = np.where(left, least, low), np.where(left, high, most)
            mixed = _mixed(_mixed(mixed, self.hash[value]), peer.astype(np.uint64))
        self.block[new], self.low[new], self.high[new] = block, low, high
        self.sorted[new], self.hash[new] = in_order, mixed
        return np.arange(new.start, new.stop)

    def leaves(self, ranks: np.ndarray, blocks: np.ndarray) -> np.ndarray:
        """Return new terms: the contributions of `ranks` to `blocks`."""
        new = self._new(len(ranks))
        self.block[new], self.low[new], self.high[new] = blocks, ranks, ranks
        self.mask[ranks // _WORD, np.arange(new.start, new.stop)] = _bit(ranks)
        key = (ranks * np.int64(1 << 32) + blocks).astype(np.uint64)
        self.hash[new] = _mixed(key, ~key)
        if self.idempotent:
            self._set_hash(new)
        return np.arange(new.start, new.stop)

    def combine(self, left: np.ndarray, right: np.ndarray) -> np.ndarray:
        """Return the terms of ``op(left, right)``, element by element."""
        new = self._new(len(left))
        block = self.block[left]
        if (block != self.block[right]).any():
            raise Unfit("combines different blocks")
        self.block[new] = block
        for mask in self.mask:
            one, other = mask[left], mask[right]
            if not self.idempotent and (one & other).any():
                raise Unfit("counts a contribution twice")
            mask[new] = one | other
        if self.idempotent:
            self.low[new] = self.high[new] = 0
            self._set_hash(new)
        else:
            self.low[new], self.high[new] = self.low[left], self.high[right]
            in_order = self.high[left] < self.low[right]
            self.sorted[new] = in_order & self.sorted[left] & self.sorted[right]
            self.hash[new] = _mixed(self.hash[left], self.hash[right])
        return np.arange(new.start, new.stop)

    def union(self, values: np.ndarray) -> np.ndarray:
        """Return the terms of the sets in each column of `values` together; for idempotent ones."""
        block = self.block[values]
        if (block != block[0]).any():
            raise Unfit("combines different blocks")
        new = self._new(values.shape[1])
        self.block[new], self.low[new], self.high[new] = block[0], 0, 0
        for mask in self.mask:
            mask[new] = np.bitwise_or.reduce(mask[values])
        self._set_hash(new)
        return np.arange(new.start, new.stop)

    def _set_hash(self, new: slice) -> None:
        """Give terms that are sets of ranks the hash of the set."""
        mixed = self.block[new].astype(np.uint64)
        for mask in self.mask:
            mixed = _mixed(mixed, mask[new])
        self.hash[new] = mixed


def _bit(ranks: np.ndarray) -> np.ndarray:
    return np.uint64(1) << (ranks % _WORD).astype(np.uint64)


@lru_cache(maxsize=4)
def _blocks_of(
    function: Callable[[int, int, int, int], range], size: int, roots: tuple[int, ...], count: int
) -> tuple[np.ndarray, np.ndarray]:
    """Return each seat and block of the ranges of a contract's function, for each of the roots.

    Many algorithms, arities and groupings of ranks ask for the same.
    """
    ranks = np.tile(np.arange(size), len(roots))
    found = cases(
        lambda rank, root: function(rank, size, root, count),
        ranks,
        np.repeat(np.asarray(roots), size),
    )
    seats = np.concatenate([np.repeat(part, len(blocks)) for part, blocks in found])
    blocks = [np.tile(np.array(blocks, np.int64), len(part)) for part, blocks in found]
    return seats, np.concatenate(blocks)


class State:
    """The cells of all seats, from the contract's start state on.

    If `reached`, others read a seat's input in "in"; it is in "out" as well.  With the end state
    `before` of one root, that of every root begins with it.
    """

    def __init__(
        self,
        contract: Contract,
        size: int,
        roots: Sequence[int],
        count: int,
        width: int,
        equal_blocks: bool,
        reached: bool = False,
        before: State | None = None,
    ):
        self.contract, self.size, self.roots = contract, size, np.asarray(roots)
        self.count, self.width, self.seats = count, width, size * len(roots)
        self._equal, self.transposed = equal_blocks, contract.name == "alltoall"
        self.judged = False  # whether all that is combined is judged
        self.at_once = np.ones(len(roots), bool)  # by proof
        self.ranks = np.tile(np.arange(size), len(roots))
        self.seat_roots = np.repeat(self.roots, size)
        self.terms: TermArrays
        self.memory: np.ndarray
        self.written: np.ndarray
        if before is not None:
            self.terms, self.at_once = before.terms, before.at_once & self.at_once
            self.memory = np.tile(before.memory, len(roots))
            self.written = np.tile(before.written, len(roots))
            return
        self.memory = np.full(self.seats * width, -1, np.int32)
        self.written = np.zeros(self.seats * width, bool)
        seats, blocks = self._blocks(contract.input_blocks)
        self.terms = TermArrays(size * count, size, contract.idempotent)
        self.terms.leaves(np.repeat(np.arange(size), count), np.tile(np.arange(count), size))
        place, leaves = seats * width + blocks, self.ranks[seats] * count + blocks
        if contract.input_buffer == "out":
            self.memory[place + count] = leaves
        if reached or contract.input_buffer == "in":
            self.memory[place] = leaves

    def _blocks(
        self, function: Callable[[int, int, int, int], range]
    ) -> tuple[np.ndarray, np.ndarray]:
        """Return each seat and block of the ranges of a contract's function."""
        return _blocks_of(function, self.size, tuple(self.roots.tolist()), self.count)

    def check_lengths(self, target: np.ndarray, values: np.ndarray) -> None:
        """Raise Unfit if a block could be longer or shorter than its cell of "out" or "tmp"."""
        if self._equal:
            return
        count, terms = self.count, self.terms
        place = target % self.width - count
        place = np.where(place < count, place, place - count)  # in "tmp"
        block = terms.block[values]
        if self.transposed:
            each, own = count // self.size, target // self.width % self.size
            fits = (place // each == terms.low[values]) & (own * each + place % each == block)
        else:
            fits = place == block
        if not fits.all():
            raise Unfit("gets a block that may differ in length")

    def judge(
        self, groups: np.ndarray | None, by: np.ndarray, values: np.ndarray, proofs: np.ndarray
    ) -> None:
        """Raise Unfit if values are not combined as the fixed tree; note where some are partial.

        Of each value that is combined at once with others: its group, and the rank that brings it.
        Without `groups`, each column of the values is one.  `proofs` has the number of each group's
        proof.  See :meth:`.terms.Terms.joins`.  Whatever is
        combined is judged, so a value of several contributions is a subtree if it is a range.
        """
        terms = self.terms
        low, high = terms.low[values], terms.high[values]
        # Each rank brings a range of ranks that it is in, so these have the order of the ranks.
        if not (terms.sorted[values] & (low <= by) & (by <= high)).all():
            raise Unfit("combines what is in another order")
        length = high - low + np.int32(1)
        if groups is None:
            first, stop = low.min(axis=0), high.max(axis=0) + np.int32(1)
            each, total = length.max(axis=0), length.sum(axis=0)
            groups = np.arange(len(proofs))
        else:
            first, stop, each, total = np.zeros((4, len(proofs)), np.int32)
            first[:] = self.size
            np.minimum.at(first, groups, low)
            np.maximum.at(stop, groups, high + np.int32(1))
            np.maximum.at(each, groups, length)
            np.add.at(total, groups, length)
        count = stop - first
        spans = np.array([1 << (n - 1).bit_length() for n in range(1, self.size + 1)])
        span = spans[count - 1]
        fits = (total == count) & (each & (each - 1) == 0) & (first % span == 0)
        fits &= (count == span) | (stop == self.size)
        if not fits.all() or ((length < each[groups]) & (high + 1 < stop[groups])).any():
            raise Unfit("combines in another way than the fixed tree")
        self.at_once[proofs[each > 1]] = False

    def proofs(self, depth: np.ndarray, **numbers: np.ndarray) -> list[Proof]:
        """Check the end state, and return the proofs by root.

        `depth` is by proof, and `numbers` are by seat: `own`, numbers of rounds, `messages`,
        `blocks`, `reductions`, `meetings`, `reads` and `stores`.
        """
        contract, terms = self.contract, self.terms
        seats, blocks = self._blocks(contract.output_blocks)
        values = self.memory[seats * self.width + self.count + blocks]
        if (values < 0).any():
            raise Unfit("a result is never written")
        if contract.origin is not None:
            origin_of: Any = contract.origin  # arithmetic, on arrays too
            places = self.ranks[seats], blocks, self.size, self.seat_roots[seats], self.count
            origin, block = origin_of(*places)
            wrong = (terms.low[values] != origin) | (terms.high[values] != origin)
        else:
            block, wrong = blocks, np.zeros(len(blocks), bool)
            for mask, wanted in zip(terms.mask, self._expected()):
                wrong |= mask[values] != wanted[seats]
        if wrong.any() or (terms.block[values] != block).any():
            raise Unfit("a result is wrong")
        ordered = np.ones(len(self.roots), bool)
        ordered[seats[~terms.sorted[values]] // self.size] = False
        return self._made(depth, ordered, self._identical(seats, blocks, values), numbers)

    def _contributions(self) -> list[tuple[np.ndarray, range]]:
        """Return the seats whose results have the contributions of one range of ranks, and it."""
        function, size = self.contract.contributions, self.size
        return [] if function is None else cases(lambda rank: function(rank, size), self.ranks)

    def _expected(self) -> np.ndarray:
        """Return the mask of the ranks whose contributions each seat's results have, by word."""
        masks = np.zeros((len(self.terms.mask), self.seats), np.uint64)
        for seats, ranks in self._contributions():
            whole = (1 << ranks.stop) - (1 << ranks.start)
            for word, mask in enumerate(masks):
                mask[seats] = np.uint64(whole >> word * _WORD & (1 << _WORD) - 1)
        return masks

    def _identical(self, seats: np.ndarray, blocks: np.ndarray, values: np.ndarray) -> np.ndarray:
        """Return whether results of the same block and contributions have one hash, by proof."""
        identical = np.ones(len(self.roots), bool)
        kinds = np.zeros(self.seats, np.int64)  # of contributions
        for kind, (part, _) in enumerate(self._contributions()):
            kinds[part] = kind
        if self.contract.contributions is None:
            return identical
        proof = seats // self.size
        key = (kinds[seats] * len(self.roots) + proof) * self.count + blocks
        first = np.zeros(int(key.max(initial=0)) + 1, np.int64)
        first[key] = np.arange(len(key))  # any one of them
        hashes = self.terms.hash[values]
        identical[proof[hashes != hashes[first[key]]]] = False
        return identical

    def _made(
        self,
        depth: np.ndarray,
        ordered: np.ndarray,
        identical: np.ndarray,
        numbers: dict[str, np.ndarray],
    ) -> list[Proof]:
        numbers["written"] = self.written.reshape(self.seats, self.width).sum(axis=1)
        names = ("own", "messages", "blocks", "reductions", "written", "meetings", "reads")
        empty = np.zeros(self.seats, np.int64)
        columns = [
            numbers.get(name, empty).reshape(-1, self.size).tolist() for name in (*names, "stores")
        ]
        tree = True if self.judged else None
        single = self.at_once.tolist() if self.judged else [None] * len(self.roots)
        flags = (depth.tolist(), ordered.tolist(), identical.tolist(), single)
        rows = zip(self.roots.tolist(), *flags, *columns)
        return [
            Proof(
                collective=self.contract.name,
                size=self.size,
                root=root,
                block_count=self.count,
                rounds=max(own),
                depth=longest,
                messages=sum(messages),
                blocks_moved=sum(blocks),
                reductions=sum(reductions),
                sent=tuple(messages),
                blocks_sent=tuple(blocks),
                written=tuple(written),
                ordered=in_order,
                identical=same,
                meetings=max(meetings),
                blocks_read=sum(reads),
                blocks_stored=sum(stores),
                at_once=at_once,
                tree=tree,
            )
            for (
                root,
                longest,
                in_order,
                same,
                at_once,
                own,
                messages,
                blocks,
                reductions,
                written,
                meetings,
                reads,
                stores,
            ) in rows
        ]
