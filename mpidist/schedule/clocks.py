"""Clocks: the time of a score, of whose lanes many do the same at the same time.

It is the rule of :class:`~mpidist.schedule.cost.TimedMachine`, for straight lines, by numpy: what
happens at one time happens in one go, for all lanes.  Of what recurs one round is run; the clocks
then go on by as many rounds as are alike::

    ring, 8 nodes    1 2 3 4 5 6 7 8   -->   1 2 3  (+ 4 times as long as 3)  8
"""

from __future__ import annotations

import heapq
import itertools
from dataclasses import dataclass
from typing import Any

import numpy as np

from .ranks import Unfit
from .score import Beat, Fork, Line, Score

_SAME = 1 + 1e-9  # as in the machine
MOST_TIMES = 20_000
"""Different times at which something happens, beyond which there is no pattern."""
MOST_WAITING = 1 << 28
"""Messages that wait for a port, counted at each of these times."""


@dataclass(frozen=True)
class Rates:
    """Alpha, beta and gamma of :func:`~mpidist.schedule.cost.cost`, and those of its link."""

    alpha: float
    beta: float
    gamma: float
    far_alpha: float = 0.0
    far_beta: float = 0.0
    linked: bool = False


@dataclass(eq=False)
class _Ends:
    """Sends or receives that wait for the other end, in the order of their keys."""

    keys: np.ndarray
    columns: dict[str, np.ndarray]
    waits: np.ndarray  # whether each does
    left: int

    def take(self, keys: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Return which of the keys are among these, and where; they wait no more."""
        place = np.searchsorted(self.keys, keys)
        place[place == len(self.keys)] = 0
        found = (self.keys[place] == keys) & self.waits[place]
        place = place[found]
        self.waits[place] = False
        self.left -= len(place)
        return found, place


def seconds_of(score: Score, rates: Rates, nodes: np.ndarray) -> float:
    """Return the seconds until the last rank has finished.

    `nodes` has the node of each lane; ranks a turn away are on another node.

    Raises Unfit for a schedule that ends in a deadlock, or in which too much happens apart.
    """
    if score.lanes == 1:
        (part,) = score.parts
        found = _of_one_lane(part.line, rates)
        if found is not None:
            return found
    return _Clocks(score, rates, nodes).run()


def _of_one_lane(line: Line, rates: Rates) -> float | None:
    """Return the seconds of a line that all ranks have; None if it has strands.

    All begin each round at the same time, and then send message by message, in their order.
    """
    each = []
    for beat in line.beats:
        if isinstance(beat, Fork):
            return None
        sent, received = (
            [(e.turns, e.blocks) for e in ends] for ends in (beat.sends, beat.receives)
        )
        if sorted(sent) != sorted(received):
            raise Unfit("a deadlock")
        first, slope = (
            (rates.far_alpha, rates.far_beta) if rates.linked else (rates.alpha, rates.beta)
        )
        each.append(sum(first + e.nbytes * slope for e in beat.sends) + beat.combined * rates.gamma)
    often = np.bincount(np.frombuffer(line.numbers, np.int32), minlength=len(each))
    return float(often @ np.array(each)) if each else 0.0


_QUEUED = ("seat", "path", "index", "order", "seconds")


class _Clocks:
    """All lanes of a score at one time.

    A *seat* is a strand of a lane: ``lane + strand * lanes``, where strand 0 is the schedule, and
    strand k + 1 is strand k of its forks.
    """

    def __init__(self, score: Score, rates: Rates, nodes: np.ndarray):
        self.score, self.rates, self.nodes, self.lanes = score, rates, nodes, score.lanes
        self.lines: list[Line] = []
        self.first = np.zeros(self.lanes, np.int64)  # of each lane: the number of its line
        self.column = np.zeros(self.lanes, np.int64)  # of each lane, in the arrays of its part
        self.whole: list[int] = []  # lanes of each line
        self.paths = 1
        self.forks: dict[int, list[int]] = {}  # of each, by its id: the lines of its strands
        for part in score.parts:
            self.first[part.lanes] = self._add(part.line, len(part.lanes))
            self.column[part.lanes] = np.arange(len(part.lanes))
        self.contended = rates.linked or self.paths > 1 or any(map(_crowded, self.lines))
        seats = self.lanes * self.paths
        self.line = np.zeros(seats, np.int64)
        self.place = np.zeros(seats, np.int64)  # in the line
        self.pending = np.zeros(seats, np.int32)
        self.combines = np.zeros(seats)  # seconds, at the end of the round
        self.order = np.zeros(seats, np.int64)
        self.mark = np.zeros(seats, np.int64)
        several = score.count > 1 or nodes.any()
        self.places = _places(nodes) if several else np.zeros(self.lanes, np.int64)
        groups = int(nodes.max()) + 1
        # Ports are free from a time on; the last one of each kind, which is none, always is.
        self.ports = ("source", "target", "leaves", "enters")[: 4 if rates.linked else 2]
        counts = (self.lanes, self.lanes, groups, groups)[: len(self.ports)]
        self.free = [np.zeros(n + 1) for n in counts]
        self.marks = [np.zeros(n + 1, np.int64) for n in counts]
        self.works_at = np.zeros(self.lanes)
        self.now = self.end = 0.0
        self.waited = 0
        self.over = 0  # lanes that have ended
        self.posted: list[list[dict[str, Any]]] = [[], []]
        self.waiting: list[list[_Ends]] = [[], []]
        self.queue: dict[str, np.ndarray] | None = None
        self.events: list[tuple[float, int, str, Any]] = []
        self.counter, self.turn = itertools.count(), 0
        self.seen: dict[bytes, tuple[Any, ...]] = {}
        # The lane whose rounds are counted, to find what recurs.
        self.watched = max(score.parts, key=lambda part: part.line.rounds).lanes.item(0)
        self.last = -1

    def _add(self, line: Line, lanes: int) -> int:
        number = len(self.lines)
        self.lines.append(line)
        self.whole.append(lanes)
        for beat in line.beats:
            if isinstance(beat, Fork):
                self.paths = max(self.paths, 1 + len(beat.strands))
                for strand in beat.strands:
                    if any(isinstance(inner, Fork) for inner in strand.beats):
                        raise Unfit("strands of strands")
                # Of one fork the lines of the strands follow each other.
                strands = [self._add(strand, lanes) for strand in beat.strands]
                self.forks[id(beat)] = strands
        return number

    def run(self) -> float:
        everyone = np.arange(self.lanes)
        self.line[: self.lanes] = self.first
        self._advance(everyone)
        times = 0
        while self.queue is not None or self.events:
            self._begin()
            self.now = self.events[0][0]
            times += 1
            if times > MOST_TIMES:
                raise Unfit(f"some ranks go on at over {MOST_TIMES} different times")
            self._pass()
            if self.score.count > 1:
                self._recur()
        if self.over < self.lanes:
            raise Unfit("a deadlock")
        return self.end

    # -- rounds ---------------------------------------------------------------------------------

    def _advance(self, seats: np.ndarray) -> None:
        """Post the next rounds of seats, and match what is posted."""
        if not self.contended and len(seats) > 1:
            seats = self._sorted(seats)
        while seats.size:
            # In this order, also those that go on to a further round.
            self.order[seats] = self.turn + np.arange(len(seats))
            self.turn += len(seats)
            later: list[np.ndarray] = []
            while seats.size:
                where = self.line[seats] * (1 << 32) + self.place[seats]
                again = [self._step(here, later) for here in _alike(where, seats)]
                seats = np.concatenate(again)
            if later:
                seats = np.concatenate(later)
                seats = seats[np.argsort(self.order[seats % self.lanes], kind="stable")]
        self._match()

    def _sorted(self, seats: np.ndarray) -> np.ndarray:
        if 8 * len(seats) < len(self.mark):
            return np.sort(seats)
        among = np.zeros(len(self.mark), bool)
        among[seats] = True
        return np.flatnonzero(among)

    def _step(self, seats: np.ndarray, later: list[np.ndarray]) -> np.ndarray:
        """Begin the round that seats of one line have next; return the seats that can go on.

        To `later` are appended those that begin or end a fork.
        """
        number, place = int(self.line[seats[0]]), int(self.place[seats[0]])
        line = self.lines[number]
        if place == len(line.numbers):
            self._over(seats, later)
            return seats[:0]
        self.place[seats] += 1
        beat = line.beats[line.numbers[place]]
        if isinstance(beat, Fork):
            self.pending[seats] = len(beat.strands)
            for k, strand in enumerate(self.forks[id(beat)]):
                child = seats + (k + 1) * self.lanes
                self.line[child], self.place[child] = strand, 0
                later.append(child)
            return seats[:0] if beat.strands else seats
        if not beat.sends and not beat.receives:
            return seats
        self._post(seats, beat, len(seats) == self.whole[number])
        return seats[:0]

    def _over(self, seats: np.ndarray, later: list[np.ndarray]) -> None:
        if seats[0] < self.lanes:
            self.over += len(seats)
            self.end = max(self.end, self.now)
            return
        parents = seats % self.lanes
        self.pending[parents] -= 1
        self.order[parents] = self.order[seats]
        later.append(parents[self.pending[parents] == 0])

    def _once(self, items: np.ndarray) -> np.ndarray:
        """Return the indices of the last place of each item."""
        here = np.arange(len(items))
        self.mark[items] = here
        return np.flatnonzero(self.mark[items] == here)

    def _post(self, seats: np.ndarray, beat: Beat, whole: bool) -> None:
        lanes, rates = seats % self.lanes, self.rates
        path = int(seats[0]) // self.lanes
        whole = whole and bool((lanes[1:] > lanes[:-1]).all())
        columns = None if whole else self.column[lanes]

        def of(numbers: Any) -> Any:
            if not isinstance(numbers, np.ndarray):
                return numbers
            return numbers if columns is None else numbers[columns]

        self.pending[seats] = len(beat.sends) + len(beat.receives)
        self.combines[seats] = of(beat.combined) * rates.gamma
        for end in beat.sends:
            target, turns, nbytes = of(end.lane), of(end.turns), of(end.nbytes)
            seconds = rates.alpha + nbytes * rates.beta
            ports: dict[str, Any] = {"source": lanes, "target": target}
            if rates.linked:
                leaves, enters = self.nodes[lanes], self.nodes[target]
                far = (turns != 0) | (leaves != enters)
                seconds = np.where(far, rates.far_alpha + nbytes * rates.far_beta, seconds)
                none = len(self.free[2]) - 1
                ports |= {
                    "leaves": np.where(far, leaves, none),
                    "enters": np.where(far, enters, none),
                }
            key = ((path * self.score.count + turns) * self.lanes + lanes) * self.lanes + target
            self.posted[0].append(
                {
                    **{"key": key, "seat": seats, "path": path, "index": end.index},
                    **{"order": self.order[seats], "seconds": seconds, "blocks": end.blocks},
                    **ports,
                }
            )
        for end in beat.receives:
            source, turns = np.asarray(of(end.lane), np.int64), of(end.turns)
            key = ((path * self.score.count + turns) * self.lanes + source) * self.lanes + lanes
            self.posted[1].append(
                {
                    **{"key": key, "seat": seats, "index": end.index},
                    **{"order": self.order[seats], "blocks": end.blocks},
                }
            )

    # -- matching -------------------------------------------------------------------------------

    def _match(self) -> None:
        """Match the posted sends and receives, and append the messages to the queue."""
        sends, receives = (_joined(each) for each in self.posted)
        self.posted = [[], []]
        found: list[tuple[dict[str, np.ndarray], dict[str, np.ndarray]]] = []
        if sends is not None and receives is not None:
            # Most seats have posted one receive, which is then found by the seat.
            seat = sends["target"] + sends["path"] * self.lanes
            self.mark[seat] = -1
            self.mark[receives["seat"]] = np.arange(len(receives["seat"]))
            at = self.mark[seat]
            same = (at >= 0) & (receives["key"][at] == sends["key"])
            found.append((_at(sends, same), _at(receives, at[same])))
            left = np.ones(len(receives["key"]), bool)
            left[at[same]] = False
            sends, receives = _at(sends, ~same), _at(receives, left)
        for kind, ends in enumerate((sends, receives)):
            for other in self.waiting[1 - kind]:
                if ends is None or not len(ends["key"]):
                    break
                which, place = other.take(ends["key"])
                if place.size:
                    older = {name: column[place] for name, column in other.columns.items()}
                    older["order"] = np.full(len(place), -1)
                    pair = _at(ends, which), older
                    found.append(pair if kind == 0 else pair[::-1])
                    ends = _at(ends, ~which)
            self.waiting[1 - kind] = [each for each in self.waiting[1 - kind] if each.left]
            if kind == 0:
                sends = ends
            else:
                receives = ends
        if sends is not None and len(sends["key"]):
            wait = _waiting(sends)
            if receives is not None and len(receives["key"]):
                which, place = wait.take(receives["key"])
                if place.size:
                    found.append((_at(wait.columns, place), _at(receives, which)))
                    receives = _at(receives, ~which)
            if wait.left:
                self.waiting[0].append(wait)
        if receives is not None and len(receives["key"]):
            self.waiting[1].append(_waiting(receives))
        for send, receive in found:
            if (send["blocks"] != receive["blocks"]).any():
                raise Unfit("a message of another length")
        if any(send["key"].size for send, _ in found):
            self._enqueue(found)

    def _enqueue(self, found: list[tuple[dict[str, np.ndarray], dict[str, np.ndarray]]]) -> None:
        found = [pair for pair in found if pair[0]["key"].size]
        names = (*_QUEUED, *self.ports)
        batch = {name: _put_together([send[name] for send, _ in found]) for name in names}
        batch["to"] = _put_together([receive["seat"] for _, receive in found])
        if self.contended:
            receive = {n: np.concatenate([r[n] for _, r in found]) for n in ("order", "index")}
            later = receive["order"] > batch["order"]
            turn = np.maximum(receive["order"], batch["order"])
            step = np.where(later, receive["index"], batch["index"])
            place = self.places[batch["source"]]
            batch = _at(batch, np.lexsort((step, turn, place, batch["index"], batch["path"])))
        queue = self.queue
        if queue is not None:
            batch = {name: np.concatenate([queue[name], batch[name]]) for name in batch}
        self.queue = batch
        # Each port begins one message at a time, so the last of n has waited n times.
        counts = np.bincount(batch["seat"])
        self._check_waiting(int((counts * (counts + 1) // 2).sum()))

    def _check_waiting(self, more: int) -> None:
        if self.waited + more > MOST_WAITING:
            number = 0 if self.queue is None else len(self.queue["seat"])
            raise Unfit(f"too many messages wait for their ports: {number} at once")

    # -- time -----------------------------------------------------------------------------------

    def _begin(self) -> None:
        """Begin the messages in the queue whose ports are free, the first ones first."""
        queue = self.queue
        if queue is None:
            return
        now, limit = self.now, self.now * _SAME
        self.waited += len(queue["seat"])
        self._check_waiting(0)
        ports = [queue[name] for name in self.ports]
        free = np.logical_and.reduce([at[port] <= limit for at, port in zip(self.free, ports)])
        able, begun = np.flatnonzero(free), np.zeros(len(free), bool)
        mine = [port[able] for port in ports]
        while able.size:
            here = np.arange(len(able))
            first = np.ones(len(able), bool)
            for mark, port in zip(self.marks, mine):
                mark[port[::-1]] = here[::-1]
                first &= (mark[port] == here) | (port == len(mark) - 1)
            starts = able[first]
            begun[starts] = True
            until = now + queue["seconds"][starts]
            left = ~first
            for at, port in zip(self.free, mine):
                at[port[first]] = until
                at[-1] = 0.0
            if left.any():
                for at, port in zip(self.free, mine):
                    left &= at[port] <= limit
            able, mine = able[left], [port[left] for port in mine]
        if begun.all():
            started, self.queue = queue, None
        else:
            started, self.queue = _at(queue, begun), _at(queue, ~begun)
        if not started["seat"].size:
            return
        for part in _equal(started["seconds"]):
            end = now + float(started["seconds"][part][0])
            self._plan(end, "messages", (started["seat"][part], started["to"][part]))

    def _plan(self, time: float, kind: str, what: Any) -> None:
        heapq.heappush(self.events, (time, next(self.counter), kind, what))

    def _pass(self) -> None:
        """Let everything happen that happens now."""
        ready = []
        while self.events and self.events[0][0] <= self.now * _SAME:
            _, _, kind, what = heapq.heappop(self.events)
            if kind == "works":
                ready.append(what)
                continue
            both = np.array(what).T.ravel() if self.contended else np.concatenate(what)
            np.subtract.at(self.pending, both, np.int32(1))
            done = both[self.pending[both] == 0]
            done = done[self._once(done)]
            works = self.combines[done] > 0
            ready.append(done[~works])
            self._work(done[works])
        self._advance(np.concatenate(ready))

    def _work(self, seats: np.ndarray) -> None:
        if not seats.size:
            return
        lanes, seconds = seats % self.lanes, self.combines[seats]
        if self.paths == 1:
            ends = self.now + seconds
        else:
            ends = np.empty(len(seats))
            for k, lane in enumerate(lanes.tolist()):  # one after the other on each lane
                ends[k] = max(self.now, self.works_at[lane]) + seconds[k]
                self.works_at[lane] = ends[k]
        for part in _equal(ends):
            self._plan(float(ends[part][0]), "works", seats[part])

    # -- what recurs ----------------------------------------------------------------------------

    def _recur(self) -> None:
        """Go on by many rounds at once if the lanes are as they were some rounds ago.

        They are if they have the same messages under way, and those end after the same times.
        """
        place = int(self.place[self.watched])
        if place == self.last:
            return
        self.last = place
        queue, events = self.queue, sorted(self.events)
        shape: list[Any] = [self.line[: self.lanes], self.pending]
        for seat in range(self.lanes):
            line, at = self.lines[self.line[seat]], int(self.place[seat])
            shape.append(np.array([line.numbers[at - 1] if at else -1]))
        times = [np.maximum(each - self.now, 0.0) for each in self._ports()]
        for time, _, _, what in events:
            shape.append(np.array(what))
            times.append(np.array([time - self.now]))
        for kind in (0, 1):
            shape += [each.keys[each.waits] for each in self.waiting[kind]]
        if queue is not None:
            shape += [queue[name] for name in ("seat", "to", "index")]
        key = b"|".join(np.ascontiguousarray(each).tobytes() for each in shape)
        relative = np.concatenate(times)
        places = self.place.copy()
        before = self.seen.get(key)
        self.seen[key] = (self.now, places, relative)
        if before is None:
            return
        then, earlier, was = before
        period = self.now - then
        if period <= 0 or not np.allclose(relative, was, rtol=0.0, atol=1e-10 * period):
            return
        laps = min(
            (
                self._alike_for(int(line), int(at), int(at - old))
                for line, at, old in set(zip(self.line.tolist(), places.tolist(), earlier.tolist()))
                if at > old
            ),
            default=0,
        )
        if laps < 1:
            return
        self.place += laps * (places - earlier)
        gone = laps * period
        self.now += gone
        self.events = [(time + gone, *rest) for time, *rest in self.events]
        for each in self._ports():
            each += gone
        self.seen.clear()

    def _ports(self) -> tuple[np.ndarray, ...]:
        return (*self.free, self.works_at)

    def _alike_for(self, line: int, at: int, period: int) -> int:
        """Return how often the last `period` rounds of a line, before `at`, recur behind them."""
        numbers = np.frombuffer(self.lines[line].numbers, np.int32)
        alike = numbers[at:] == numbers[at - period : len(numbers) - period]
        count = len(alike) if alike.all() else int(np.argmin(alike))
        return count // period - 1


def _places(nodes: np.ndarray) -> np.ndarray:
    """Return the place of each lane in its node."""
    order = np.argsort(nodes, kind="stable")
    first = np.searchsorted(nodes[order], nodes)
    places = -first
    places[order] += np.arange(len(nodes))
    return places


def _crowded(line: Line) -> bool:
    return any(
        isinstance(beat, Beat) and (len(beat.sends) > 1 or len(beat.receives) > 1)
        for beat in line.beats
    )


def _alike(keys: np.ndarray, items: np.ndarray) -> list[np.ndarray]:
    """Return the items of each key, in their order."""
    if (keys == keys[0]).all():
        return [items]
    order = np.argsort(keys, kind="stable")
    return np.split(items[order], np.flatnonzero(np.diff(keys[order])) + 1)


def _equal(values: np.ndarray) -> list[Any]:
    """Return the indices of equal values, apart from rounding."""
    if (values == values[0]).all():
        return [slice(None)]
    order = np.argsort(values, kind="stable")
    ordered = values[order]
    return np.split(order, np.flatnonzero(ordered[1:] > ordered[:-1] * (1 + 1e-12)) + 1)


def _waiting(ends: dict[str, np.ndarray]) -> _Ends:
    columns = _at(ends, np.argsort(ends["key"], kind="stable"))
    keys = columns["key"]
    if (keys[1:] == keys[:-1]).any():
        raise Unfit("two messages of a round to one peer")
    return _Ends(keys, columns, np.ones(len(keys), bool), len(keys))


def _joined(posted: list[dict[str, Any]]) -> dict[str, np.ndarray] | None:
    if not posted:
        return None
    columns = {}
    for name in posted[0]:
        pieces = [np.broadcast_to(each[name], each["seat"].shape) for each in posted]
        columns[name] = _put_together(pieces)
    return columns


def _put_together(pieces: list[np.ndarray]) -> np.ndarray:
    return pieces[0] if len(pieces) == 1 else np.concatenate(pieces)


def _at(columns: dict[str, np.ndarray], which: np.ndarray) -> dict[str, np.ndarray]:
    if which.dtype == bool and which.all():
        return columns
    return {name: column[which] for name, column in columns.items()}
