"""The wave: proofs of a schedule for many roots at once, by numpy, as the Python machine does them.

A *wave* is a step of all ranks: what the rounds that begin in it send is read, and what has arrived
for the rounds that end in it is stored or combined.  When a round begins and ends does not depend
on data, so it is known before (:meth:`.Table.times`), by the rule of :mod:`.machine`: a message
moves when both ends are posted.

It only proves.  Where it finds anything wrong, or a schedule that it does not know, there is no
proof, and the machine says what is wrong, or proves it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import chain, islice, pairwise

import numpy as np

from .beginning import cut
from .contract import Contract
from .machine import Proof
from .ranks import Unfit
from .registry import Algorithm, Groups
from .shared import shared_proofs
from .state import State
from .table import COPY, RECV, REDUCE, Form, Table, between, forms_of, join, turning


@dataclass(frozen=True)
class Given:
    """Parameters of a schedule, but for its algorithm and number of ranks, for several roots.

    No more than `few` roots run at once, unless they share what they do.
    """

    roots: tuple[int, ...]
    arity: int = 2
    groups: Groups | None = None
    pieces: int = 1
    few: int = 1 << 30


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
    found = proofs_of(algorithm, size, [Given(tuple(roots), arity, groups, pieces)])
    return None if found is None else found[0]


def proofs_of(
    algorithm: Algorithm, size: int, several: Sequence[Given]
) -> list[list[Proof]] | None:
    """Return the proofs for each of several parameters by root, or None if not all are found.

    They run together, as if they were roots.
    """
    try:
        if algorithm.memory is not None:
            if any(given.groups is not None and len(given.groups) > 1 for given in several):
                return None
            found = [_in_memory(algorithm, size, given) for given in several]
        else:
            found = _by_messages(algorithm, size, several)
    except Exception:  # Unfit, and whatever a generator raises
        return None
    for claimed, name in ((algorithm.ordered, "ordered"), (algorithm.at_once, "at_once")):
        if claimed and not all(getattr(proof, name) for proof in chain(*found)):
            return None
    return found


def _in_memory(algorithm: Algorithm, size: int, given: Given) -> list[Proof]:
    count = algorithm.block_count(size, groups=given.groups) * given.pieces
    judged = algorithm.combines_as_tree(size, given.groups)
    return shared_proofs(algorithm, size, given.roots, count, given.arity, given.pieces, judged)


_LARGE = 1 << 16  # peers and blocks of a schedule for all its roots, below which joining is better
_FIGURES = ("own", "messages", "blocks", "reductions")  # of a table, by seat


def _by_messages(algorithm: Algorithm, size: int, several: Sequence[Given]) -> list[list[Proof]]:
    contract = algorithm.contract
    found: list[list[Proof]] = [[] for _ in several]
    strands: dict[tuple[int, ...], int] = {}
    # By the number of blocks, and whether all is judged: what runs together.
    joined: dict[tuple[int, bool], list[tuple[int, list[Form], tuple[int, ...]]]] = {}
    for k, given in enumerate(several):
        groups = given.groups
        count = algorithm.block_count(size, groups=groups) * given.pieces
        judged = algorithm.combines_as_tree(size, groups)
        forms, roots = _forms(algorithm, size, given, count, strands)
        if len(roots) > given.few or sum(form.numbers.size for form in forms) > _LARGE:
            parts = cut(forms, size, count) if len(roots) > 1 and contract.reduces else None
            if parts:
                found[k] = _proved(algorithm, parts[1], size, roots, count, judged, parts[0])
                continue
            for i in range(0, len(roots), given.few) if len(roots) > given.few else ():
                some = roots[i : i + given.few]
                part = between(forms, i * size, (i + len(some)) * size)
                found[k] += _proved(algorithm, part, size, some, count, judged)
            if found[k]:
                continue
        joined.setdefault((count, judged), []).append((k, forms, roots))
    for (count, judged), them in joined.items():
        every = [root for _, _, roots in them for root in roots]
        forms = join([(forms, size * len(roots)) for _, forms, roots in them])
        made = iter(_proved(algorithm, forms, size, every, count, judged))
        for k, _, roots in them:
            found[k] += islice(made, len(roots))
            if len(roots) < len(several[k].roots):
                found[k] = [_turned(found[k][0], root) for root in several[k].roots]
    return found


def _forms(
    algorithm: Algorithm, size: int, given: Given, count: int, strands: dict[tuple[int, ...], int]
) -> tuple[list[Form], tuple[int, ...]]:
    """Return the forms of some roots, and these: the first one if it stands for all of them."""
    contract, roots, groups = algorithm.contract, given.roots, given.groups
    # Moving data is the same for every root, if ranks and blocks are renumbered: the end state
    # too.  What is combined is not, since the lower rank has the left operand.
    alike = len(roots) > 1 and contract.rooted and not contract.reduces
    if alike and "groups" not in algorithm.uses:
        try:
            turned = turning(algorithm, size, roots[0], given.arity, given.pieces, strands)
            return turned, roots[:1]
        except Exception:  # Unfit, or what the generator cannot do with such ranks
            pass
    forms = forms_of(algorithm, size, roots, given.arity, groups, given.pieces, strands)
    if alike and all(form.turns(size, np.asarray(roots), count) for form in forms):
        return [first for form in forms if (first := form.of_first(size))], roots[:1]
    return forms, roots


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
    before: _Wave | None = None
    for part, these in ((list(beginning), roots[:1]), (forms, roots)):
        if part:
            table = Table(part, size, size * len(these), count, scratch)
            if judged and table.mixed:
                raise Unfit("a copy among what a round combines")
            before = _Wave(algorithm.contract, table, these, algorithm.equal_blocks, before)
            before.judged = judged
            before.run()
    assert before is not None
    return before.proved()


class _Wave(State):
    """The state of all seats of a table; its rounds are done step by step, at all seats at once."""

    def __init__(
        self,
        contract: Contract,
        table: Table,
        roots: Sequence[int],
        equal_blocks: bool,
        before: _Wave | None = None,
    ):
        """Begin where the wave `before` of one root has ended, which counts for every root."""
        size, count, width = table.size, table.count, table.width
        super().__init__(contract, size, roots, count, width, equal_blocks, before=before)
        self.table = table
        self.written |= table.written
        self.content = np.empty(len(table.read), np.int32)  # of messages, block by block
        self.start = np.zeros(self.seats, np.int64)  # clocks
        self.mark = np.zeros(len(self.memory), np.int64)
        self.stamp = 1
        if before is not None:
            self.start[:] = np.tile(before.clocks(), len(roots))
            for name in _FIGURES:
                figures = np.tile(getattr(before.table, name), len(roots))
                setattr(table, name, getattr(table, name) + figures)

    def clocks(self) -> np.ndarray:
        """Return the clock of each seat at its end."""
        table, clocks = self.table, self.start.copy()
        end = table.times(self.start)[1]
        np.maximum.at(clocks, table.seat, end + table.takes_time)
        return clocks

    def proved(self) -> list[Proof]:
        """Check the end state, and return the proofs by root."""
        depth = self.clocks().reshape(-1, self.size).max(axis=1)
        return self.proofs(depth, **{name: getattr(self.table, name) for name in _FIGURES})

    def run(self) -> None:
        """Run all seats to their ends."""
        table = self.table
        begin, end = table.steps
        self.terms.reserve(int(np.count_nonzero(table.kind == REDUCE)))
        if table.crowded.any():
            self._check_clashes(begin)
        reads = _sorted(begin[table.read_round])
        actions = self._in_order(end)
        bounds = _bounds(begin[table.read_round[reads]], int(end.max(initial=0)) + 1)
        steps = self._steps(actions, end)
        cells = table.read[reads]
        copies: list[tuple[np.ndarray, np.ndarray]] = []
        for step, (first, stop) in enumerate(zip(bounds, bounds[1:])):
            if first < stop:
                self.content[reads[first:stop]] = self.memory[cells[first:stop]]
            combined = [here for kind, here in steps.get(step, ()) if kind == REDUCE]
            if combined and self.judged and not self.terms.idempotent:
                self._judge(np.concatenate(combined))
            for kind, here in steps.get(step, ()):
                if kind == COPY:
                    copies.append(self._copy(here))
                else:
                    self._act(kind, here)
        if self.content.min(initial=0) < 0:
            raise Unfit("reads where nothing was written")
        received = np.flatnonzero(table.kind < (COPY if self.transposed else REDUCE))
        copies.append((table.target[received], self.content[table.source[received]]))
        for target, values in copies:
            self.check_lengths(target, values)

    def _in_order(self, end: np.ndarray) -> np.ndarray:
        """Return the actions in the order in which they are done."""
        table = self.table
        orders = int(table.order.max(initial=0)) + 1
        sub = table.order * np.int32(COPY + 1) + table.kind
        if (int(end.max(initial=0)) + 1) * orders * (COPY + 1) < 1 << 16:
            return _sorted(end[table.action_round] * (orders * (COPY + 1)) + sub)
        actions = _sorted(sub)
        return actions[_sorted(end[table.action_round[actions]])]

    def _steps(
        self, actions: np.ndarray, end: np.ndarray
    ) -> dict[int, list[tuple[int, np.ndarray]]]:
        """Return by step the kinds and the actions that are done at once, in their order."""
        table = self.table
        steps: dict[int, list[tuple[int, np.ndarray]]] = {}
        if not actions.size:
            return steps
        when, order, kind = (
            column[actions] for column in (end[table.action_round], table.order, table.kind)
        )
        new = (np.diff(when) != 0) | (np.diff(order) != 0) | (np.diff(kind) != 0)
        bounds = [0, *(np.flatnonzero(new) + 1).tolist(), len(actions)]
        firsts = np.array(bounds[:-1])
        for first, stop, step, what in zip(
            bounds, bounds[1:], when[firsts].tolist(), kind[firsts].tolist()
        ):
            steps.setdefault(step, []).append((what, actions[first:stop]))
        return steps

    def _unique(self, items: np.ndarray) -> np.ndarray:
        """Return each of these cells once."""
        here = np.arange(len(items))
        self.mark[items] = here + self.stamp
        once = self.mark[items] == here + self.stamp
        self.stamp += len(items)
        return items[once]

    def _check_clashes(self, begin: np.ndarray) -> None:
        """Raise Unfit if a receive of a round overwrites what another of its steps uses."""
        table, last = self.table, int(begin.max()) + 1
        reads = np.flatnonzero(table.crowded[table.read_round])
        reads = reads[_sorted(begin[table.read_round[reads]])]
        actions = np.flatnonzero(table.crowded[table.action_round])
        actions = actions[_sorted(begin[table.action_round[actions]])]
        bounds = zip(
            _bounds(begin[table.read_round[reads]], last),
            _bounds(begin[table.action_round[actions]], last),
        )
        cells, target, kind = table.read[reads], table.target[actions], table.kind[actions]
        for (first, begins), (stop, ends) in pairwise(bounds):
            if begins == ends:
                continue
            here, what = target[begins:ends], kind[begins:ends]
            received = here[what == RECV]
            if len(self._unique(received)) < len(received):
                raise Unfit("is received twice in one round")
            since = self.stamp - len(received)
            used = cells[first:stop]
            if (self.mark[used] >= since).any() or (self.mark[here[what == REDUCE]] >= since).any():
                raise Unfit("is used and overwritten in one round")

    def _judge(self, actions: np.ndarray) -> None:
        """Judge what rounds combine at once in each cell: what it has, and what is received."""
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
        """Store or combine what has been received."""
        table, memory = self.table, self.memory
        target, values = table.target[actions], self.content[table.source[actions]]
        if kind == REDUCE:
            own, left = memory[target], table.left[actions]
            if own.min() < 0 or values.min() < 0:
                raise Unfit("reduces where nothing was written")
            values = self.terms.combine(np.where(left, values, own), np.where(left, own, values))
        memory[target] = values

    def _copy(self, actions: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Copy blocks; return where to, and what."""
        target, values = self.table.target[actions], self.memory[self.table.source[actions]]
        if values.min() < 0:
            raise Unfit("copies where nothing was written")
        self.memory[target] = values
        return target, values


def _sorted(keys: np.ndarray) -> np.ndarray:
    """Return the indices that sort keys, in which equal ones keep their order."""
    if (keys[1:] >= keys[:-1]).all():
        return np.arange(len(keys))
    short = keys.astype(np.uint16) if keys.max() < 1 << 16 else keys  # a radix sort
    return np.argsort(short, kind="stable")


def _bounds(keys: np.ndarray, last: int) -> list[int]:
    """Return where each of the numbers up to `last` begins among sorted keys."""
    return np.searchsorted(keys, np.arange(last + 1)).tolist()
