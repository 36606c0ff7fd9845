"""Fast proofs of schedules in shared memory, for many roots at once, by numpy.

All ranks of a schedule come to the same meetings, and between two of them is a *phase*.  What a
rank does in a phase is before what another one does in a later phase, if that one has awaited it at
a meeting in between.  So it is enough to run phase by phase, and to check of every two accesses to
a cell, one of them a write, that one is before the other::

    phase 0        meeting 1    phase 1             meeting 2     phase 2
    copy to slot   of all       read others' slots  of all        …

Where every meeting is of all, awaiting all, two accesses in different phases are in order.  So only
what is read in the phase in which it is written is looked at one by one.

It is stricter than :mod:`.races`: what a rank has heard through a third one does not count.  It
knows meetings of all ranks of one node, and no messages; the Python machine proves the rest.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import chain
from typing import Any

import numpy as np

from .machine import Proof
from .memories import Memory
from .ranks import Ranks, Unfit, cases
from .registry import Algorithm
from .rounds import Blocks, Copy, Fold, Get, Meet, Put, Step, block_tuple
from .state import State
from .unrolled import Strands, materialise

_WRITES = 4  # most writes to one cell
_MANY = 100_000  # accesses that are checked at once
_CASES = 24  # beyond, the Python machine is as fast


@dataclass(slots=True)
class Access:
    """Accesses of one step: a row of cells for each block, a column for each seat.

    Of several steps, all five are arrays of one element for each access.
    """

    cells: np.ndarray
    seats: np.ndarray
    phase: Any
    round: Any
    step: Any
    inside: bool = False  # whether there are cells of "in"
    certain: bool = False  # whether it is within the calls of the owners


def _joined(accesses: Iterable[Access]) -> Iterator[Access]:
    """Yield accesses of several steps together, as many as a cache holds."""
    batch: list[Access] = []
    total = 0
    for access in accesses:
        batch.append(access)
        total += access.cells.size
        if total > _MANY:
            yield _join(batch)
            batch, total = [], 0
    if batch:
        yield _join(batch)


def _join(batch: list[Access]) -> Access:
    lengths = [each.cells.size for each in batch]
    return Access(
        np.concatenate([each.cells.ravel() for each in batch]),
        np.concatenate([np.broadcast_to(e.seats, e.cells.shape).ravel() for e in batch]),
        np.repeat([each.phase for each in batch], lengths),
        np.repeat([each.round for each in batch], lengths),
        np.concatenate([np.broadcast_to(e.step, e.cells.shape).ravel() for e in batch]),
    )


@dataclass(slots=True)
class Part:
    """The seats with one case of rounds, and the rounds by phase."""

    seats: np.ndarray
    phases: list[list[tuple[Step, ...]]]
    meetings: list[Meet]
    rounds: int = 0  # so far; a copy apart from others counts as one


def shared_proofs(
    algorithm: Algorithm,
    size: int,
    roots: Sequence[int],
    count: int,
    arity: int,
    pieces: int,
    judged: bool,
) -> list[Proof]:
    """Return the proofs of a schedule in memory of one node, for each root.

    If `judged`, it combines as the fixed tree.  Raises Unfit, or what the generator raises, if not
    all of them are found.
    """

    def written(rank: Any, root: Any) -> Any:
        return materialise(algorithm.schedule(rank, size, root, arity, None, pieces))

    ranks = np.tile(np.arange(size), len(roots))
    found = cases(written, ranks, np.repeat(np.asarray(roots), size), limit=_CASES)
    parts = []
    for seats, rounds in found:
        part = Part(seats, [[]], [])
        for item in rounds:
            if isinstance(item, Strands):
                raise Unfit("strands in shared memory")
            if len(item) == 1 and isinstance(item[0], Meet):
                part.meetings.append(item[0])
                part.phases.append([])
            else:
                part.phases[-1].append(item)
        parts.append(part)
    shared = _Shared(algorithm, size, roots, count)
    shared.judged = judged
    return shared.run(parts)


class _Shared(State):
    """The cells of all seats, and the accesses to them."""

    def __init__(self, algorithm: Algorithm, size: int, roots: Sequence[int], count: int):
        contract, memory = algorithm.contract, algorithm.memory
        assert memory is not None
        if memory.kernels:
            raise Unfit("input apart from the output")
        self.reach: Memory = memory
        buffers = memory.buffers
        width = len(buffers) * count
        super().__init__(contract, size, roots, count, width, algorithm.equal_blocks, reached=True)
        self.offset = {name: k * count for k, name in enumerate(buffers)}
        self.clock, self.own = np.zeros((2, self.seats), np.int64)
        self.reductions, self.stores, self.reads = np.zeros((3, self.seats), np.int64)
        self.known = [np.zeros((self.seats, size), np.int16)]  # by phase: the last meeting awaited
        self.read: list[Access] = []  # that are to be checked
        self.stored: list[Access] = []  # in other ranks' cells, that are to be checked
        self.latest = np.full(len(self.memory), -1, np.int16)  # phase of the last write to a cell
        cells = len(self.memory)
        self.writes = np.zeros(cells, np.int8)
        self.writer = np.full((_WRITES, cells), -1, np.int32)
        self.when = np.zeros((3, _WRITES, cells), np.int16)  # phase, round, step
        self.same = np.zeros((_WRITES, cells), bool)  # the block that "in" has in place

    def run(self, parts: list[Part]) -> list[Proof]:
        """Run all phases, check the accesses and the end state, and return the proofs."""
        meetings = {len(part.meetings) for part in parts}
        if len(meetings) > 1:
            raise Unfit("more meetings of some ranks")
        self.last = meetings.pop()
        self.plain = all(step.awaits is None for part in parts for step in part.meetings)
        together = False
        for phase in range(self.last + 1):
            if phase:
                together = self._meet(phase, parts) or together
            so_far = len(self.read)
            for part in parts:
                for steps in part.phases[phase]:
                    self._round(part, phase, steps)
            if self.plain:
                self.read[so_far:] = filter(None, map(self._doubtful, self.read[so_far:]))
        self._check(together)
        depth = self.clock.reshape(-1, self.size).max(axis=1)
        return self.proofs(
            depth,
            own=self.own,
            reductions=self.reductions,
            meetings=np.full(self.seats, len(parts[0].meetings)),
            reads=self.reads,
            stores=self.stores,
        )

    def _meet(self, phase: int, parts: list[Part]) -> bool:
        """Let all seats meet before a phase; return whether all await all."""
        known, clock = self.known[-1].copy(), self.clock.reshape(-1, self.size)
        everyone, together = tuple(range(self.size)), True
        after = np.empty_like(self.clock)
        for part in parts:
            step, seats = part.meetings[phase - 1], part.seats
            if step.group != range(self.size) and tuple(step.group) != everyone:
                raise Unfit("a meeting of some ranks")
            self.own[seats] += 1
            proof = seats // self.size
            if step.awaits is None:
                known[seats] = phase
                after[seats] = np.maximum(self.clock[seats], clock[proof].max(axis=1)) + 1
                continue
            together = False
            after[seats] = self.clock[seats]
            for rank in _rows(step.awaits, len(seats)):
                if (rank < 0).any() or (rank >= self.size).any():
                    raise Unfit("a rank that does not exist")
                known[seats, rank] = phase
                after[seats] = np.maximum(after[seats], clock[proof, rank])
            after[seats] += 1
        self.known.append(known)
        self.clock = after
        if self.contract.idempotent:
            if not together:
                raise Unfit("what ranks learn in a meeting of which they await some")
            self._learn()
        return together

    def _learn(self) -> None:
        """Let all ranks of a barrier know what any of them knows."""
        out = slice(self.offset["out"], self.offset["out"] + self.count)
        cells = self.memory.reshape(-1, self.size, self.width)[:, :, out]
        if (cells < 0).any():
            raise Unfit("reads where nothing was written")
        known = np.moveaxis(cells, 1, 0).reshape(self.size, -1)
        cells[:] = self.terms.union(known).reshape(-1, 1, self.count)

    # -- accesses -------------------------------------------------------------------------------

    def _round(self, part: Part, phase: int, steps: tuple[Step, ...]) -> None:
        """Do a round of a part: all its reads, then all its writes."""
        self.own[part.seats] += 1
        if any(isinstance(step, (Get, Put, Fold)) for step in steps):
            self.clock[part.seats] += 1
            self._perform(part, phase, steps)
        else:
            for step in steps:  # copies alone are done one after the other
                self._perform(part, phase, (step,))

    def _perform(self, part: Part, phase: int, steps: tuple[Step, ...]) -> None:
        seats = part.seats
        part.rounds += 1
        writes: list[tuple[Step, np.ndarray, Any, Access]] = []
        for indices in _batches(steps, len(seats)):
            batch: list[Any] = [steps[i] for i in indices]
            first, number = batch[0], np.array(indices, np.int16)
            if isinstance(first, Fold):
                peers, read, target, others, lengths = self._fold(seats, batch)
                self.reductions[seats] += (len(peers) - 1) * len(target)
                self.reads[seats] += others
                number = np.repeat(number, lengths)[:, None]
                each = np.tile(number, (len(peers), 1))
                access = Access(read.reshape(len(each), -1), seats, phase, part.rounds, each)
                self._record_read(access, (first.source, first.own), bool(others.any()))
                values = self._combined(seats, peers, read).reshape(target.shape)
                same: Any = False
            else:
                source, target, same, lengths = self._transfer(seats, batch)
                number = np.repeat(number, lengths)[:, None]
                elsewhere = isinstance(first, Get)
                if elsewhere:
                    self.reads[seats] += len(source)
                access = Access(source, seats, phase, part.rounds, number)
                self._record_read(access, (first.source,), elsewhere)
                values = self._values(source)
            access = Access(target, seats, phase, part.rounds, number)
            writes.append((first, values, same, access))
        for write in writes:
            self._write(*write)

    def _combined(self, seats: np.ndarray, peers: np.ndarray, read: np.ndarray) -> np.ndarray:
        """Return what comes of operands by peer, block and seat."""
        flat, operands = peers.reshape(len(peers), -1), self._values(read).reshape(len(peers), -1)
        if self.judged and len(peers) > 1:
            self.judge(None, flat, operands, np.tile(seats, peers.shape[1]) // self.size)
        return self.terms.fold(flat, operands)

    def _values(self, cells: np.ndarray) -> np.ndarray:
        values = self.memory[cells]
        if (values < 0).any():
            raise Unfit("reads where nothing was written")
        return values

    def _transfer(self, seats: np.ndarray, steps: list[Any]) -> tuple[Any, Any, Any, list[int]]:
        """Return the cells that are read and written, and whether they are one block of "in".

        Also how many blocks each of these steps of one kind has.
        """
        step = steps[0]
        copies = isinstance(step, Copy)
        if copies:
            read, lengths = _several([each.source_blocks for each in steps], len(seats))
            write, others = _several([each.target_blocks for each in steps], len(seats))
            source = target = seats
        else:
            read, lengths = _several([each.blocks for each in steps], len(seats))
            to = [each.blocks if each.to is None else each.to for each in steps]
            write, others = _several(to, len(seats))
            peers = _rows([each.peer for each in steps], len(seats))
            other = np.repeat(self._owners(seats, peers), lengths, axis=0)
            gets = isinstance(step, Get)
            source, target = (other, seats) if gets else (seats, other)
            does, buffer = ("read", step.source) if gets else ("write", step.target)
            if (other == seats).any() or self.reach.why_not(does, buffer):
                raise Unfit("a peer or buffer that it does not reach")
        if lengths != others:
            raise Unfit("a copy to more or fewer blocks")
        same = (read == write) & (copies and (step.source, step.target) == ("in", "out"))
        cells = self._cells(source, step.source, read), self._cells(target, step.target, write)
        return *cells, same, lengths

    def _fold(self, seats: np.ndarray, steps: list[Fold]) -> tuple[Any, ...]:
        """Return the peers and the cells of the operands, by peer and block, and the targets.

        Also how many operands of each seat are of other ranks, and how many blocks each step has.
        """
        step, lanes = steps[0], len(seats)
        here, lengths = _several([each.blocks for each in steps], lanes)
        there, others = _several([e.blocks if e.to is None else e.to for e in steps], lanes)
        rows = _rows([peer for each in steps for peer in each.peers], lanes)
        peers = rows.reshape(len(steps), -1, lanes)
        ranks = np.sort(peers, axis=1)
        distinct = (ranks[:, 1:] != ranks[:, :-1]).all()
        if not len(step.peers) or lengths != others or not distinct:
            raise Unfit("a fold of no ranks, or of one twice")
        peers = np.repeat(peers, lengths, axis=0).swapaxes(0, 1)
        owners = self._owners(seats, peers)
        mine = owners == seats
        if not mine.all() and self.reach.why_not("read", step.source):
            raise Unfit("a buffer that it does not reach")
        read = self._cells(owners, step.source, here)
        if step.own is not None:
            read = np.where(mine, self._cells(seats, step.own, there), read)
        target = self._cells(seats, step.target, there)
        return peers, read, target, (~mine).sum(axis=(0, 1)), lengths

    def _owners(self, seats: np.ndarray, ranks: Any) -> np.ndarray:
        ranks = ranks.values if isinstance(ranks, Ranks) else np.asarray(ranks)
        if ranks.dtype.kind not in "iu" or (ranks < 0).any() or (ranks >= self.size).any():
            raise Unfit("a rank that does not exist")
        return seats - seats % self.size + ranks

    def _cells(self, owners: np.ndarray, buffer: str, blocks: np.ndarray) -> np.ndarray:
        if (blocks < 0).any() or (blocks >= self.count).any():
            raise Unfit("a block that does not exist")
        return owners * self.width + self.offset[buffer] + blocks

    def _record_read(self, access: Access, buffers: Sequence[str | None], others: bool) -> None:
        """Record a read of these buffers; `others`: of other ranks' cells, in the first of them."""
        self.read.append(access)
        access.inside = "in" in buffers
        access.certain = not others or self._called(access.phase, buffers[0])
        if others and buffers[0] == "out":
            cells = access.cells
            if (~self.written[cells] & (cells // self.width != access.seats)).any():
                raise Unfit("reads 'out' of a rank that has not written it")

    def _called(self, phase: int, buffer: str | None) -> bool:
        """Return whether the owner of a buffer has called and not returned, in a phase."""
        if not self.plain or not self.last:
            return False
        return buffer in self.reach.scratch or 0 < phase < self.last

    def _doubtful(self, access: Access) -> Access | None:
        """Return what is to be checked one by one of a read in the phase that now ends."""
        if not access.certain:
            return access
        cells = access.cells
        doubtful = self.latest[cells] == access.phase
        if access.inside and self.contract.input_buffer != "in":
            inside = cells % self.width < self.count
            doubtful[inside] |= self.writes[cells[inside] + self.count] > 0
        if not doubtful.any():
            return None
        seats = np.broadcast_to(access.seats, cells.shape)[doubtful]
        step = np.broadcast_to(access.step, cells.shape)[doubtful]
        return replace(access, cells=cells[doubtful], seats=seats, step=step)

    def _write(self, step: Any, values: np.ndarray, same: Any, access: Access) -> None:
        cells = access.cells
        if step.target == "in":
            raise Unfit("a write to the input")
        if step.target not in self.reach.scratch:  # into a slot any block fits
            self.check_lengths(cells, values)
        place = self.writes[cells]
        if (place >= _WRITES).any():
            raise Unfit("many writes to one block")
        numbers = np.arange(cells.size).reshape(cells.shape)
        self.memory[cells] = numbers
        if (self.memory[cells] != numbers).any():
            raise Unfit("is written twice in one round")
        self.memory[cells], self.written[cells] = values, True
        self.latest[cells] = access.phase
        self.writer[place, cells] = access.seats
        for when, number in zip(self.when, (access.phase, access.round, access.step)):
            when[place, cells] = number
        self.same[place, cells] = same
        self.writes[cells] += 1
        if isinstance(step, Put):
            self.stores[access.seats] += len(cells)
            if not self._called(access.phase, step.target):
                self.stored.append(access)

    # -- races ----------------------------------------------------------------------------------

    def _check(self, together: bool) -> None:
        """Raise Unfit if two accesses to a cell may be at the same time, or with the caller's."""
        known = np.stack(self.known)
        for access in _joined((*self.read, *self.stored)):
            self._check_owner(access, known, together)
        most = int(self.writes.max(initial=0))
        for later in range(1, most):
            cells = np.flatnonzero(self.writes > later)
            for earlier in range(later):
                one, other = self._when(earlier, cells), self._when(later, cells)
                alone = one[0] != other[0]
                apart = ~alone & (one[2] != other[2])
                if not (apart | alone & self._before(known, one, other)).all():
                    raise Unfit("a race of two writes")
        for access in _joined(self.read):
            for k in range(most):
                self._check_read(access, k, known)

    def _check_read(self, access: Access, k: int, known: np.ndarray) -> None:
        """Raise Unfit if the write number k to what is read is neither before nor after."""
        cells, me = access.cells, (access.seats, access.phase, access.round, access.step)
        write = self._when(k, cells)
        mine = write[0] == me[0]
        fine = (write[2] != me[2]) | (write[3] == me[3])
        others = np.flatnonzero(~mine & (write[0] >= 0))
        one, other = ([each[others] for each in either] for either in (write, me))
        fine[others] = self._before(known, one, other) | self._before(known, other, one)
        if not (fine | (write[0] < 0)).all():
            raise Unfit("a race of a read and a write")
        if self.contract.input_buffer == "in":
            return
        # In place, "in" is gone when "out" is written.
        inside = np.flatnonzero(cells % self.width < self.count)
        there = cells[inside] + self.count
        seats, phases, rounds, steps = (each[inside] for each in me)
        write = self._when(k, there)
        mine = (rounds < write[2]) | (rounds == write[2]) & (steps == write[3])
        fine = np.where(write[0] == seats, mine, self._before(known, (seats, phases), write))
        if not (fine | (write[0] < 0) | self.same[k][there]).all():
            raise Unfit("reads 'in' when 'out' may be written")

    def _when(self, k: int, cells: np.ndarray) -> tuple[np.ndarray, ...]:
        """Return seat (-1 for none), phase, round and step of the write number k to cells."""
        return (self.writer[k][cells], *(when[k][cells] for when in self.when))

    def _before(self, known: np.ndarray, one: Sequence[Any], other: Sequence[Any]) -> np.ndarray:
        """Return whether `other`, of another seat, is in a phase that has awaited `one`."""
        return known[other[1], other[0], one[0] % self.size] > one[1]

    def _check_owner(self, access: Access, known: np.ndarray, together: bool) -> None:
        """Raise Unfit if the owner of a cell may not have called yet, or may have returned."""
        owners, seats = access.cells // self.width, access.seats
        scratch = access.cells % self.width >= 3 * self.count
        entered = known[access.phase, seats, owners % self.size] >= 1
        returned = known[-1, owners, seats % self.size]
        late = np.where(scratch, together | (returned >= 1), returned > access.phase)
        if not ((owners == seats) | (late & (scratch | entered))).all():
            raise Unfit("an access that may be outside of the owner's call")


def _rows(numbers: Iterable[Any], lanes: int) -> np.ndarray:
    """Return a row for each number, with a column for each seat."""
    items = list(numbers)
    kinds = {*map(type, items)}
    if not all(issubclass(kind, (int, Ranks)) for kind in kinds):
        raise Unfit("a rank or block that is no whole number")
    if Ranks not in kinds:
        return np.repeat(np.array(items, np.int64).reshape(-1, 1), lanes, axis=1)
    rows = np.empty((len(items), lanes), np.int64)
    for row, n in zip(rows, items):
        row[:] = n.values if isinstance(n, Ranks) else n
    return rows


def _several(specs: list[Blocks], lanes: int) -> tuple[np.ndarray, list[int]]:
    """Return rows as :func:`_rows` for the blocks of several steps, and how many each has."""
    each = list(map(block_tuple, specs))
    return _rows(chain(*each), lanes), list(map(len, each))


def _batches(steps: tuple[Step, ...], lanes: int) -> Iterator[list[int]]:
    """Yield the indices of steps of one kind, as many at once as a cache holds."""
    kinds: dict[tuple[Any, ...], list[int]] = {}
    for index, step in enumerate(steps):
        if isinstance(step, Fold):
            operands = len(step.peers)
            kind: tuple[Any, ...] = (Fold, operands, step.own, len(block_tuple(step.blocks)))
        elif isinstance(step, (Get, Put)):
            kind = (type(step), 1, None, len(block_tuple(step.blocks)))
        elif isinstance(step, Copy):
            kind = (Copy, 1, None, len(block_tuple(step.source_blocks)))
        else:
            raise Unfit("messages in shared memory")
        kinds.setdefault((*kind, step.source, step.target), []).append(index)
    for (_, operands, _, blocks, *_), indices in kinds.items():
        many = max(1, _MANY // max(1, operands * blocks * lanes))
        for i in range(0, len(indices), many):
            yield indices[i : i + many]
