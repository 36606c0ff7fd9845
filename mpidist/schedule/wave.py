"""The wave: proofs of a schedule for many roots at once, by numpy, as the Python machine does them.

A *wave* runs the rounds of all ranks that have begun, in one go: what they send is read, messages
whose two ends have begun move, and rounds without further messages end; the rounds behind them are
the next wave.  That is the rule of :mod:`.machine`: a message moves when both ends are posted.

It only proves.  Where it finds anything wrong, or a schedule that it does not know, there is no
proof, and the machine says what is wrong, or proves it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from .beginning import cut
from .contract import Contract
from .machine import Proof
from .ranks import Unfit
from .registry import Algorithm, Groups
from .shared import shared_proofs
from .state import State
from .table import COPY, RECV, REDUCE, Form, Table, forms_of, ranged


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
    judged = algorithm.combines_as_tree(size, groups)
    try:
        if algorithm.memory is not None:
            if groups is not None and len(groups) > 1:
                return None
            found = shared_proofs(algorithm, size, roots, count, arity, pieces, judged)
        else:
            found = _by_messages(algorithm, size, roots, count, arity, groups, pieces, judged)
    except Exception:  # Unfit, and whatever a generator raises
        return None
    for claimed, name in ((algorithm.ordered, "ordered"), (algorithm.at_once, "at_once")):
        if claimed and not all(getattr(proof, name) for proof in found):
            return None
    return found


# Of the type of the array: with the 1 of Python, ``subtract.at`` takes 70 times as long.
_ONE = np.int32(1)
_FIGURES = ("own", "messages", "blocks", "reductions")  # of a table, by seat


def _by_messages(
    algorithm: Algorithm,
    size: int,
    roots: Sequence[int],
    count: int,
    arity: int,
    groups: Groups | None,
    pieces: int,
    judged: bool,
) -> list[Proof]:
    forms = forms_of(algorithm, size, roots, arity, groups, pieces)
    contract, numbers = algorithm.contract, np.asarray(roots)
    # Moving data is the same for every root, if ranks and blocks are renumbered: the end state too.
    # What is combined is not, since the lower rank has the left operand.
    alike = len(roots) > 1 and contract.rooted and not contract.reduces
    if alike and all(form.turns(size, numbers, count) for form in forms):
        forms = [first for form in forms if (first := form.of_first(size))]
        (proof,) = _proved(algorithm, forms, size, roots[:1], count, judged)
        return [_turned(proof, root) for root in roots]
    if len(roots) > 1 and contract.reduces and (parts := cut(forms, size, count)):
        return _proved(algorithm, parts[1], size, roots, count, judged, parts[0])
    return _proved(algorithm, forms, size, roots, count, judged)


def _turned(proof: Proof, root: int) -> Proof:
    """Return the proof of one root for another, with the figures of each rank in its place."""
    last = (proof.root - root) % proof.size

    def turned(figures: tuple[int, ...]) -> tuple[int, ...]:
        return figures[last:] + figures[:last]

    return replace(
        proof,
        root=root,
        sent=turned(proof.sent),
        blocks_sent=turned(proof.blocks_sent),
        written=turned(proof.written),
    )


def _proved(
    algorithm: Algorithm,
    forms: list[Form],
    size: int,
    roots: Sequence[int],
    count: int,
    judged: bool,
    beginning: Sequence[Form] = (),
) -> list[Proof]:
    """Return the proofs of forms; the forms `beginning` come before, for the first root."""
    scratch = max(form.scratch() for form in (*forms, *beginning))
    before = None
    for part, these in ((list(beginning), roots[:1]), (forms, roots)):
        if part:
            table = Table(part, size, size * len(these), count, scratch)
            if judged and table.mixed:
                raise Unfit("a copy among what a round combines")
            wave = _Wave(algorithm.contract, table, these, algorithm.equal_blocks)
            wave.judged = judged
            if before is not None:
                wave.follow(before)
            wave.run()
            before = wave
    return wave.proved()


class _Wave(State):
    """The state of all seats of a table, of which rounds are in progress."""

    def __init__(self, contract: Contract, table: Table, roots: Sequence[int], equal_blocks: bool):
        super().__init__(contract, table.size, roots, table.count, table.width, equal_blocks)
        self.table, self.written = table, table.written
        self.content = np.empty(len(table.read), np.int32)
        rounds = len(table.seat)
        self.clock = np.zeros(rounds, np.int32)  # at the beginning
        self.after = np.zeros(rounds, np.int32)  # at the end
        self.pending = table.sends[1] + table.receives[1]
        self.before = table.before.copy()
        self.posted = np.zeros((2, len(table.sender)), bool)  # sends, and their receives
        self.mark = np.zeros(max(len(self.memory), rounds), np.int64)
        self.stamp = 1

    def follow(self, before: _Wave) -> None:
        """Begin where a wave of one root has ended, which counts for every root."""
        table, first, times = self.table, before.table, len(self.roots)
        self.terms, self.at_once = before.terms, before.at_once & self.at_once
        self.memory[:] = np.tile(before.memory, times)
        self.written |= np.tile(before.written, times)
        last = first.following < 0
        clock = np.empty(self.size, np.int32)
        clock[first.seat[last]] = before.after[last]
        self.clock[table.first] = np.tile(clock, times)
        for name in _FIGURES:
            setattr(table, name, getattr(table, name) + np.tile(getattr(first, name), times))

    def run(self) -> None:
        """Run all seats to their ends."""
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

    def proved(self) -> list[Proof]:
        """Check the end state, and return the proofs by root."""
        table = self.table
        depth = np.zeros(len(self.roots), np.int32)
        np.maximum.at(depth, table.seat // self.size, self.after)
        return self.proofs(depth, **{name: getattr(table, name) for name in _FIGURES})

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
        self._check_clashes(front[table.crowded[front]])
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
        np.subtract.at(pending, both, _ONE)
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

    def _check_clashes(self, front: np.ndarray) -> None:
        """Raise Unfit if a receive of a round overwrites what another of its steps uses."""
        if not front.size:
            return
        table = self.table
        read = table.read[ranged(table, table.reads, front)]
        actions = ranged(table, table.actions, front)
        kind, cells = table.kind[actions], table.target[actions]
        received = cells[kind == RECV]
        if len(self._unique(received)) < len(received):
            raise Unfit("is received twice in one round")
        first = self.stamp - len(received)
        if (self.mark[read] >= first).any() or (self.mark[cells[kind == REDUCE]] >= first).any():
            raise Unfit("is used and overwritten in one round")

    def _end(self, ended: np.ndarray) -> None:
        """Apply what rounds have received, and their copies, in the order of their steps."""
        table = self.table
        actions = ranged(table, table.actions, ended)
        if self.judged:
            self._judge(actions[table.kind[actions] == REDUCE])
        order = table.order[actions]
        steps = [actions]
        if order.any():
            counts = np.bincount(order)
            short = order.astype(np.uint16) if len(counts) < 1 << 16 else order  # a radix sort
            steps = np.split(actions[np.argsort(short, kind="stable")], np.cumsum(counts)[:-1])
        for here in steps:
            kind = table.kind[here]
            for each in np.flatnonzero(np.bincount(kind, minlength=COPY + 1)):
                self._act(int(each), here[kind == each])

    def _judge(self, actions: np.ndarray) -> None:
        """Judge what rounds combine at once in each cell: what it has, and what is received."""
        if not actions.size or self.terms.idempotent:
            return
        table = self.table
        target = table.target[actions]
        cells = self._unique(target)
        group = np.arange(len(cells))
        self.mark[cells] = group + self.stamp
        seats = cells // self.width
        self.judge(
            np.concatenate([group, self.mark[target] - self.stamp]),
            np.concatenate([self.ranks[seats], table.peer[actions]]),
            np.concatenate([self.memory[cells], self.content[table.source[actions]]]),
            seats // self.size,
        )
        self.stamp += len(cells)

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
        if kind != REDUCE or self.transposed:
            self.check_lengths(target, values)
        memory[target] = values

    def _next(self, ended: np.ndarray) -> np.ndarray:
        """Return the rounds that begin, now that others have ended."""
        following = self.table.following[ended]
        going = following >= 0
        following, clock = following[going], self.after[ended[going]]
        if not self.table.strands:
            self.clock[following] = clock
            return following
        np.maximum.at(self.clock, following, clock)
        np.subtract.at(self.before, following, _ONE)
        return self._beside(self._unique(following[self.before[following] == 0]))
