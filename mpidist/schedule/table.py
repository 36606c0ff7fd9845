"""The table of a schedule: the rounds of all ranks, for several roots, as flat arrays.

Seats and cells are those of :mod:`.state`.  Sends are matched with receives by peer, strand and
order, before anything runs.

Seats whose rounds have the same steps, but for the numbers of peers and blocks, are a *form*.  Its
numbers are a matrix with a row for each number and a column for each seat, so that the arrays of a
form are made at once::

    ring, 4 ranks   seat 0  1  2  3
    Send(peer,           1  2  3  0
         block),         0  1  2  3
    Reduce(peer,         3  0  1  2
           block)        3  0  1  2
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from copy import copy
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import numpy as np

from .ranks import ONE, Ranks, Turn, Unfit, cases
from .registry import Algorithm, Groups
from .rounds import BUFFERS, Blocks, Copy, Recv, Reduce, Send
from .unrolled import Strands, Written, materialise

SEND, RECV, REDUCE, COPY = range(4)
_KINDS = {Send: SEND, Recv: RECV, Reduce: REDUCE}
_LARGE = 1 << 24  # a number of blocks
_PATIENCE = 4  # times the number of ranks: how often times of rounds are put off by others
_APART = np.int64(1 << 32)  # more than any time of a round
_NUMBER = {name: i for i, name in enumerate(BUFFERS)}
Signature = tuple[Any, ...]  # of a schedule: its rounds, and (None, *signatures) for a parallel


class Form:
    """The seats with one signature: their numbers, and the lay-out of their rounds.

    Each of `ends`, `reads` and `actions` is a list of rows of integers; `rounds` has for each round
    the first and the number of its sends, receives, reads and actions, the round behind it, the
    one beside it (the first of the next strand), and how many rounds must have ended before.
    """

    def __init__(self, signature: Signature, strands: dict[tuple[int, ...], int]):
        self.signature = signature
        self.strands = strands  # numbers of strands by path, the same in all forms
        self.parts: list[tuple[np.ndarray, list[Any]]] = []
        self.sends: list[tuple[int, ...]] = []  # row of the peer, strand, length, first read
        self.receives: list[tuple[int, ...]] = []  # the same, with 0
        # Of the blocks of a step only the first, with their number: row of the block, buffer.
        self.reads: list[tuple[int, ...]] = []
        # Likewise kind, order in the round, row of the peer, source and buffer, target and buffer,
        # number of the block in its message.  A source is a row, or for a message the receive.
        self.actions: list[tuple[int, ...]] = []
        self.lengths = [0, 0]  # of both, with all blocks
        self.rounds: list[list[int]] = []
        self.starts: list[int] = []  # of each round: the first row of its numbers
        self.own = 0  # rounds of the schedule, not only of the table
        self.mixed = False  # whether a round combines and copies
        self.families: list[list[tuple[int, int, int, int]]] = []  # reads and actions of strands
        self._row = 0
        self.first = self._sequence(signature, ())[0]

    def _sequence(self, signature: Signature, path: tuple[int, ...]) -> tuple[int, int]:
        """Lay out the rounds of a strand; return the first and the last one."""
        # Every strand begins with an empty round, so that it can be the one beside another.
        first = last = self._round((), path) if path or not signature else -1
        for item in signature:
            if item and item[0] is None:
                begin, end = self._parallel(item[1:], path)
            else:
                self.own += 1
                begin = end = self._round(item, path)
            if last < 0:
                first = begin
            else:
                self.rounds[last][8] = begin
            last = end
        return first, last

    def _parallel(self, signatures: Signature, path: tuple[int, ...]) -> tuple[int, int]:
        spans, family = [], []
        for k, signature in enumerate(signatures):
            reads, actions = self.lengths
            spans.append(self._sequence(signature, (*path, k)))
            family.append((reads, self.lengths[0], actions, self.lengths[1]))
        join = self._round((), path)
        if not spans:
            return join, join
        self.families.append(family)
        self.rounds[join][10] = len(spans)
        for k, (first, last) in enumerate(spans):
            self.rounds[last][8] = join
            if k:
                self.rounds[spans[k - 1][0]][9] = first
        return spans[0][0], join

    def _round(self, steps: Signature, path: tuple[int, ...]) -> int:
        begin = [len(self.sends), len(self.receives), *self.lengths]
        self.starts.append(self._row)
        strand = self.strands.setdefault(path, len(self.strands))
        order, latest = 0, RECV
        for kind, count, buffer, target in steps:
            peer = self._rows(1) if kind != COPY else 0
            row = self._rows(count)
            if kind == SEND:
                self.sends.append((peer, strand, count, self.lengths[0]))
                self.reads.append((count, row, buffer))
                self.lengths[0] += count
                continue
            # The receives of a round do not overlap, so several in a row may be done at once.
            order += kind != RECV or latest != RECV
            latest = kind
            if kind == COPY:
                place = (row, buffer, self._rows(count), target)
            else:
                place = (len(self.receives), -1, row, buffer)
                self.receives.append((peer, strand, count, 0))
            self.actions.append((count, kind, order, peer, *place, 0))
            self.lengths[1] += count
        self.mixed |= {COPY, REDUCE} <= {kind for kind, *_ in steps}
        end = [len(self.sends), len(self.receives), *self.lengths]
        counts = [e - b for e, b in zip(end, begin)]
        self.rounds.append([*begin, *counts, -1, -1, 1])
        return len(self.rounds) - 1

    def _rows(self, count: int) -> int:
        self._row += count
        return self._row - count

    def settle(self) -> None:
        """Make the matrix of the numbers of all parts, and arrays of the lists."""
        every = np.concatenate([seats for seats, _ in self.parts]).astype(np.int32)
        numbers = np.empty((self._row, len(every)), np.int64)
        start = 0
        for seats, each in self.parts:
            stop = start + len(seats)
            plain = [row for row, n in enumerate(each) if type(n) is not Ranks]
            numbers[plain, start:stop] = np.array([each[row] for row in plain], np.int64)[:, None]
            for row, n in enumerate(each):
                if type(n) is Ranks:
                    numbers[row, start:stop] = n.values
            start = stop
        if numbers.size and (numbers.min() < 0 or numbers.max() >= _LARGE):
            raise Unfit("a peer or block that does not exist")
        self._have(every, numbers.astype(np.int32))

    def _have(self, seats: np.ndarray, numbers: np.ndarray) -> None:
        self.seats, self.numbers = seats, numbers
        self.acts, number = _expanded(self.actions, 8)
        self.acts[:, [5, 7]] += number[:, None]
        self.acts[:, 3] += np.where(self.acts[:, 0] == COPY, number, 0)
        self.blocks, number = _expanded(self.reads, 2)
        self.blocks[:, 0] += number
        self.plan = np.array(self.rounds, np.int32).reshape(-1, 11)

    def cut(self, columns: np.ndarray, begin: int, end: int) -> Form:
        """Return the form of some columns with the rounds from `begin` up to `end`; no strands."""
        part = Form(self.signature[begin:end], self.strands)
        row = self.starts[begin] if begin < len(self.signature) else self._row
        part._have(self.seats[columns], self.numbers[row : row + part._row, columns])
        return part

    def of_first(self, size: int) -> Form | None:
        """Return the form of the first root's seats, or None if it has none of them."""
        return self.of(self.seats < size)

    def of(self, chosen: np.ndarray) -> Form | None:
        """Return the form of some of the seats, or None for none."""
        if not chosen.any():
            return None
        part = copy(self)
        part.seats, part.numbers = self.seats[chosen], self.numbers[:, chosen]
        return part

    def turns(self, size: int, roots: np.ndarray, count: int) -> bool:
        """Return whether its seats of all roots are those of the first root, renumbered.

        If a root is n ranks behind the first one, so are all ranks and their peers.  Blocks are, by
        as many as n ranks have, if all ranks have equally many; else they keep their numbers.
        """
        each = 0 if count % size else count // size
        shifts = ((roots - roots[0]) % size).astype(np.int32)
        ranks, behind = self.seats % size, shifts[self.seats // size]
        column = np.full(size, -1)
        column[ranks[self.seats < size]] = np.flatnonzero(self.seats < size)
        like = column[(ranks - behind) % size]
        if (like < 0).any() or self.scratch():
            return False
        peers = self.peers()
        for row, numbers in enumerate(self.numbers):
            step, modulus = (1, size) if row in peers else (each, count)
            turned = numbers[like] + (step * behind if step else 0)
            if (numbers != np.where(turned < modulus, turned, turned - modulus)).any():
                return False
        return True

    def peers(self) -> set[int]:
        """Return the rows of its numbers that are peers."""
        return {row[0] for row in (*self.sends, *self.receives)}

    def scratch(self) -> int:
        """Return how many blocks of "tmp" the seats use."""
        acts, tmp = self.acts, _NUMBER["tmp"]
        rows = (
            self.blocks[self.blocks[:, 1] == tmp, 0],
            acts[acts[:, 4] == tmp, 3],
            acts[acts[:, 6] == tmp, 5],
        )
        used = self.numbers[np.concatenate(rows)]
        return int(used.max()) + 1 if used.size else 0


def _expanded(steps: list[tuple[int, ...]], width: int) -> tuple[np.ndarray, np.ndarray]:
    """Return a row for each block of the steps, and the number of the block in its step."""
    every = np.array(steps, np.int32).reshape(-1, width + 1)
    counts = every[:, 0]
    first = np.cumsum(counts, dtype=np.int32) - counts
    rows = np.repeat(every[:, 1:], counts, axis=0)
    return rows, np.arange(len(rows), dtype=np.int32) - np.repeat(first, counts)


def _signature(written: Written, numbers: list[Any]) -> Signature:
    """Return what kinds of steps a schedule has, and append their peers and blocks to `numbers`."""
    signature: list[Any] = []
    for item in written:
        if isinstance(item, Strands):
            if item.window < len(item.strands):
                raise Unfit("a window of strands")
            signature.append((None, *(_signature(s, numbers) for s in item.strands)))
            continue
        steps = []
        for step in item:
            if isinstance(step, Copy):
                count = _extend(numbers, step.source_blocks)
                if _extend(numbers, step.target_blocks) != count:
                    raise Unfit("a copy to more or fewer blocks")
                steps.append((COPY, count, _NUMBER[step.source], _NUMBER[step.target]))
            elif isinstance(step, (Send, Recv, Reduce)):
                _extend(numbers, step.peer)
                count = _extend(numbers, step.blocks)
                steps.append((_KINDS[type(step)], count, _NUMBER[step.buffer], -1))
            else:
                raise Unfit("a step in other ranks' memory")
        signature.append(tuple(steps))
    return tuple(signature)


def _extend(numbers: list[Any], spec: Blocks) -> int:
    if isinstance(spec, ONE):
        numbers.append(spec)
        return 1
    if not all(issubclass(kind, ONE) for kind in {*map(type, spec)}):
        raise Unfit("a block that is no whole number")
    numbers.extend(spec)
    return len(spec)


def forms_of(
    algorithm: Algorithm,
    size: int,
    roots: Sequence[int],
    arity: int = 2,
    groups: Groups | None = None,
    pieces: int = 1,
    strands: dict[tuple[int, ...], int] | None = None,
) -> list[Form]:
    """Return the forms of a schedule for all ranks and each of the roots.

    Forms that are joined later have the same numbers of `strands`.  Raises Unfit, or what the
    generator raises.
    """
    written = _writing(algorithm, size, arity, groups, pieces)
    ranks = np.tile(np.arange(size), len(roots))
    limit = 64 + 8 * size  # beyond, one by one is as fast
    found = cases(written, ranks, np.repeat(np.asarray(roots), size), limit=limit)
    return _formed(found, {} if strands is None else strands)


def turning(
    algorithm: Algorithm,
    size: int,
    root: int,
    arity: int = 2,
    pieces: int = 1,
    strands: dict[tuple[int, ...], int] | None = None,
) -> list[Form]:
    """Return the forms for one root of a schedule that all roots have, renumbered for each.

    That is what :meth:`Form.turns` asks of the forms of all roots; here all ranks at one distance
    from their roots are one number, a Turn.  Raises Unfit, or what the generator raises, if that
    does not do.
    """
    count = algorithm.block_count(size) * pieces
    if count % size == 0 and count != size:
        raise Unfit("several blocks of each rank")
    written = _writing(algorithm, size, arity, None, pieces)

    def turned(number: Any, peer: bool) -> Any:
        if (type(number) is Turn) != (peer or count == size):
            raise Unfit("a number that does not turn with the root, or a block that does")
        if type(number) is not Turn:
            return number
        plain = type(number.plus) is int and number.plus == 0
        if (number.stride, number.count) != (1, size) or not plain:
            raise Unfit("a number that turns in another way")
        return (number.base + (number.offset + root)) % size

    distances = np.arange(size)
    found = cases(lambda away: written(Turn(away, 0, 1, size), Turn(0, 0, 1, size)), distances)
    seats = [((part + root) % size, rounds) for part, rounds in found]
    return _formed(seats, {} if strands is None else strands, turned)


def _writing(
    algorithm: Algorithm, size: int, arity: int, groups: Groups | None, pieces: int
) -> Callable[[Any, Any], Written]:
    """Return the function of a rank and a root that returns the rounds."""
    reason = algorithm.unsupported(size, groups)
    if reason is not None:
        raise Unfit(reason)
    # Asked once here, instead of for each part of the ranks.
    asked = replace(algorithm, requires=None, blocks=algorithm.block_count(size, groups))
    return lambda rank, root: materialise(asked.schedule(rank, size, root, arity, groups, pieces))


def _formed(
    found: Sequence[tuple[np.ndarray, Written]],
    strands: dict[tuple[int, ...], int],
    changed: Callable[[Any, bool], Any] | None = None,
) -> list[Form]:
    """Return the forms of rounds with their seats; numbers are `changed`, of a peer or a block."""
    forms: dict[Signature, Form] = {}
    for seats, rounds in found:
        numbers: list[Any] = []
        signature = _signature(rounds, numbers)
        if signature not in forms:
            forms[signature] = Form(signature, strands)
        form = forms[signature]
        if changed is not None:
            peers = form.peers()
            numbers = [changed(n, row in peers) for row, n in enumerate(numbers)]
        form.parts.append((seats, numbers))
    for form in forms.values():
        form.settle()
    return list(forms.values())


def between(forms: list[Form], first: int, stop: int) -> list[Form]:
    """Return the forms of the seats from `first` up to `stop`, numbered from 0."""
    parts = [form.of((form.seats >= first) & (form.seats < stop)) for form in forms]
    found = [part for part in parts if part is not None]
    for part in found:
        part.seats -= np.int32(first)
    return found


def join(several: Sequence[tuple[list[Form], int]]) -> list[Form]:
    """Return the forms of several schedules as those of one; each comes with its number of seats.

    Those of one signature are one form.
    """
    if len(several) == 1:
        return several[0][0]
    alike: dict[Signature, list[tuple[Form, int]]] = {}
    first = 0
    for forms, seats in several:
        for form in forms:
            alike.setdefault(form.signature, []).append((form, first))
        first += seats
    return [_joined(them) for them in alike.values()]


def _joined(alike: list[tuple[Form, int]]) -> Form:
    made = copy(alike[0][0])
    made.seats = np.concatenate([form.seats + np.int32(first) for form, first in alike])
    made.numbers = np.concatenate([form.numbers for form, _ in alike], axis=1)
    return made


@dataclass(slots=True)
class Columns:
    """Arrays that grow by a piece for each form, by name."""

    pieces: dict[str, list[np.ndarray]] = field(default_factory=dict)

    def add(self, **arrays: np.ndarray) -> None:
        """Append a piece to each of these arrays."""
        for name, array in arrays.items():
            self.pieces.setdefault(name, []).append(array.ravel())

    def __getitem__(self, name: str) -> np.ndarray:
        return np.concatenate(self.pieces[name])

    def get(self, *names: str) -> Any:
        """Return these arrays."""
        return tuple(self[name] for name in names)


def _orders(keys: np.ndarray, counts: np.ndarray) -> np.ndarray:
    """Return how many messages of its channel are before each one; `counts` is then of all.

    There is a row of channels for each message of a form.  Its seats, and those of other forms,
    have different channels, whose counts are 0 so far.
    """
    if not keys.size:
        return keys
    # A ring has one row again and again, most others have no channel twice: both at one blow.
    first = [0, *(np.flatnonzero((keys[1:] != keys[:-1]).any(axis=1)) + 1).tolist()]
    lengths = np.array([*first[1:], len(keys)], np.int32) - np.array(first, np.int32)
    heads = keys[first].astype(np.intp)
    number = np.arange(len(heads), dtype=np.int32)[:, None]
    counts[heads] = number
    if len(heads) == 1 or (counts[heads] == number).all():
        counts[heads] = lengths[:, None]
        orders = np.arange(len(keys), dtype=np.int32)
        orders -= np.repeat(np.array(first, np.int32), lengths)
        return np.repeat(orders, keys.shape[1]).reshape(keys.shape)
    counts[heads] = 0
    orders = np.empty_like(keys)
    for k, length, channels in zip(first, lengths, heads):
        orders[k : k + length] = counts[channels] + np.arange(length, dtype=np.int32)[:, None]
        counts[channels] += length
    return orders


class Table:
    """The rounds of all seats; see the module.

    Of each seat: `own`, `messages`, `blocks`, `reductions`, the numbers of its rounds, of the
    messages and blocks that it sends, and of those that it combines.

    Of each round: its `seat`; its `place`, a number above those of the rounds before it; the rounds
    before it that have messages, `timed`, and whether it has some itself, `takes_time`; the round
    behind it, `following`, and `beside`, the first one of the next strand (-1 for none); whether it
    is `crowded`, so that a receive could overwrite what another of its steps uses.

    Of each send: the round of its `sender` and `receiver`.  Of each receive: the send, `received`.
    Of each block that is sent: its cell, `read`, and the round, `read_round`.

    Of each action: the round, `action_round`; its `kind`, RECV, REDUCE or COPY; `order` in the
    round, equal for those at once; the `target`, a cell; the `source`, the cell of a copy or an
    index in `read`; of a REDUCE the `peer`, and whether what is received is the `left` operand.  Of
    each cell: whether it is `written`.
    """

    def __init__(self, forms: list[Form], size: int, seats: int, count: int, scratch: int = 0):
        scratch = max(scratch, *(form.scratch() for form in forms))
        self.size, self.seats, self.count, self.width = size, seats, count, 2 * count + scratch
        self._limits = np.array([count, count, scratch], np.int32)
        self._offsets = np.array([0, count, 2 * count], np.int32)
        self.strands = any(form.families for form in forms)
        self.mixed = any(form.mixed for form in forms)
        self.own, self.messages, self.blocks, self.reductions = np.zeros((4, seats), np.int64)
        self.written = np.zeros(seats * self.width, bool)
        channels = seats * size * len(forms[0].strands)
        self._counts = np.zeros((2, channels), np.int32)  # of sends and receives so far
        columns, base = Columns(), np.zeros(5, np.int32)
        for form in forms:
            base = self._add(form, columns, base)
        self._match(columns)
        self.seat, self.place, self.crowded = columns.get("seat", "place", "crowded")
        self.timed, self.takes_time = columns.get("timed", "takes_time")
        self.following, self.beside = columns.get("following", "beside")
        self.read, self.read_round = columns.get("read", "read_round")
        self.target, self.action_round = columns.get("target", "action_round")
        self.peer, self.left = columns.get("peer", "left")
        self.kind, self.order = columns.get("kind", "order")

    def _add(self, form: Form, columns: Columns, base: np.ndarray) -> np.ndarray:
        """Append the arrays of a form; `base` has the numbers of elements so far, and the result.

        These are sends, receives, reads, actions and rounds.
        """
        lanes, size, plan, acts = len(form.seats), self.size, form.plan, form.acts
        here, rank = np.arange(lanes, dtype=np.int32), form.seats % size

        def flat(index: np.ndarray, kind: int) -> np.ndarray:
            return (index * lanes + base[kind])[:, None] + here

        for kind, name, rows in ((0, "sent", form.sends), (1, "received", form.receives)):
            row, strand, length, first = np.array(rows, np.int32).reshape(-1, 4).T
            peers = form.numbers[row]
            if ((peers >= size) | (peers == rank)).any():
                raise Unfit("a peer that is no other rank")
            if kind == 0:
                key = peers + form.seats * size
            else:
                key = peers * size + (form.seats - rank) * size + rank
            key += strand[:, None] * (self.seats * size)
            order = _orders(key, self._counts[kind])
            owner = flat(np.repeat(np.arange(len(plan), dtype=np.int32), plan[:, 4 + kind]), 4)
            columns.add(**{name + "_key": key, name + "_order": order, name + "_round": owner})
            columns.add(**{name + "_length": np.repeat(length, lanes)})
            if kind == 0:
                columns.add(first_read=flat(first, 2))
                columns.add(read_stride=np.full(key.size, lanes, np.int32))
        columns.add(read=self._cells(form, form.blocks[:, 0], form.blocks[:, 1]))
        copies, combined = acts[:, 0] == COPY, acts[:, 0] == REDUCE
        target = self._cells(form, acts[:, 5], acts[:, 6])
        source = flat(acts[:, 3], 1)
        source[copies] = self._cells(form, acts[copies, 3], acts[copies, 4])
        peer = np.full(target.shape, size, np.int32)
        peer[combined] = form.numbers[acts[combined, 2]]
        self.written[target] = True
        columns.add(target=target, source=source, peer=peer, left=peer < rank)
        for name, column in (("kind", 0), ("order", 1), ("part", 7)):
            columns.add(**{name: np.repeat(acts[:, column], lanes)})
        if (acts[:, 6] == _NUMBER["in"]).any():
            raise Unfit("a write to the input")
        columns.add(
            crowded=np.repeat(self._crowded(plan, acts, columns.pieces["read"][-1], target), lanes)
        )
        self._check_strands(form, columns.pieces["read"][-1], target, source)
        rounds = np.arange(len(plan), dtype=np.int32)
        for k, name in ((6, "read_round"), (7, "action_round")):
            columns.add(**{name: flat(np.repeat(rounds, plan[:, k]), 4)})
        takes_time = plan[:, 4] + plan[:, 5] > 0
        timed = np.cumsum(takes_time, dtype=np.int32) - takes_time
        columns.add(timed=np.repeat(timed, lanes), takes_time=np.repeat(takes_time, lanes))
        columns.add(place=np.repeat(rounds, lanes), seat=np.tile(form.seats, len(plan)))
        for k, name in ((8, "following"), (9, "beside")):
            columns.add(**{name: np.where(plan[:, k, None] < 0, -1, flat(plan[:, k], 4))})
        self.own[form.seats], self.messages[form.seats] = form.own, len(form.sends)
        self.blocks[form.seats] = len(form.blocks)
        self.reductions[form.seats] = combined.sum()
        lists = (form.sends, form.receives, form.blocks, acts, plan)
        return base + np.array([lanes * len(each) for each in lists], np.int32)

    def times(self, start: np.ndarray | None = None) -> tuple[np.ndarray, np.ndarray]:
        """Return :attr:`steps`, or with `start`, the clocks of the seats, the clocks of all rounds.

        These are the same, but rounds without messages take no time.
        """
        if start is None or (self.takes_time.all() and not start.any()):
            return self.steps
        return self._times(start)

    @cached_property
    def steps(self) -> tuple[np.ndarray, np.ndarray]:
        """When each round begins, and when its last message moves."""
        return self._times(None)

    def _times(self, start: np.ndarray | None) -> tuple[np.ndarray, np.ndarray]:
        """Return for each round when it begins, and when its last message moves.

        A message moves when both ends have begun.  A round begins one step after the last message
        of those before it.  Raises Unfit if times do not settle, as those of a deadlock.
        """
        if start is None:
            begin, step = self.place.astype(np.int64), np.ones(len(self.seat), np.int64)
        else:
            begin, step = self.timed + start[self.seat], self.takes_time.astype(np.int64)
        if self.strands:
            begin[:] = 0 if start is None else start[self.seat]
        usual = begin.copy()
        for _ in range(_PATIENCE * self.size):
            end = begin.copy()
            one, other = begin[self.sender], begin[self.receiver]
            apart = np.flatnonzero(one != other)
            if apart.size:
                np.maximum.at(end, self.sender[apart], other[apart])
                np.maximum.at(end, self.receiver[apart], one[apart])
            elif not self.strands:
                return begin, end
            later = self._behind(begin, end, step, usual)
            if (later == begin).all():
                return begin, end
            begin = later
        raise Unfit("a deadlock")

    def _behind(
        self, begin: np.ndarray, end: np.ndarray, step: np.ndarray, usual: np.ndarray
    ) -> np.ndarray:
        """Return when rounds begin that wait for those before them in their seat."""
        later = begin.copy()
        if self.strands:
            for rounds, when in ((self.following, end + step), (self.beside, begin)):
                np.maximum.at(later, rounds[rounds >= 0], when[rounds >= 0])
            return later
        # A round is late by as much as any one before it in its seat.
        line, same = self._line
        late = (end - usual)[line] + self.seat[line] * _APART
        behind = np.maximum.accumulate(late)[:-1] - self.seat[line[:-1]] * _APART
        late[1:] = np.where(same, behind, 0)
        late[0] = 0
        later[line] = np.maximum(begin[line], usual[line] + late)
        return later

    @cached_property
    def _line(self) -> tuple[np.ndarray, np.ndarray]:
        """The rounds of each seat one behind the other, and whether the next has the same seat."""
        seats = self.seat.astype(np.uint16) if self.seats < 1 << 16 else self.seat  # a radix sort
        line = np.argsort(seats, kind="stable")
        return line, np.diff(self.seat[line]) == 0

    def _cells(self, form: Form, rows: np.ndarray, buffers: np.ndarray) -> np.ndarray:
        blocks = form.numbers[rows]
        if (blocks >= self._limits[buffers][:, None]).any():
            raise Unfit("a block that does not exist")
        blocks += self._offsets[buffers][:, None]
        blocks += form.seats * self.width
        return blocks

    def _crowded(
        self, plan: np.ndarray, acts: np.ndarray, read: np.ndarray, target: np.ndarray
    ) -> np.ndarray:
        """Return for each round whether a receive could overwrite what another step uses.

        It cannot in a round of one block that is sent and one that is received, if they differ.
        """
        received = np.zeros(len(plan), bool)
        received[np.repeat(np.arange(len(plan)), plan[:, 7])[acts[:, 0] == RECV]] = True
        single = (plan[:, 6] < 2) & (plan[:, 7] < 2)
        pairs = single & received & (plan[:, 6] == 1)
        sent = read.reshape(-1, target.shape[1])[plan[pairs, 2]]
        pairs[pairs] = (sent == target[plan[pairs, 3]]).any(axis=1)
        return received & (~single | pairs)

    def _check_strands(
        self, form: Form, read: np.ndarray, target: np.ndarray, source: np.ndarray
    ) -> None:
        """Raise Unfit if a strand uses a cell that another one of its parallel writes."""
        lanes, copies = len(form.seats), form.acts[:, 0] == COPY
        for family in form.families:
            writer = np.full(len(self.written), -1)
            for use in (False, True):
                for k, (reads, reads_end, begin, end) in enumerate(family):
                    cells = [target[begin:end].ravel()]
                    if use:
                        cells.append(read[reads * lanes : reads_end * lanes])
                        cells.append(source[begin:end][copies[begin:end]].ravel())
                    used = np.concatenate(cells)
                    if ((writer[used] >= 0) & (writer[used] != k)).any():
                        raise Unfit("a block that two strands use")
                    if not use:
                        writer[used] = k

    def _match(self, columns: Columns) -> None:
        """Find the send of every receive, and what is read for it."""
        counts, received_counts = self._counts
        if (counts != received_counts).any():
            raise Unfit("a send or receive without a partner")
        start = np.cumsum(counts, dtype=np.int32) - counts
        self.sender = columns["sent_round"]
        sends = len(self.sender)
        numbers = np.empty(sends, np.int32)
        numbers[start[columns["sent_key"]] + columns["sent_order"]] = np.arange(sends)
        self.received = numbers[start[columns["received_key"]] + columns["received_order"]]
        self.receiver = np.empty(sends, np.int32)
        self.receiver[self.received] = columns["received_round"]
        if (columns["sent_length"][self.received] != columns["received_length"]).any():
            raise Unfit("a message of another length")
        self.source, part = columns["source"], columns["part"]
        messages = columns["kind"] != COPY
        send = self.received[self.source[messages]]
        read = columns["first_read"][send]
        if part.any():
            read += columns["read_stride"][send] * part[messages]
        self.source[messages] = read
