"""A race at one size: everyone starts, the slower ones drop out, those that are left run on."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from time import perf_counter
from typing import Any

from ..measure import median
from .cases import Workload
from .contenders import Contender
from .series import Entry, Field, Settings, in_turn

LEAST = 2  # iterations before anyone drops out
MOST = 200  # iterations
CHECKED = 1 << 20  # above, only the first two results of each contender are looked at
FROM = 64 << 10  # bytes from which a way that is behind by HOPELESS does not catch up
HOPELESS = 3.0
CLOSE = 1.1  # whoever is so near to the fastest stays in

Keep = Callable[[list[tuple[float, Entry]]], list[Entry]]


def candidates(comm: Any, collective: str, nbytes: int, memory: str) -> tuple[list[str], str]:
    """Give every way that can serve, trees in two arities, and the one that "auto" takes now.

    That one may be named with its parts (``hierarchical/direct/ring``): it takes part as it is.
    """
    chosen, every = comm.explain(collective, nbytes, memory=memory)
    names: list[str] = []
    for way in every:
        if way.can:
            tree = way.choice is not None and "arity" in way.choice.algorithm.uses
            names += [f"{way.name}:2", f"{way.name}:4"] if tree else [way.name]
    name = chosen.name
    if f"{name}:2" in names:
        name = f"{name}:2"
    return (names if name in names else [*names, name]), name


def faster_half(*kept: str) -> Keep:
    """Make a rule that keeps the faster half, whoever is close to the fastest, and some others."""

    def keep(ranking: list[tuple[float, Entry]]) -> list[Entry]:
        half, limit = -(-len(ranking) // 2), ranking[0][0] * CLOSE
        return [
            entry
            for place, (seconds, entry) in enumerate(ranking)
            if place < half or seconds <= limit or entry.name in kept
        ]

    return keep


def all_but_the_slow(*kept: str, limit: float = 1.5) -> Keep:
    """Make a rule that drops who takes more than `limit` times the least, but for some."""

    def keep(ranking: list[tuple[float, Entry]]) -> list[Entry]:
        least = ranking[0][0]
        return [e for seconds, e in ranking if seconds <= limit * least or e.name in kept]

    return keep


class Race(Field):
    """Contenders of one collective, size and kind of memory.

    Parameters
    ----------
    comm, works, nbytes
        See :class:`~mpidist.bench.series.Field`.
    memory : str
        Where the arrays of all are.
    until : float
        When it ends, of ``time.perf_counter``; rank 0's counts.
    stopped : callable
        Tells on rank 0 whether the user wants it to end.
    """

    def __init__(
        self,
        comm: Any,
        works: Mapping[str, Workload],
        nbytes: int,
        memory: str,
        until: float,
        stopped: Callable[[], bool] = lambda: False,
    ):
        super().__init__(comm, {memory: works[memory]}, nbytes, Settings(limit=float("inf")))
        self.memory, self.until, self.stopped = memory, until, stopped
        self.cycle_seconds = 0.0  # of the last one, everything included
        self.complete = True  # everyone was called

    def must_end(self) -> bool:
        """Tell, on rank 0, whether this part of the race is over."""
        return self.stopped() or perf_counter() > self.until

    def run(self, names: Sequence[str], keep: Keep) -> dict[str, list[float]]:
        """Race; give the times of those that were in it to the end, iteration by iteration.

        Who dropped out is still in `entries`, with fewer times.
        """
        end, begun = self.until, perf_counter()
        for name in names:
            self.admit(Contender(name, self.memory))
            if self.over and self.entries:
                self.complete = name == names[-1]
                break
        self._time(self.entries)  # the second call with an array is the first that is bound
        self.checking = self.case.nbytes <= CHECKED
        alive = list(self.entries)
        for entry in alive:
            if not self.over:
                entry.times.clear()
        while not self.over and alive and len(alive[0].times) < MOST:
            alive = [entry for entry in self._heat(alive, end) if not entry.wrong]
            if not alive:
                break
            alive = keep(sorted(((median(e.times), e) for e in alive), key=lambda pair: pair[0]))
        self.spent = perf_counter() - begun
        return {entry.name: entry.times for entry in alive}

    def _heat(self, alive: list[Entry], end: float) -> list[Entry]:
        """Let all that are in have their share of the time that is left."""
        heats = max(len(alive).bit_length() - 1, 1)
        now = perf_counter()
        self.until = end if heats == 1 else now + (end - now) / heats
        for k in range(MOST):
            self._time(in_turn(alive, len(alive[0].times)))
            if self.over and k + 1 >= LEAST or len(alive[0].times) >= MOST:
                break
        self.until = end
        self._time([])
        return alive

    def _time(self, order: list[Entry]) -> None:
        begun = perf_counter()
        for entry, seconds in zip(order, self.cycle(order)):
            entry.times.append(seconds)
        self.cycle_seconds = perf_counter() - begun

    @property
    def wrong(self) -> list[str]:
        """Who gave a wrong result, on any rank."""
        return [entry.name for entry in self.entries if entry.wrong]


class History:
    """What the sizes before of one collective and kind of memory have shown."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}  # of the last size at which each was measured
        self.hopeless: set[str] = set()
        self.nbytes, self.cycle = 1, 0.0

    def order(self, names: list[str], usual: str) -> list[str]:
        """Put who was fast first: if time is short, the others are not called."""
        left = [n for n in names if n not in self.hopeless or n == usual]
        return sorted(left, key=lambda n: (n != usual, self.seconds.get(n, 0.0)))

    def cost(self, nbytes: int) -> float:
        """Give the seconds that the fastest few will take at the least."""
        return self.cycle * max(nbytes / max(self.nbytes, 1), 1.0)

    def learn(self, race: Race) -> dict[str, float]:
        """Take in a race; give the medians."""
        medians = {e.name: median(e.times) for e in race.entries if e.times}
        self.seconds.update(medians)
        self.nbytes, self.cycle = max(race.case.nbytes, 1), race.cycle_seconds
        if race.case.nbytes >= FROM and medians:
            limit = HOPELESS * min(medians.values())
            self.hopeless |= {name for name, s in medians.items() if s > limit}
        return medians
