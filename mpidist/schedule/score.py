"""Scores: what all ranks of a schedule send and receive, from few runs of its generator.

The ranks are *lanes*, each of which stands for `count` ranks, turned by so many places: there is
one lane if every rank does what its neighbour does, one for each rank of a node if every node does
what the others do (see :class:`_Nodes`), and else one for each rank::

    ring, any number of ranks                     1 lane
    ring within nodes of 8, and between them      8 lanes
    binomial tree on 1024 ranks                   1024 lanes

Lanes that have the same steps are a *part*, whose numbers are arrays.
"""

from __future__ import annotations

from array import array
from collections.abc import Hashable, Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from ..errors import ScheduleError
from .ranks import ONE, Ranks, Span, Turn, Unfit, cases
from .registry import Algorithm, Groups
from .rounds import Blocks, Copy, Parallel, Recv, Reduce, Schedule, Send, steps_of

Numbers = Any  # an int, or an array with one for each lane of a part
MOST_PARTS = 512
"""Parts of the lanes beyond which a schedule has no pattern."""
MOST_BEATS = 20_000
"""Rounds of a lane unlike all others, beyond which its rounds do not recur."""
MOST_MESSAGES = 20_000
"""Messages of one rank, beyond which its lane must stand for others too."""
MOST_NUMBERS = 1 << 28
"""Peers and blocks of all lanes together, as arrays of which a schedule is read."""


@dataclass(frozen=True, eq=False, slots=True)
class End:
    """One end of a message in a round: its other lane, and how many turns away that is.

    `turns` are those from the sender to the receiver.  `index` is the number of the step.
    """

    index: int
    lane: Numbers
    turns: Numbers
    blocks: int
    nbytes: Numbers


@dataclass(frozen=True, eq=False, slots=True)
class Beat:
    """The messages of a round, and the bytes that the lanes then combine."""

    sends: tuple[End, ...]
    receives: tuple[End, ...]
    combined: Numbers


@dataclass(frozen=True, eq=False, slots=True)
class Fork:
    """Strands side by side."""

    strands: tuple[Line, ...]


@dataclass(eq=False, slots=True)
class Line:
    """The rounds of a strand, in order: numbers of its beats and forks, most of which recur."""

    beats: list[Beat | Fork] = field(default_factory=list)
    numbers: array = field(default_factory=lambda: array("i"))
    rounds: int = 0


@dataclass(frozen=True, eq=False)
class Part:
    """The lanes that have one line."""

    lanes: np.ndarray
    line: Line


@dataclass(frozen=True, eq=False)
class Score:
    """All lanes of a schedule, each of which stands for `count` ranks."""

    size: int
    lanes: int
    count: int
    parts: list[Part]


class Lengths:
    """The bytes of blocks: `nbytes` cut into `count` about equal ones.

    Of blocks that are not the same on all the ranks of a lane, the longest counts if `longest`.
    """

    def __init__(self, nbytes: int, count: int, moves: bool, longest: bool):
        self.each, self.longer = divmod(nbytes, max(count, 1))
        self.moves, self.longest = moves, longest  # whether a block moves to another one's place

    def of(self, spec: Any, buffer: str) -> Numbers:
        """Return the bytes of the blocks of a message, for each lane if they differ."""
        kind = type(spec)
        if not self.longer:
            return (
                self.each if kind is int or kind is Turn or kind is Ranks else self.each * len(spec)
            )
        if self.moves or buffer == "tmp":
            if not self.longest:
                raise Unfit("blocks of several lengths, which move to others' places")
            count = 1 if isinstance(spec, ONE) else len(spec)
            return (self.each + 1) * count
        if isinstance(spec, ONE):
            return self._from(spec, 1)
        if isinstance(spec, Span):
            return self._from(spec.first, spec.length)
        if isinstance(spec, range) and spec.step == 1:
            return self._from(spec.start, len(spec))
        if any(isinstance(block, Turn) for block in spec):
            return self._from(next(block for block in spec if isinstance(block, Turn)), len(spec))
        return sum(self._from(block, 1) for block in spec)

    def _from(self, first: Any, count: int) -> Numbers:
        if isinstance(first, Turn):
            if not self.longest:
                raise Unfit("blocks of several lengths")
            return (self.each + 1) * count
        first = first.values if isinstance(first, Ranks) else first
        least = np.minimum if isinstance(first, np.ndarray) else min
        before = least(first, self.longer)
        return self.each * count + least(first + count, self.longer) - before


class _Reader:
    """Reads the rounds of the lanes of a part, once, into lines."""

    def __init__(self, size: int, lanes: int, lengths: Lengths):
        self.size, self.lanes, self.count = size, lanes, size // lanes
        self.lengths = lengths
        self._peers: dict[Hashable, tuple[Numbers, Numbers]] = {}

    def line(self, schedule: Schedule, mine: np.ndarray) -> Line:
        line = Line()
        known: dict[Hashable, int] = {}
        for item in schedule:
            if isinstance(item, Parallel):
                if item.window is not None and item.window < len(item.strands):
                    raise Unfit("a window of strands")
                line.numbers.append(len(line.beats))
                strands = tuple(self.line(s, mine) for s in item.strands)
                line.beats.append(Fork(strands))
                line.rounds += sum(strand.rounds for strand in strands)
                continue
            key, number = None, None
            if self.count > 1:
                key = self._key(steps_of(item))
                number = known.get(key)
            if number is None:
                number = len(line.beats)
                line.beats.append(self._beat(steps_of(item), mine))
                if key is not None:
                    known[key] = number
                if number > MOST_BEATS:
                    raise Unfit(f"over {MOST_BEATS:,} rounds that do not recur")
            line.numbers.append(number)
            line.rounds += 1
        return line

    def _key(self, steps: tuple[Any, ...]) -> Hashable:
        """Return what rounds with the same beat have in common."""
        if self.lanes == 1:
            return self._key_of_one(steps)
        key: list[Any] = []
        for step in steps:
            kind = type(step)
            if kind is Copy:
                continue
            peer = step.peer
            if type(peer) is not Turn:
                raise Unfit("a peer that is not the same for all ranks, turned")
            key += kind, peer.offset, self.lengths.of(step.blocks, step.buffer), peer.stride
            base = peer.base
            key.append(base.values.tobytes() if type(base) is Ranks else base)
            if type(peer.plus) is not int or peer.plus:
                raise Unfit("a peer beyond the last rank")
        return tuple(key)

    def _key_of_one(self, steps: tuple[Any, ...]) -> Hashable:
        """Return the same of one lane: it does not count how far away the peers are.

        But as far as a rank sends to the one side, it receives from the other.
        """
        key: list[Any] = []
        ahead, behind = [], []
        for step in steps:
            kind = type(step)
            if kind is Copy:
                continue
            peer = step.peer
            if type(peer) is not Turn or type(peer.base) is not int or peer.plus != 0:
                raise Unfit("a peer that is not the same for all ranks, turned")
            if kind is Send:
                ahead.append(peer.offset % self.size)
            else:
                behind.append(-peer.offset % self.size)
            key += kind, self.lengths.of(step.blocks, step.buffer)
        if ahead != behind and sorted(ahead) != sorted(behind):
            raise Unfit("a deadlock")
        return tuple(key)

    def _beat(self, steps: tuple[Any, ...], mine: np.ndarray) -> Beat:
        sends, receives, combined = [], [], 0
        for index, step in enumerate(steps):
            kind = type(step)
            if kind is Copy:
                continue
            if kind not in (Send, Recv, Reduce):
                raise Unfit("a step that is no message")
            lane, turns = self._peer(step.peer, mine)
            blocks = 1 if isinstance(step.blocks, ONE) else len(step.blocks)
            nbytes = _small(self.lengths.of(step.blocks, step.buffer))
            if kind is Send:
                sends.append(End(index, lane, turns, blocks, nbytes))
            else:
                receives.append(End(index, lane, (-turns) % self.count, blocks, nbytes))
                if kind is Reduce:
                    combined = combined + nbytes
        return Beat(tuple(sends), tuple(receives), combined)

    def _peer(self, peer: Any, mine: np.ndarray) -> tuple[Numbers, Numbers]:
        """Return the lane of a peer, and by how many turns the peer is ahead."""
        if isinstance(peer, Turn):
            if (peer.stride, peer.count) != (self.lanes, self.count):
                raise Unfit("a peer that is not the same for all ranks, turned")
            ahead = peer.base + peer.offset
            ahead = ahead.values if isinstance(ahead, Ranks) else ahead
            turns, lane = ahead // self.lanes % self.count, ahead % self.lanes
        else:
            if self.count > 1:
                raise Unfit("a peer that is not the same for all ranks, turned")
            lane, turns = peer.values if isinstance(peer, Ranks) else peer, 0
            low, high = (lane.min(), lane.max()) if isinstance(lane, np.ndarray) else (lane, lane)
            if low < 0 or high >= self.size:
                raise Unfit("a peer that does not exist")
        if np.any((lane == mine) & (turns == 0)):
            raise Unfit("a rank that is its own peer")
        return _small(lane), _small(turns)


def _small(numbers: Numbers) -> Numbers:
    if not isinstance(numbers, np.ndarray):
        return numbers
    if (numbers == numbers[0]).all():
        return int(numbers[0])
    return numbers.astype(np.int32) if abs(numbers).max() < 1 << 31 else numbers


@dataclass(frozen=True, eq=False)
class Loads:
    """What each lane does: its messages, the bytes in them, those to other nodes, its rounds."""

    messages: np.ndarray
    sent: np.ndarray
    left: np.ndarray
    rounds: int


def loads_of(score: Score, nodes: np.ndarray) -> Loads:
    """Return the loads of the lanes, each of which is on one of the `nodes`.

    Ranks that are a turn away are on other nodes.
    """
    messages, sent, left = np.zeros((3, score.lanes), np.int64)
    for part in score.parts:
        for beat, often in _beats(part.line):
            for end in beat.sends:
                nbytes = end.nbytes * often
                messages[part.lanes] += often
                sent[part.lanes] += nbytes
                far = (end.turns != 0) | (nodes[part.lanes] != nodes[end.lane])
                left[part.lanes] += np.where(far, nbytes, 0)
    return Loads(messages, sent, left, max(part.line.rounds for part in score.parts))


def _beats(line: Line) -> Iterator[tuple[Beat, int]]:
    """Yield each beat of a line and its strands, and how often it is played."""
    often = np.bincount(np.frombuffer(line.numbers, np.int32), minlength=len(line.beats))
    for beat, times in zip(line.beats, often.tolist()):
        if isinstance(beat, Beat):
            yield beat, times
        else:
            for strand in beat.strands:
                yield from _beats(strand)


def _score(
    algorithm: Algorithm,
    size: int,
    nbytes: int,
    lanes: int,
    *,
    root: int = 0,
    arity: int = 2,
    groups: Groups | None = None,
    longest: bool = False,
) -> Score:
    """Return the score of a schedule with so many lanes, which divide the ranks.

    With `longest` the ranks of a lane need not have blocks of equal lengths.

    Raises Unfit, or what the generator raises, if the ranks of a lane do not do the same;
    OverflowError if there are more than `MOST_PARTS`.
    """
    count = algorithm.block_count(size, groups=groups)
    # Whose block it is that alltoall has in "out" does not say which block it is.
    lengths = Lengths(nbytes, count, algorithm.equal_blocks, longest)
    reader = _Reader(size, lanes, lengths)

    def read(lane: Any) -> Line:
        mine = lane.values if isinstance(lane, Ranks) else np.array([lane])
        rank: Any = lane if lanes == size else Turn(lane, 0, lanes, size // lanes)
        return reader.line(algorithm.schedule(rank, size, root, arity, groups), mine)

    found = cases(read, np.arange(lanes), limit=MOST_PARTS)
    return Score(size, lanes, size // lanes, [Part(part, line) for part, line in found])


class _Nodes:
    """The nodes of a score with a lane for each rank, `each` of them with as many ranks.

    Where a message of one rank of a node goes to another node, those of all nodes may go to as
    many nodes, in any order: a turn is then the number of this order::

        recursive doubling, 4 nodes    0 <-> 1  2 <-> 3  and then  0 <-> 2  1 <-> 3
    """

    def __init__(self, count: int, each: int):
        self.count, self.each = count, each
        self.same = np.arange(count)
        self.orders = {self.same.tobytes(): 0}

    def part(self, part: Part) -> Part:
        """Return the part with the lanes of node 0; Unfit if not all nodes do the same."""
        first, wide = part.lanes[: len(part.lanes) // self.count], self.same[:, None] * self.each
        if not np.array_equal(part.lanes, (first + wide).ravel()):
            raise Unfit("ranks of a node that others have not")
        return Part(first, self._line(part.line, first))

    def _line(self, line: Line, first: np.ndarray) -> Line:
        beats: list[Beat | Fork] = []
        for beat in line.beats:
            if isinstance(beat, Fork):
                beats.append(Fork(tuple(self._line(strand, first) for strand in beat.strands)))
                continue
            sends = tuple(self._end(end, first, False) for end in beat.sends)
            receives = tuple(self._end(end, first, True) for end in beat.receives)
            beats.append(Beat(sends, receives, self._one(beat.combined)))
        return Line(beats, line.numbers, line.rounds)

    def _one(self, numbers: Numbers) -> Numbers:
        """Return the numbers of node 0, which are those of each."""
        if not isinstance(numbers, np.ndarray):
            return numbers
        rows = numbers.reshape(self.count, -1)
        if (rows != rows[0]).any():
            raise Unfit("another number on each node")
        return rows[0]

    def _end(self, end: End, first: np.ndarray, back: bool) -> End:
        lanes = end.lane
        if not isinstance(lanes, np.ndarray):  # all have one peer
            raise Unfit("a node that many others have to do with")
        nodes = lanes // self.each
        lane = self._one(lanes - nodes * self.each)
        rows = nodes.reshape(self.count, -1)
        if (rows == rows[:, :1]).all():
            turns: Numbers = self._turn(rows[:, 0], back)
        else:
            turns = np.array([self._turn(column, back) for column in rows.T])
        return End(end.index, lane, turns, end.blocks, self._one(end.nbytes))

    def _turn(self, nodes: np.ndarray, back: bool) -> int:
        """Return the number of an order, from the senders to the receivers."""
        there = np.full(self.count, -1)
        there[nodes] = self.same
        if (there < 0).any():
            raise Unfit("a node that many others have to do with")
        order = there if back else nodes.astype(there.dtype)
        if 0 < np.count_nonzero(order == self.same) < self.count:
            raise Unfit("a message that leaves some nodes only")
        turn = self.orders.setdefault(order.tobytes(), len(self.orders))
        if turn >= self.count:
            raise Unfit("nodes in too many orders")
        return turn


def _of_a_node(score: Score, each: int) -> Score | None:
    """Return the score with a lane for each rank of a node, if all nodes do the same."""
    nodes = _Nodes(score.size // each, each)
    try:
        return Score(score.size, each, nodes.count, [nodes.part(part) for part in score.parts])
    except Unfit:
        return None


def scores_of(
    algorithm: Algorithm,
    size: int,
    nbytes: int,
    *,
    root: int = 0,
    arity: int = 2,
    groups: Groups | None = None,
) -> Iterator[Score]:
    """Yield the scores of a schedule, from the most exact and smallest one on.

    Parameters are those of :func:`~mpidist.schedule.cost.cost`.  All ranks of a lane have blocks of
    one length; where they have not, the longest of them counts, in the last scores.  After the last
    score Unfit says why the ranks do not all have a lane of their own, if so.
    """
    flat = groups is None or len(groups) == 1
    each = 1 if flat else _each(groups or ())
    known: dict[str, Any] = {"root": root, "arity": arity, "groups": groups}
    few = [1, 2] if flat else [each] if each else []
    few = [lanes for lanes in few if lanes < size and size % lanes == 0]
    sample = size >> max(size.bit_length() - 10, 0)
    if flat and sample < size and sample % 2 == size % 2:
        # What does not run for all of few ranks does not for many, but says so sooner.
        few = [n for n in few if _runs(algorithm, sample, n, known)]
    uneven = nbytes % max(algorithm.block_count(size, groups=groups), 1) > 0
    reason = ""
    for lanes, longest in [
        *((lanes, False) for lanes in (*few, size)),
        *((lanes, True) for lanes in few if uneven),
    ]:
        try:
            if lanes == size:
                _check_numbers(algorithm, size, known)
            score = _score(algorithm, size, nbytes, lanes, longest=longest, **known)
            if lanes == size > each > 0 and (alike := _of_a_node(score, each)) is not None:
                yield alike
            yield score
        except ScheduleError:
            raise
        except Exception as error:  # Unfit, and whatever a generator raises
            if lanes == size:
                kind = "" if isinstance(error, (Unfit, OverflowError)) else type(error).__name__
                reason = f"{kind}: {error}" if kind else str(error)
    if reason:
        raise Unfit(reason)


def _runs(algorithm: Algorithm, size: int, lanes: int, known: dict[str, Any]) -> bool:
    if algorithm.unsupported(size) is not None:
        return True
    try:
        _score(algorithm, size, 0, lanes, **known)
    except Exception:  # Unfit, and whatever a generator raises
        return False
    return True


def _each(groups: Groups) -> int:
    """Return the ranks of every node, if those follow each other; else 0."""
    each = len(groups[0])
    starts = range(0, len(groups) * each, each)
    alike = all(
        len(group) == each and group[0] == start and group[-1] == start + each - 1
        for group, start in zip(groups, starts)
    )
    flat = alike and all(group == tuple(range(s, s + each)) for group, s in zip(groups, starts))
    return each if flat else 0


def messages_about(
    algorithm: Algorithm, size: int, groups: Groups | None = None
) -> tuple[int, int]:
    """Return about how many messages a schedule has, and how many wait at a time for their ports.

    They are counted on some of its ranks.
    """
    rounds = [
        [sum(_sent(item)) for item in algorithm.schedule(rank, size, groups=groups)]
        for rank in _some(size)
    ]
    every, waiting = (sum(map(function, rounds)) for function in (sum, _most))
    return every * size // len(rounds), waiting * size // len(rounds)


def _most(counts: list[int]) -> int:
    return max(counts, default=0)


def _some(size: int) -> list[int]:
    """Return some ranks, neither only the first and the last ones nor only even ones."""
    return sorted({0, size // 3, min(size // 2 + 1, size - 1), size - 1})


def _check_numbers(algorithm: Algorithm, size: int, known: dict[str, Any]) -> None:
    """Raise Unfit if arrays for all ranks would have too many numbers, by those of some ranks."""
    if size**3 > MOST_NUMBERS:
        check_fans(algorithm, size, known)
    counts, widths = [], []
    for rank in _some(size):
        messages = numbers = width = 0
        for item in algorithm.schedule(rank, size, **known):
            sent = 0
            for step in _steps((item,)):
                if isinstance(step, Copy):
                    numbers += _numbers(step.source_blocks) + _numbers(step.target_blocks)
                    continue
                messages += 1
                sent += isinstance(step, Send)
                numbers += 1 + _numbers(step.blocks)
            width = max(width, sent)
            if messages > MOST_MESSAGES:
                raise Unfit(
                    f"rank {rank} has over {MOST_MESSAGES:,} messages, unlike its neighbour"
                )
        # Of two of four ranks, since one that is unlike the others has a part of its own.
        counts += [numbers] if numbers * size > MOST_NUMBERS else []
        if len(counts) > 1:
            raise Unfit(
                f"a rank has about {min(counts)} peers and blocks, one by one: expected ranges of "
                "blocks, such as span(first, stop), and fewer messages"
            )
        widths.append(width)
    width = sorted(widths)[len(widths) // 2]
    groups = known["groups"]
    ports = 1 if groups is None or len(groups) == 1 else 8 * len(groups[0])  # those of a link
    if 2 * width * width * size * ports > MOST_NUMBERS:
        raise Unfit(f"a rank sends {width} messages in one round, which wait for each other")


def check_fans(algorithm: Algorithm, size: int, known: dict[str, Any]) -> None:
    """Raise Unfit if every rank sends to all others in one round, which shows on few ranks."""
    few = size >> max(size.bit_length() - 10, 0)
    flat = known.get("groups") is None or "groups" not in algorithm.uses
    if few == size or not flat or algorithm.unsupported(few) is not None:
        return
    rounds = algorithm.schedule(few // 2 + 1, few, **known | {"groups": None})
    most = max((sum(_sent(item)) for item in rounds), default=0)
    if few - 1 <= most <= few:
        raise Unfit(f"every rank sends to each of the {size - 1:,} others in one round")


def _sent(item: Any) -> Iterator[bool]:
    """Yield of each step of a round whether it sends."""
    return (isinstance(step, Send) for step in _steps((item,)))


def _steps(schedule: Schedule) -> Iterator[Any]:
    for item in schedule:
        if isinstance(item, Parallel):
            for strand in item.strands:
                yield from _steps(strand)
        else:
            yield from steps_of(item)


def _numbers(spec: Blocks) -> int:
    return len(spec) if isinstance(spec, tuple) else 1
