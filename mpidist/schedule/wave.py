"""The wave: proofs of a schedule for many roots at once, by numpy, as the Python machine does them.

A *wave* runs the rounds of all ranks that have begun, in one go: what they send is read, messages
whose two ends have begun move, and rounds without further messages end; the rounds behind them are
the next wave.  That is the rule of :mod:`.machine`: a message moves when both ends are posted.

It only proves.  Where it finds anything wrong, or a schedule that it does not know, there is no
proof, and the machine says what is wrong, or proves it.

Values are numbers of *terms*, as in :mod:`.terms`.  Terms are equal if their hashes of 64 bits are;
so `Proof.identical` could be wrong with a probability of 2^-64 for each pair of terms, and nothing
else depends on hashes.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from .contract import Contract
from .machine import Proof
from .ranks import cases
from .registry import Algorithm, Groups
from .table import COPY, RECV, REDUCE, Table, Unfit, forms_of, ranged


def proofs(
    algorithm: Algorithm,
    size: int,
    roots: Sequence[int],
    arity: int = 2,
    groups: Groups | None = None,
    pieces: int = 1,
) -> list[Proof] | None:
    """Return the proofs of a schedule for each root, or None if not all of them are found.

    Parameters are those of :meth:`~mpidist.schedule.Algorithm.schedule`, but for the roots.
    """
    count = algorithm.block_count(size, groups=groups) * pieces
    try:
        forms = forms_of(algorithm, size, roots, arity, groups, pieces)
        table = Table(forms, size, size * len(roots), count)
        found = _Wave(algorithm.contract, table, roots, algorithm.equal_blocks).run()
    except Exception:  # Unfit, and whatever a generator raises
        return None
    return None if algorithm.ordered and not all(proof.ordered for proof in found) else found


_WORD = 64  # ranks in a word of a mask
_MIX = (np.uint64(0x9E3779B97F4A7C15), np.uint64(0xC2B2AE3D27D4EB4F), np.uint64(29))


def _mixed(left: np.ndarray, right: np.ndarray) -> np.ndarray:
    """Return the hash of a term of two terms with these hashes, in this order."""
    mixed = (left ^ (left >> _MIX[2])) * _MIX[0] + (right ^ (right >> _MIX[2])) * _MIX[1]
    return (mixed ^ (mixed >> _MIX[2])) * _MIX[0]


class _Terms:
    """Terms of contributions: block, mask of ranks, first and last rank, order, and hash."""

    def __init__(self, capacity: int, size: int, idempotent: bool):
        self.used, self.size, self.idempotent = 0, size, idempotent
        self.block = np.empty(capacity, np.int32)
        self.mask = np.zeros((-(-size // _WORD), capacity), np.uint64)
        self.low, self.high = np.empty((2, capacity), np.int32)
        self.sorted = np.ones(capacity, bool)
        self.hash = np.empty(capacity, np.uint64)

    def _new(self, count: int) -> slice:
        self.used += count
        return slice(self.used - count, self.used)

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

    def _set_hash(self, new: slice) -> None:
        """Give terms that are sets of ranks the hash of the set."""
        mixed = self.block[new].astype(np.uint64)
        for mask in self.mask:
            mixed = _mixed(mixed, mask[new])
        self.hash[new] = mixed


def _bit(ranks: np.ndarray) -> np.ndarray:
    return np.uint64(1) << (ranks % _WORD).astype(np.uint64)


class _Wave:
    """The state of all seats of a table, from the contract's start state on."""

    def __init__(self, contract: Contract, table: Table, roots: Sequence[int], equal_blocks: bool):
        self.contract, self.table, self.roots = contract, table, np.asarray(roots)
        size, count = table.size, table.count
        self.equal, self.transposed = equal_blocks, contract.name == "alltoall"
        self.ranks = np.tile(np.arange(size), len(roots))
        self.seat_roots = np.repeat(self.roots, size)
        cells = table.seats * table.width
        self.memory = np.full(cells, -1, np.int32)
        inputs = [
            (seats[:, None], blocks)
            for seats, blocks in self._ranges(contract.input_blocks)
            if blocks.size
        ]
        leaves = sum(np.broadcast(*item).size for item in inputs)
        combined = int((table.kind == REDUCE).sum())
        self.terms = _Terms(leaves + combined, size, contract.idempotent)
        first = 0 if contract.input_buffer == "in" else count
        for seats, blocks in inputs:
            seats, blocks = (a.ravel() for a in np.broadcast_arrays(seats, blocks))
            place = seats * table.width + first + blocks
            self.memory[place] = self.terms.leaves(self.ranks[seats], blocks)
        self.content = np.empty(len(table.read), np.int32)
        rounds = len(table.seat)
        self.clock = np.zeros(rounds, np.int32)  # at the beginning
        self.after = np.zeros(rounds, np.int32)  # at the end
        self.pending = table.sends[1] + table.receives[1]
        self.before = table.before.copy()
        self.posted = np.zeros((2, len(table.sender)), bool)  # sends, and their receives
        self.mark = np.zeros(max(cells, rounds), np.int64)
        self.stamp = 1

    def _ranges(self, function: Any) -> list[tuple[np.ndarray, np.ndarray]]:
        """Return the seats with one range of blocks by a contract, and the range as an array."""
        size, count = self.table.size, self.table.count
        found = cases(
            lambda rank, root: function(rank, size, root, count), self.ranks, self.seat_roots
        )
        return [(seats, np.arange(blocks.start, blocks.stop)) for seats, blocks in found]

    def run(self) -> list[Proof]:
        """Run all seats to their ends, check the end state, and return the proofs by root."""
        table = self.table
        front = self._beside(table.first)
        done = 0
        while front.size:
            ended = self._begin(front)
            done += len(ended)
            self._end(ended)
            front = self._next(ended)
        if done < len(table.seat):
            raise Unfit("a deadlock")
        return self._proofs()

    def _beside(self, rounds: np.ndarray) -> np.ndarray:
        """Return rounds with the first rounds of the strands beside those that they begin."""
        if not self.table.strands:
            return rounds
        found, more = [rounds], rounds
        while more.size:
            others = self.table.beside[more]
            self.clock[others[others >= 0]] = self.clock[more[others >= 0]]
            more = others[others >= 0]
            found.append(more)
        return np.concatenate(found)

    def _begin(self, front: np.ndarray) -> np.ndarray:
        """Post the messages of rounds, and move those that can; return the rounds that end."""
        table, posted, pending = self.table, self.posted, self.pending
        reads = ranged(table, table.reads, front)
        cells = table.read[reads]
        values = self.memory[cells]
        if (values < 0).any():
            raise Unfit("reads where nothing was written")
        self.content[reads] = values
        self._check_clashes(front, cells)
        self.after[front] = self.clock[front]
        received = table.received[ranged(table, table.receives, front)]
        sent = ranged(table, table.sends, front)
        posted[1, received] = True
        moved = received[posted[0, received]]
        posted[0, sent] = True
        moved = np.concatenate([moved, sent[posted[1, sent]]])
        if not moved.size:
            return front[pending[front] == 0]
        sender, receiver = table.sender[moved], table.receiver[moved]
        arrival = np.maximum(self.clock[sender], self.clock[receiver]) + 1
        both = np.concatenate([sender, receiver])
        np.maximum.at(self.after, both, np.concatenate([arrival, arrival]))
        np.subtract.at(pending, both, 1)
        ended = self._unique(both[pending[both] == 0])
        empty = front[table.sends[1][front] + table.receives[1][front] == 0]
        return np.concatenate([ended, empty]) if empty.size else ended

    def _unique(self, items: np.ndarray) -> np.ndarray:
        """Return each of these indices once."""
        here = np.arange(len(items))
        self.mark[items] = here + self.stamp
        once = self.mark[items] == here + self.stamp
        self.stamp += len(items)
        return items[once]

    def _check_clashes(self, front: np.ndarray, read: np.ndarray) -> None:
        """Raise Unfit if a receive of a round overwrites what another of its steps uses."""
        table = self.table
        actions = ranged(table, table.actions, front)
        kind, cells = table.kind[actions], table.target[actions]
        received = cells[kind == RECV]
        if not received.size:
            return
        if len(self._unique(received)) < len(received):
            raise Unfit("is received twice in one round")
        first = self.stamp - len(received)
        if (self.mark[read] >= first).any() or (self.mark[cells[kind == REDUCE]] >= first).any():
            raise Unfit("is used and overwritten in one round")

    def _end(self, ended: np.ndarray) -> None:
        """Apply what rounds have received, and their copies, in the order of their steps."""
        table = self.table
        actions = ranged(table, table.actions, ended)
        order = table.order[actions]
        last = int(order.max(initial=0))
        for step in range(last + 1):
            here = actions[order == step] if last else actions
            kind = table.kind[here]
            for each in np.flatnonzero(np.bincount(kind, minlength=COPY + 1)):
                self._act(int(each), here[kind == each])

    def _act(self, kind: int, actions: np.ndarray) -> None:
        table, memory = self.table, self.memory
        target, source = table.target[actions], table.source[actions]
        values = memory[source] if kind == COPY else self.content[source]
        if kind == REDUCE:
            own, left = memory[target], table.left[actions]
            if (own < 0).any():
                raise Unfit("reduces where nothing was written")
            values = self.terms.combine(np.where(left, values, own), np.where(left, own, values))
        elif kind == COPY and (values < 0).any():
            raise Unfit("copies where nothing was written")
        if not self.equal and (kind != REDUCE or self.transposed):
            self._check_lengths(target, values)
        memory[target] = values

    def _check_lengths(self, target: np.ndarray, values: np.ndarray) -> None:
        """Raise Unfit if a block could be longer or shorter than the place that it gets."""
        table, terms = self.table, self.terms
        place = target % table.width - table.count
        place = np.where(place < table.count, place, place - table.count)  # in "tmp"
        block, rank = terms.block[values], terms.low[values]
        if self.transposed:
            each = table.count // table.size
            own = target // table.width % table.size
            fits = (place // each == rank) & (own * each + place % each == block)
        else:
            fits = place == block
        if not fits.all():
            raise Unfit("gets a block that may differ in length")

    def _next(self, ended: np.ndarray) -> np.ndarray:
        """Return the rounds that begin, now that others have ended."""
        following = self.table.following[ended]
        going = following >= 0
        following, clock = following[going], self.after[ended[going]]
        if not self.table.strands:
            self.clock[following] = clock
            return following
        np.maximum.at(self.clock, following, clock)
        np.subtract.at(self.before, following, 1)
        return self._beside(self._unique(following[self.before[following] == 0]))

    # -- the end --------------------------------------------------------------------------------

    def _proofs(self) -> list[Proof]:
        table, contract, terms = self.table, self.contract, self.terms
        size, count, proofs = table.size, table.count, len(self.roots)
        out = self.memory.reshape(table.seats, table.width)[:, count : 2 * count]
        expected = self._expected()
        ordered = np.ones(proofs, bool)
        hashes = np.zeros((table.seats, count), np.uint64)
        results = np.zeros(hashes.shape, bool)
        for seats, blocks in self._ranges(contract.output_blocks):
            if not blocks.size:
                continue
            values = out[seats[:, None], blocks]
            if (values < 0).any():
                raise Unfit("a result is never written")
            if contract.origin is not None:
                self._check_origin(seats, blocks, values)
                continue
            wrong = terms.block[values] != blocks
            for mask, wanted in zip(terms.mask, expected):
                wrong |= mask[values] != wanted[seats][:, None]
            if wrong.any():
                raise Unfit("a result is wrong")
            np.logical_and.at(ordered, seats // size, terms.sorted[values].all(axis=1))
            hashes[seats[:, None], blocks] = terms.hash[values]
            results[seats[:, None], blocks] = True
        identical = self._identical(hashes, results)
        depth = np.zeros(proofs, np.int64)
        np.maximum.at(depth, table.seat // size, self.after)
        return self._made(depth, ordered, identical)

    def _contributions(self) -> list[tuple[np.ndarray, range]]:
        """Return the seats whose results have the contributions of one range of ranks, and it."""
        function, size = self.contract.contributions, self.table.size
        return [] if function is None else cases(lambda rank: function(rank, size), self.ranks)

    def _expected(self) -> np.ndarray:
        """Return the mask of the ranks whose contributions each seat's results have, by word."""
        masks = np.zeros((len(self.terms.mask), self.table.seats), np.uint64)
        for seats, ranks in self._contributions():
            whole = (1 << ranks.stop) - (1 << ranks.start)
            for word, mask in enumerate(masks):
                mask[seats] = np.uint64(whole >> word * _WORD & (1 << _WORD) - 1)
        return masks

    def _check_origin(self, seats: np.ndarray, blocks: np.ndarray, values: np.ndarray) -> None:
        table, contract, terms = self.table, self.contract, self.terms
        assert contract.origin is not None
        ranks, roots = self.ranks[seats][:, None], self.seat_roots[seats][:, None]
        origin, block = contract.origin(ranks, blocks, table.size, roots, table.count)  # type: ignore[arg-type]
        wrong = (terms.low[values] != origin) | (terms.high[values] != origin)
        if wrong.any() or (terms.block[values] != block).any():
            raise Unfit("a result is of another rank or block")

    def _identical(self, hashes: np.ndarray, results: np.ndarray) -> np.ndarray:
        """Return whether the results of the same contributions have one hash, by proof.

        `results` tells which blocks of each seat are results.
        """
        table = self.table
        identical = np.ones(len(self.roots), bool)
        for seats, _ in self._contributions():
            if len(seats) <= len(self.roots):  # one in each proof, or none
                continue
            shape = len(self.roots), table.count
            least, most = np.full(shape, np.iinfo(np.uint64).max), np.zeros(shape, np.uint64)
            proof, known, found = seats // table.size, results[seats], hashes[seats]
            np.minimum.at(least, proof, np.where(known, found, least.max()))
            np.maximum.at(most, proof, np.where(known, found, 0).astype(np.uint64))
            identical &= (least >= most).all(axis=1)
        return identical

    def _made(self, depth: np.ndarray, ordered: np.ndarray, identical: np.ndarray) -> list[Proof]:
        table, size = self.table, self.table.size

        def by_proof(array: np.ndarray) -> list[Any]:
            return array.reshape(-1, size).tolist()

        written = table.written.reshape(table.seats, table.width).sum(axis=1)
        rows = zip(
            self.roots.tolist(),
            *map(by_proof, (table.own, table.messages, table.blocks, table.reductions, written)),
            *(array.tolist() for array in (depth, ordered, identical)),
        )
        return [
            Proof(
                collective=self.contract.name,
                size=size,
                root=root,
                block_count=table.count,
                rounds=max(own),
                depth=longest,
                messages=sum(messages),
                blocks_moved=sum(blocks),
                reductions=sum(reductions),
                sent=tuple(messages),
                blocks_sent=tuple(blocks),
                written=tuple(places),
                ordered=in_order,
                identical=same,
            )
            for root, own, messages, blocks, reductions, places, longest, in_order, same in rows
        ]
