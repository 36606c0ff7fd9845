"""``mpidist tune``: races between the candidates, and the tuning table of the winners."""

from __future__ import annotations

import math
import signal
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from time import perf_counter
from typing import Any

import numpy as np

from ..calls.prepare import Caller
from ..communicator.communicator import Communicator
from ..communicator.explain import example_call
from ..errors import ConfigError
from ..measure import median, spread
from ..operations import find_op
from ..selection.tuning import PRIVATE, Key, TuningEntry, TuningTable, kind_for
from .candidates import Candidate, memories
from .cases import Workload
from .runner import Contest, Entrant, OnStep, Settings, in_turn, no_garbage_collection

ROOT_WEIGHT = 1 << 20  # bytes of a size that gets twice the time of an empty call


@dataclass(frozen=True)
class TuningSettings:
    """Settings of a tuning run: collectives, sizes, dtype and time budget.

    Parameters
    ----------
    collectives : sequence of str
        Names of the collectives.
    sizes : sequence of int
        Bytes of the whole buffer, ascending.
    dtype : dtype
        Dtype of the elements.
    budget : float
        Seconds for everything together.
    """

    collectives: Sequence[str]
    sizes: Sequence[int]
    dtype: Any = "float32"
    budget: float = 60.0


@dataclass(frozen=True)
class Cell:
    """One race of the tuner: a collective at one size in one kind of memory, with an end time.

    `works` has the test data of that kind of memory; `until` is as of ``time.perf_counter`` on
    this rank.
    """

    collective: str
    memory: str
    nbytes: int
    works: dict[str, Workload]
    until: float


class Stop:
    """Records whether the run should stop early: by Ctrl-C, or SIGTERM of the launcher."""

    def __init__(self) -> None:
        self.wanted = False

    def __call__(self) -> bool:
        """Return whether a stop was requested."""
        return self.wanted

    @contextmanager
    def listening(self) -> Iterator[None]:
        """Within the block, record the first SIGINT and first SIGTERM; a second acts as usual."""
        before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}

        def note(number: int, frame: Any) -> None:
            self.wanted = True
            signal.signal(number, before[signal.Signals(number)])

        for number in before:
            signal.signal(number, note)
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)


def count_cells(comm: Communicator, settings: TuningSettings) -> int:
    """Return the number of races (cells) of a tuning run, for a progress bar."""
    sizes = {c: 1 if c == "barrier" else len(settings.sizes) for c in settings.collectives}
    return sum(len(memories(comm, c)) * sizes[c] for c in settings.collectives)


def cells(
    comm: Communicator,
    settings: TuningSettings,
    stopped: Callable[[], bool],
    cost: Callable[[Cell], float],
) -> Iterator[Cell]:
    """Yield the races of a run (cells), each with its share of the time; collective.

    They are the same on every rank, but for `until`, which counts on rank 0 only.  Each collective
    in each kind of memory has an equal share of the budget; of it, a size has a part that grows
    with the square root of its bytes.  Time that one cell leaves goes to later ones.  When the time
    left is less than a cell's `cost`, it and the larger sizes are omitted.

    Parameters
    ----------
    comm : Communicator
        The ranks that measure.
    settings : TuningSettings
        Collectives, sizes, dtype and time budget of the run.
    stopped : callable
        Returns on rank 0 whether to stop.
    cost : callable
        ``cost(cell)`` returns the least seconds that a cell takes; rank 0's value counts.
    """
    end = perf_counter() + settings.budget
    groups = [(c, memory) for c in settings.collectives for memory in memories(comm, c)]
    work: Workload | None = None
    for index, (collective, memory) in enumerate(groups):
        share = perf_counter() + (end - perf_counter()) / (len(groups) - index)
        sizes = [0] if collective == "barrier" else sorted(settings.sizes)
        if work is None or work.collective != collective:
            work = Workload(collective, comm.rank, comm.size, 0, max(sizes), settings.dtype)
        place = work if memory == PRIVATE else work.elsewhere(comm.empty)
        weights = [1 + (nbytes / ROOT_WEIGHT) ** 0.5 for nbytes in sizes]
        for k, nbytes in enumerate(sizes):
            now = perf_counter()
            until = now + max(share - now, 0.0) * weights[k] / sum(weights[k:])
            cell = Cell(collective, memory, nbytes, {memory: place}, until)
            if _agree(comm, stopped() or now + cost(cell) > end):
                break
            yield cell


def _agree(comm: Communicator, value: bool) -> bool:
    """Return on every rank the truth value that rank 0 passed; collective."""
    return bool(comm.broadcast(np.array([value], np.int8), root=0)[0])


LEAST = 2  # iterations before the first candidate drops out
MOST = 200  # iterations
CHECKED = 1 << 20  # bytes up to which every result is checked; above, the first two of a candidate
HOPELESS = 3.0  # a candidate slower than the fastest by this factor, from HOPELESS_BYTES on,
HOPELESS_BYTES = 64 << 10  # is not measured at larger sizes
CLOSE = 1.1  # a candidate slower than the fastest by at most this factor stays in

Keep = Callable[[list[tuple[float, Entrant]]], list[Entrant]]


def candidates(
    comm: Communicator, collective: str, nbytes: int, memory: str
) -> tuple[list[str], str]:
    """Return the names of all candidates that can serve a call, and the choice of "auto".

    Trees are in the list twice, with arity 2 and 4 (``tree:2``).  The choice of "auto" may be
    named with its parts (``hierarchical/direct/ring``), and is then one more candidate.  Schedules
    in symmetric memory are not: the executor "symmetric" runs those that are shipped.
    """
    chosen, every = comm.explain(collective, nbytes, memory=memory)
    names: list[str] = []
    for one in every:
        if one.can and one.executor in (one.name, "messages"):
            tree = one.choice is not None and "arity" in one.choice.algorithm.uses
            names += [f"{one.name}:2", f"{one.name}:4"] if tree else [one.name]
    name = chosen.name
    if f"{name}:2" in names:
        name = f"{name}:2"
    return (names if name in names else [*names, name]), name


def faster_half(*kept: str) -> Keep:
    """Return a function that selects the entrants of the next heat: the faster half.

    Those within 10 % of the fastest, and the names in `kept`, are selected too.  See
    :meth:`Race.run`.
    """

    def keep(ranking: list[tuple[float, Entrant]]) -> list[Entrant]:
        half, limit = -(-len(ranking) // 2), ranking[0][0] * CLOSE
        return [
            entry
            for place, (seconds, entry) in enumerate(ranking)
            if place < half or seconds <= limit or entry.name in kept
        ]

    return keep


def all_but_the_slow(*kept: str, limit: float = 1.5) -> Keep:
    """Return a function that selects the entrants of the next heat: all but the slow.

    Slow is more than `limit` × the time of the fastest; the names in `kept` are selected anyway.
    See :meth:`Race.run`.
    """

    def keep(ranking: list[tuple[float, Entrant]]) -> list[Entrant]:
        least = ranking[0][0]
        return [e for seconds, e in ranking if seconds <= limit * least or e.name in kept]

    return keep


class Race(Contest):
    """A race between the candidates of one collective, size and kind of memory.

    It has several heats, after each of which the slower candidates drop out.

    Parameters
    ----------
    comm, works, nbytes
        See :class:`~mpidist.bench.runner.Contest`.
    memory : str
        Kind of memory of all arrays.
    until : float
        End of the race, as of ``time.perf_counter`` on rank 0.
    stopped : callable
        Returns on rank 0 whether to stop.
    """

    def __init__(
        self,
        comm: Communicator,
        works: Mapping[str, Workload],
        nbytes: int,
        memory: str,
        until: float,
        stopped: Callable[[], bool] = lambda: False,
    ):
        super().__init__(comm, {memory: works[memory]}, nbytes, Settings(limit=float("inf")))
        self.memory, self.until, self.stopped = memory, until, stopped
        self.cycle_seconds = 0.0  # time of the last cycle, checks included
        self.complete = True  # every candidate was called

    def must_end(self) -> bool:
        """Return whether the time `until` has passed, or a stop was requested, on this rank.

        Not collective: :meth:`cycle` uses the answer of rank 0, which ends the heat on all ranks.
        """
        return self.stopped() or perf_counter() > self.until

    def run(self, names: Sequence[str], keep: Keep) -> dict[str, list[float]]:
        """Run the race between `names`; return the finalists' seconds by name, one per iteration.

        ``keep(ranking)`` selects the entrants of the next heat from (median, entrant) pairs,
        fastest first.  Candidates that dropped out are still in `entries`, with fewer times.
        """
        end, begun = self.until, perf_counter()
        for name in names:
            self.admit(Candidate(name, self.memory))
            if self.over and self.entries:
                self.complete = name == names[-1]
                break
        self._time(self.entries)  # the second call with an array binds its program
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

    def _heat(self, alive: list[Entrant], end: float) -> list[Entrant]:
        """Time the candidates `alive` in turns for one heat, and return them all.

        The heats share the time until `end`: about half of the candidates drop out after each, and
        the last one lasts until `end` (``time.perf_counter``).
        """
        heats = max(len(alive).bit_length() - 1, 1)
        now = perf_counter()
        self.until = end if heats == 1 else now + (end - now) / heats
        for k in range(MOST):
            self._time(in_turn(alive, len(alive[0].times)))
            if self.over and k + 1 >= LEAST or len(alive[0].times) >= MOST:
                break
        self.until = end
        self.cycle([])  # sets `over` anew, on all ranks alike
        return alive

    def _time(self, order: list[Entrant]) -> None:
        begun = perf_counter()
        for entry, (seconds, _) in zip(order, self.cycle(order)):
            entry.times.append(seconds)
        self.cycle_seconds = perf_counter() - begun

    @property
    def wrong(self) -> list[str]:
        """Names of the candidates with a wrong result on any rank."""
        return [entry.name for entry in self.entries if entry.wrong]


class History:
    """Results of the races at smaller sizes, for one collective and kind of memory.

    It holds the last time of each candidate, and which ones are hopelessly slow: over 3 × the time
    of the fastest, at 64 KiB or more.
    """

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}  # at the last size at which each was measured
        self.hopeless: set[str] = set()
        self.nbytes, self.cycle = 1, 0.0

    def order(self, names: list[str], usual: str) -> list[str]:
        """Return the `names` to measure, in order: `usual`, then new ones, then the fastest first.

        `usual` is the choice of "auto".  Other names that were hopelessly slow at a smaller size
        are left out.  If time runs out, the last ones are not measured.
        """
        left = [n for n in names if n not in self.hopeless or n == usual]
        return sorted(left, key=lambda n: (n != usual, self.seconds.get(n, 0.0)))

    def cost(self, nbytes: int) -> float:
        """Return a lower bound of the seconds of a cycle at `nbytes`; 0 before the first race.

        A cycle calls each remaining candidate once.  The bound is the time of the last cycle at the
        last size, multiplied by the ratio of the sizes.
        """
        return self.cycle * max(nbytes / max(self.nbytes, 1), 1.0)

    def learn(self, race: Race) -> dict[str, float]:
        """Record the result of a race; return the median seconds of each candidate, by name."""
        medians = {e.name: median(e.times) for e in race.entries if e.times}
        self.seconds.update(medians)
        self.nbytes, self.cycle = max(race.case.nbytes, 1), race.cycle_seconds
        if race.case.nbytes >= HOPELESS_BYTES and medians:
            limit = HOPELESS * min(medians.values())
            self.hopeless |= {name for name, s in medians.items() if s > limit}
        return medians


MARGIN = 1.03  # a choice changes only if another candidate is faster by more than this factor


@dataclass
class Tuned:
    """Results of a run of the tuner.

    Attributes
    ----------
    table : TuningTable
        The tuning table; grows while sizes are measured.
    wrong : list of str
        Collective, candidate and bytes of wrong results.
    measured, left_out : int
        Numbers of sizes in the table, and not in it (mostly for lack of time), over all collectives
        and kinds of memory.
    """

    table: TuningTable
    wrong: list[str] = field(default_factory=list)
    measured: int = 0
    left_out: int = 0


def tune(
    comm: Communicator,
    settings: TuningSettings,
    about: Mapping[str, Any],
    on_step: OnStep = lambda collective, nbytes: None,
    on_table: Callable[[TuningTable], Any] = lambda table: None,
    stopped: Callable[[], bool] = lambda: False,
) -> Tuned:
    """Find the fastest candidate of each call; collective, with equal settings on all ranks.

    Parameters
    ----------
    comm : Communicator
        The ranks that measure.
    settings : TuningSettings
        Collectives, sizes, dtype and time budget of the run.
    about : mapping
        Description of the run, stored in the table.
    on_step : callable
        Called with collective and bytes before each size.
    on_table : callable
        Called on every rank with the table after each size that was added to it.
    stopped : callable
        Returns on rank 0 whether to stop; sizes measured so far are kept.

    Returns
    -------
    Tuned
        The same on every rank.
    """
    found = Tuned(TuningTable((), about))
    histories: dict[tuple[str, str], History] = {}
    chosen: dict[Key, dict[int, str]] = {}
    times: dict[Key, dict[int, dict[str, float]]] = {}

    def history(cell: Cell) -> History:
        return histories.setdefault((cell.collective, cell.memory), History())

    with no_garbage_collection():
        for cell in cells(comm, settings, stopped, lambda c: history(c).cost(c.nbytes)):
            on_step(cell.collective, cell.nbytes)
            before = history(cell)
            race = Race(comm, cell.works, cell.nbytes, cell.memory, cell.until, stopped)
            nbytes = race.case.nbytes
            names, usual = candidates(comm, cell.collective, nbytes, cell.memory)
            finalists = race.run(before.order(names, usual), faster_half(usual))
            found.wrong += [f"{cell.collective} {name} {nbytes} B" for name in race.wrong]
            right = {n: t for n, t in finalists.items() if n not in race.wrong and t}
            if not right:
                continue
            key = key_of(comm, cell.collective, cell.memory, settings.dtype)
            choices = chosen.setdefault(key, {})
            previous = choices[max(choices)] if choices else usual
            choices[nbytes] = settle(right, usual, previous)
            times.setdefault(key, {})[nbytes] = before.learn(race)
            found.table.entries[key] = TuningEntry.from_points(key, choices, times[key])
            found.measured += 1
            on_table(found.table)
    found.left_out = count_cells(comm, settings) - found.measured
    return found


def settle(finalists: Mapping[str, list[float]], usual: str, previous: str) -> str:
    """Return the new choice: `usual`, else `previous`, unless the fastest one is clearly faster.

    `finalists` has the seconds of each iteration by name, `usual` is the present choice of "auto",
    and `previous` is the tuner's choice at the next smaller size.  Clearly faster means by more
    than 3 %, and by more than twice the statistical error of the medians (:func:`uncertainty`): on
    a busy machine `usual` stays.
    """
    medians = {name: median(seconds) for name, seconds in finalists.items()}
    best = min(medians, key=lambda name: medians[name])
    for name in (usual, previous):
        if name in medians:
            noise = 2 * math.hypot(uncertainty(finalists[name]), uncertainty(finalists[best]))
            if medians[name] <= max(MARGIN, 1 + noise) * medians[best]:
                return name
    return best


def uncertainty(seconds: Sequence[float]) -> float:
    """Return the standard error of the median, divided by the median.

    For n normally distributed times it is 1.253 σ / √n, and their standard deviation σ is 1.483
    times half the interquartile range.  For fewer than four times, half of their range (largest
    minus smallest) is taken in place of half the interquartile range.
    """
    half = spread(seconds)
    if half is None:
        half = (max(seconds) - min(seconds)) / 2 / median(seconds)
    return 1.253 * 1.483 * half / math.sqrt(len(seconds))


def key_of(comm: Communicator, collective: str, memory: str, dtype: Any) -> Key:
    """Return the key of the tuning table's entry for calls of a collective on arrays of `dtype`."""
    call = example_call(Caller(comm.rank, comm.size), collective, 8, find_op("sum"))
    call = replace(call, dtype=np.dtype(dtype))
    library = comm.backend.library
    return Key(library, tuple(map(len, comm.topology.groups)), kind_for(call), collective, memory)


def existing_table(comm: Communicator, path: str) -> TuningTable | None:
    """Return the tuning table in a file, which rank 0 reads; None without the file; collective.

    Raises
    ------
    ConfigError
        On every rank, if the file is there but holds no tuning table.
    """
    found, wrong = None, ""
    if comm.rank == 0 and Path(path).exists():
        try:
            found = TuningTable.load(path)
        except ConfigError as error:
            wrong = f"{error}: expected a table of `mpidist tune`, or a new file"
    found, wrong = comm.broadcast_object((found, wrong))
    if wrong:
        raise ConfigError(wrong)
    return found
