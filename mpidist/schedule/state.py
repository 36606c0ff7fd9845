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
        # A term is a row of each: what is combined is read at once.
        self._figures = np.empty((capacity, 4), np.int32)
        self._words = np.zeros((capacity, -(-size // _WORD) + 1), np.uint64)
        self._name()

    def _name(self) -> None:
        self.block, self.low, self.high, self.sorted = self._figures.T
        self.mask, self.hash = self._words.T[:-1], self._words.T[-1]

    def reserve(self, count: int) -> None:
        """Make room for so many new terms."""
        more = self.used + count - len(self.block)
        if more <= 0:
            return
        figures, words = self._figures, self._words
        self._figures = np.concatenate([figures, np.empty((more, 4), np.int32)])
        self._words = np.concatenate([words, np.zeros((more, words.shape[1]), np.uint64)])
        self._name()

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
        once, like = self._alike(peers, values)
        if once is not None:
            return self.fold(peers[:, once], values[:, once])[like]
        new = self._new(values.shape[1])
        first = values[0]
        block = self.block[first]
        if self.idempotent or (self.block[values] != block).any():
            raise Unfit("combines different blocks")
        for mask in self.mask:
            every = mask[values]
            union = np.bitwise_or.accumulate(every)
            if (union[:-1] & every[1:]).any():
                raise Unfit("counts a contribution twice")
            mask[new] = union[-1]
        low, high, in_order = self.low[first], self.high[first], self.sorted[values].all(axis=0)
        several = zip(peers[1:] < peers[0], self.low[values[1:]], self.high[values[1:]])
        for left, least, most in several:
            in_order &= np.where(left, most < low, high < least)
            low, high = np.where(left, least, low), np.where(left, high, most)
        place = np.arange(len(values), dtype=np.uint64)[:, None]
        mixed = _mixed(_mixed(self.hash[values], peers.astype(np.uint64)), place).sum(axis=0)
        self.block[new], self.low[new], self.high[new] = block, low, high
        self.sorted[new], self.hash[new] = in_order, mixed
        return np.arange(new.start, new.stop)

    def _alike(self, peers: np.ndarray, values: np.ndarray) -> tuple[Any, np.ndarray]:
        """Return some columns, and for each column the index of the equal one among these.

        None in place of the columns if they are more than half of all.
        """
        columns, place = np.arange(values.shape[1]), np.empty(self.used, np.intp)
        place[values[0]] = columns
        like = place[values[0]]
        once = np.flatnonzero(like == columns)
        alike = 2 * len(once) <= len(columns) and all(
            (row == row[like]).all() for rows in (values, peers) for row in rows
        )
        place[values[0][once]] = np.arange(len(once))
        return (once if alike else None), place[values[0]]

    def leaves(self, ranks: np.ndarray, blocks: np.ndarray) -> np.ndarray:
        """Return new terms: the contributions of `ranks` to `blocks`."""
        new = self._new(len(ranks))
        self.block[new], self.low[new], self.high[new] = blocks, ranks, ranks
        self.sorted[new] = 1
        self.mask[ranks // _WORD, np.arange(new.start, new.stop)] = _bit(ranks)
        key = (ranks * np.int64(1 << 32) + blocks).astype(np.uint64)
        self.hash[new] = _mixed(key, ~key)
        if self.idempotent:
            self._set_hash(new)
        return np.arange(new.start, new.stop)

    def combine(self, left: np.ndarray, right: np.ndarray) -> np.ndarray:
        """Return the terms of ``op(left, right)``, element by element."""
        new = self._new(len(left))
        one, other = (self._figures.take(terms, axis=0) for terms in (left, right))
        if (one[:, 0] != other[:, 0]).any():
            raise Unfit("combines different blocks")
        here, there = (self._words.take(terms, axis=0) for terms in (left, right))
        words = here | there
        if self.idempotent:
            self._words[new] = words
            self._figures[new] = one
            self.low[new] = self.high[new] = 0
            self._set_hash(new)
            return np.arange(new.start, new.stop)
        if (here & there)[:, :-1].any():
            raise Unfit("counts a contribution twice")
        words[:, -1] = _mixed(here[:, -1], there[:, -1])
        self._words[new] = words
        one[:, 3] &= other[:, 3] & (one[:, 2] < other[:, 1])
        one[:, 2] = other[:, 2]
        self._figures[new] = one
        return np.arange(new.start, new.stop)

    def union(self, values: np.ndarray) -> np.ndarray:
        """Return the terms of the sets in each column of `values` together; for idempotent ones."""
        block = self.block[values]
        if (block != block[0]).any():
            raise Unfit("combines different blocks")
        new = self._new(values.shape[1])
        self.block[new], self.low[new], self.high[new], self.sorted[new] = block[0], 0, 0, 1
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
        ordered[seats[terms.sorted[values] == 0] // self.size] = False
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
