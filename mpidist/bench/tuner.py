"""``mpidist tune``: races between the candidates, and the tuning table of the winners.

A table must not be worse than none, on a busy machine neither.  So it begins as what "auto" chooses
without it, at every size, and a candidate replaces that at one size only if it is faster twice::

    first pass     all sizes: all candidates, in heats      winner, if clearly faster than "auto"
    second pass    those sizes: winner and "auto" alone     confirmed, if clearly faster again
"""

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
from ..communicator.agreement import from_rank_0
from ..communicator.communicator import Communicator
from ..communicator.explain import example_call
from ..communicator.layers import try_out
from ..errors import ConfigError
from ..measure import low
from ..operations import find_op
from ..selection.tuning import AUTO, PRIVATE, Key, TuningEntry, TuningTable, kind_for
from .candidates import Candidate, memories
from .cases import Workload
from .machine import Watch
from .race import no_garbage_collection
from .runner import Contest, Entrant, OnStep, Settings

ROOT_WEIGHT = 1 << 20  # bytes of a size that gets twice the time of an empty call


@dataclass(frozen=True)
class TuningSettings:
    """Settings of a tuning run: collectives, sizes, dtype and time budget."""

    collectives: Sequence[str]
    sizes: Sequence[int]  # bytes of the whole buffer, ascending
    dtype: Any = "float32"
    budget: float = 60.0  # seconds for everything together


@dataclass(frozen=True)
class PlannedRace:
    """One race of the tuner: a collective at one size in one kind of memory, with an end time.

    `works` has the test data of that kind of memory; `until` is as of ``time.perf_counter`` on
    this rank.
    """

    collective: str
    memory: str
    nbytes: int
    works: dict[str, Workload]
    until: float

    def whole(self, nbytes: int) -> int:
        """Return the bytes of a whole buffer of at least `nbytes`, as the race has it."""
        work = self.works[self.memory]
        return work.count(nbytes) * work.dtype.itemsize


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


def count_races(comm: Communicator, settings: TuningSettings) -> int:
    """Return the number of races of a tuning run, for a progress bar."""
    sizes = {c: 1 if c == "barrier" else len(settings.sizes) for c in settings.collectives}
    return sum(len(memories(comm, c)) * sizes[c] for c in settings.collectives)


Sizes = Callable[[str, str], Sequence[int]]
"""``sizes(collective, memory)`` returns the bytes to measure."""


def planned_races(
    comm: Communicator,
    settings: TuningSettings,
    stopped: Callable[[], bool],
    cost: Callable[[PlannedRace], float],
    sizes_of: Sizes | None = None,
) -> Iterator[PlannedRace]:
    """Yield the planned races of a run, each with its share of the time; collective.

    They are the same on every rank, but for `until`, which counts on rank 0 only.  Each collective
    in each kind of memory has an equal share of the budget; of it, a size has a part that grows
    with the square root of its bytes.  Time that one race leaves goes to later ones.  When the time
    left is less than a race's `cost`, it and the larger sizes are omitted.  `stopped` returns, on
    rank 0, whether to stop; ``cost(planned)`` returns the least seconds that a race takes, of which
    rank 0's value counts.  `sizes_of` returns the sizes of each collective and kind of memory; by
    default those of the settings.
    """

    def usual_sizes(collective: str, memory: str) -> Sequence[int]:
        return [0] if collective == "barrier" else sorted(settings.sizes)

    # Shares are of the time that is left, not of the budget, so what one did not use, all later
    # ones get::
    #
    #     begin       now                                                    end
    #     |- - done - |---- share of this group ----|-- next --|-- next --|
    #                 | until of this size |- larger sizes, by weight -|
    end, sizes_of = perf_counter() + settings.budget, sizes_of or usual_sizes
    groups = [(c, memory) for c in settings.collectives for memory in memories(comm, c)]
    groups = [group for group in groups if sizes_of(*group)]
    work: Workload | None = None
    for index, (collective, memory) in enumerate(groups):
        share = perf_counter() + (end - perf_counter()) / (len(groups) - index)
        sizes = sizes_of(collective, memory)
        if work is None or work.collective != collective:
            largest = max(usual_sizes(collective, memory))
            work = Workload(collective, comm.rank, comm.size, 0, largest, settings.dtype)
        place = work if memory == PRIVATE else work.elsewhere(comm.empty)
        weights = [1 + (nbytes / ROOT_WEIGHT) ** 0.5 for nbytes in sizes]
        for k, nbytes in enumerate(sizes):
            now = perf_counter()
            until = now + max(share - now, 0.0) * weights[k] / sum(weights[k:])
            planned = PlannedRace(collective, memory, nbytes, {memory: place}, until)
            # Rank 0's clock for all: otherwise some ranks would race, and wait for the others.
            if _agree(comm, stopped() or now + cost(planned) > end):
                break
            yield planned


def _agree(comm: Communicator, value: bool) -> bool:
    """Return on every rank the truth value that rank 0 passed; collective."""
    return bool(comm.broadcast(np.array([value], np.int8), root=0)[0])


_MIN_PER_HEAT = 2  # iterations before the first candidate drops out
MOST = 200  # iterations
CHECKED = 1 << 20  # bytes up to which every result is checked; above, the first two of a candidate
HOPELESS = 3.0  # a candidate slower than the fastest by this factor, from HOPELESS_BYTES on,
HOPELESS_BYTES = 64 << 10  # is not measured at larger sizes
CLOSE = 1.1  # a candidate slower than the fastest by at most this factor stays in

Keep = Callable[[list[tuple[float, Entrant]]], list[Entrant]]


def candidate_names(
    comm: Communicator, collective: str, nbytes: int, memory: str, leave_open: bool = False
) -> tuple[list[str], str]:
    """Return the names of all candidates that can serve a call, and the choice of "auto".

    Trees are in the list twice, with arity 2 and 4 (``tree:2``).  The choice of "auto" may be
    named with its parts (``hierarchical/direct/ring``), and is then one more candidate.  Schedules
    in symmetric memory are not: the executor "symmetric" runs those that are shipped.  With
    `leave_open`, the choice is "auto" itself where the first call tries out several ways.
    """
    chosen, every = comm.explain(collective, nbytes, memory=memory)
    if chosen.untried:
        try_out(comm, collective, nbytes)
        chosen, every = comm.explain(collective, nbytes, memory=memory)
    names: list[str] = []
    for one in every:
        if one.can and one.executor in (one.name, "messages"):
            tree = one.choice is not None and "arity" in one.choice.algorithm.uses
            names += [f"{one.name}:2", f"{one.name}:4"] if tree else [one.name]
    name = AUTO if chosen.tried and leave_open else chosen.name
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

    def candidate(self, name: str) -> Candidate:
        """Return the candidate of a name."""
        return Candidate(name, self.memory)

    def run(self, names: Sequence[str], keep: Keep) -> dict[str, list[float]]:
        """Run the race between `names`; return the finalists' seconds by name, one per iteration.

        ``keep(ranking)`` selects the entrants of the next heat from (seconds, entrant) pairs,
        fastest first; the seconds are the 20th percentile.  Candidates that dropped out are still
        in `entries`, with fewer times.
        """
        end, begun = self.until, perf_counter()
        for name in names:
            self.admit(self.candidate(name))
            if self.over and self.entries:
                self.complete = name == names[-1]
                break
        self._time(self.entries)  # the second call with an array binds its program
        self.checking = self.case.nbytes <= CHECKED
        alive = list(self.entries)
        # Those calls bound programs, and do not count, unless there is time for no others.
        for entry in alive:
            if not self.over:
                entry.times.clear()
        while not self.over and alive and len(alive[0].times) < MOST:
            alive = [entry for entry in self._heat(alive, end) if not entry.wrong]
            if not alive:
                break
            alive = keep(sorted(((low(e.times), e) for e in alive), key=lambda pair: pair[0]))
        self.spent = perf_counter() - begun
        return {entry.name: entry.times for entry in alive}

    def _heat(self, alive: list[Entrant], end: float) -> list[Entrant]:
        """Time the candidates `alive` in turns for one heat, and return them all.

        The heats share the time until `end`: about half of the candidates drop out after each, and
        the last one lasts until `end` (``time.perf_counter``).
        """
        # The same time for each heat, so ever more iterations for those that stay; 8 candidates::
        #
        #     now                                               end
        #     |--- 8: a third ---|--- 4: a half ---|--- 2: all -|      of what is left
        heats = max(len(alive).bit_length() - 1, 1)
        now = perf_counter()
        self.until = end if heats == 1 else now + (end - now) / heats
        for k in range(MOST):
            self._time(alive, len(alive[0].times))
            if self.over and k + 1 >= _MIN_PER_HEAT or len(alive[0].times) >= MOST:
                break
        self.until = end
        self.cycle([])  # sets `over` anew, on all ranks alike
        return alive

    def _time(self, entries: list[Entrant], iteration: int = 0) -> None:
        begun = perf_counter()
        for entry, (seconds, _) in zip(entries, self.cycle(entries, iteration)):
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
        """Record the result of a race; return the low seconds of each candidate, by name."""
        seconds = {e.name: low(e.times) for e in race.entries if e.times}
        self.seconds.update(seconds)
        self.nbytes, self.cycle = max(race.case.nbytes, 1), race.cycle_seconds
        if race.case.nbytes >= HOPELESS_BYTES and seconds:
            limit = HOPELESS * min(seconds.values())
            self.hopeless |= {name for name, s in seconds.items() if s > limit}
        return seconds


MARGIN = 1.03  # a choice changes only if another candidate is faster by more than this factor
PROOF = 5  # iterations of a candidate without which it replaces nothing
FIRST = 0.7  # share of the budget for the first pass
REPEATS = 3  # races at a size before it is left out, as the machine changes during each
BEYOND = 4  # ratio of the sizes outside of the measured ones at which "auto" is asked, up to
LARGEST = 1 << 30  # bytes


@dataclass
class Tuned:
    """Results of a run of the tuner."""

    table: TuningTable  # grows while sizes are measured
    # Collective, candidate and bytes of wrong results.
    wrong: list[str] = field(default_factory=list)
    measured: int = 0  # sizes in the table, over all collectives and kinds of memory
    left_out: int = 0  # sizes not in it, mostly for lack of time
    # Sizes at which the first pass found another candidate than "auto" clearly faster.
    faster: int = 0
    confirmed: int = 0  # those at which the second pass did too: the changes in the table
    unsteady: int = 0  # sizes left out because the machine changed during each of three races


class Draft:
    """The entry of one collective and kind of memory while it is tuned.

    ``usual(nbytes)`` returns the choice of "auto" without the table.
    """

    def __init__(self, key: Key, sizes: Sequence[int], usual: Callable[[int], str]):
        self.key, self.sizes = key, sizes
        self.usual, self.changes = usual_choices(sizes, usual)
        self.faster: dict[int, str] = {}  # than the usual one, in the first pass
        self.confirmed: dict[int, str] = {}  # in the second pass too
        self.times: dict[int, dict[str, float]] = {}
        self.wrong: set[str] = set()  # candidates with a wrong result

    def entry(self) -> TuningEntry:
        """Return the entry: the usual choices, and those confirmed around their sizes."""
        choices = {**self.usual, **self.confirmed}
        # "auto" may change its choice between two sizes.  That stays, unless both neighbours have a
        # confirmed choice: then nothing is known between them but these.
        within = list(zip(self.sizes, self.sizes[1:]))
        for nbytes, name in self.changes.items():
            gap = next((pair for pair in within if pair[0] < nbytes < pair[1]), ())
            if not gap or not set(gap) <= self.confirmed.keys():
                choices.setdefault(nbytes, name)
        right = {nbytes: name for nbytes, name in choices.items() if name not in self.wrong}
        return TuningEntry.from_points(self.key, right, self.times)


def usual_choices(
    sizes: Sequence[int], usual: Callable[[int], str]
) -> tuple[dict[int, str], dict[int, str]]:
    """Return the choices ``usual(nbytes)`` at some sizes and beyond, and at each change between.

    A change is two neighbouring numbers of bytes with different choices, found by bisection.
    """
    below = [sizes[0] // BEYOND] * (sizes[0] >= BEYOND)
    above = [size for k in range(1, 16) if (size := sizes[-1] * BEYOND**k) <= LARGEST]
    found = {nbytes: usual(nbytes) for nbytes in (*below, *sizes, *(above if sizes[-1] else ()))}
    changes: dict[int, str] = {}

    # Finds every change if each choice has one range of sizes: what "auto" would choose somewhere
    # between two sizes with the same choice is not seen.
    def search(first: int, second: int, at_first: str, at_second: str) -> None:
        if at_first == at_second:
            return
        if second - first <= 1:
            changes[first], changes[second] = at_first, at_second
            return
        middle = (first + second) // 2
        between = usual(middle)
        search(first, middle, at_first, between)
        search(middle, second, between, at_second)

    for first, second in zip(found, [*found][1:]):
        search(first, second, found[first], found[second])
    return found, changes


def steady_race(
    comm: Communicator,
    planned: PlannedRace,
    names: Sequence[str],
    keep: Keep,
    stopped: Callable[[], bool],
) -> tuple[Race, dict[str, list[float]]] | None:
    """Run a planned race, again if the machine changed meanwhile; collective.

    Return it with the finalists' times (:meth:`Race.run`), or None if the machine changed during
    each of three races.
    """
    seconds = planned.until - perf_counter()
    for _ in range(REPEATS):
        machine, until = Watch(comm), perf_counter() + seconds
        machine.look()
        race = Race(comm, planned.works, planned.nbytes, planned.memory, until, stopped)
        finalists = race.run(names, keep)
        machine.look()
        if not machine.changed:
            return race, finalists
    return None


def tune(
    comm: Communicator,
    settings: TuningSettings,
    about: Mapping[str, Any],
    on_step: OnStep = lambda collective, nbytes: None,
    on_table: Callable[[TuningTable], Any] = lambda table: None,
    stopped: Callable[[], bool] = lambda: False,
) -> Tuned:
    """Find the fastest candidate of each call; collective, with equal settings on all ranks.

    The result is the same on every rank.  `about` describes the run and is stored in the table.
    `on_step` is called before each size of the first pass, `on_table` on every rank after each size
    that was added to the table, or confirmed.  `stopped` returns on rank 0 whether to stop; what
    was confirmed so far is kept.
    """
    found, end = Tuned(TuningTable((), about)), perf_counter() + settings.budget
    drafts: dict[tuple[str, str], Draft] = {}
    with no_garbage_collection():
        _first_pass(comm, settings, found, drafts, on_step, on_table, stopped)
        left = replace(settings, budget=end - perf_counter())
        _second_pass(comm, left, found, drafts, on_table, stopped)
    found.left_out = count_races(comm, settings) - found.measured
    return found


def _first_pass(
    comm: Communicator,
    settings: TuningSettings,
    found: Tuned,
    drafts: dict[tuple[str, str], Draft],
    on_step: OnStep,
    on_table: Callable[[TuningTable], Any],
    stopped: Callable[[], bool],
) -> None:
    """Race all candidates at all sizes; the table gets the times, the drafts the winners."""
    histories: dict[tuple[str, str], History] = {}

    def history(planned: PlannedRace) -> History:
        return histories.setdefault((planned.collective, planned.memory), History())

    part = replace(settings, budget=FIRST * settings.budget)
    for planned in planned_races(comm, part, stopped, lambda c: history(c).cost(c.nbytes)):
        on_step(planned.collective, planned.nbytes)
        before, nbytes = history(planned), planned.whole(planned.nbytes)
        draft = drafts.get((planned.collective, planned.memory))
        if draft is None:
            draft = drafts[planned.collective, planned.memory] = _draft(comm, planned, settings)
        names, usual = candidate_names(
            comm, planned.collective, nbytes, planned.memory, leave_open=True
        )
        raced = steady_race(comm, planned, before.order(names, usual), faster_half(usual), stopped)
        if raced is None:
            found.unsteady += 1
            continue
        race, finalists = raced
        found.wrong += [f"{planned.collective} {name} {nbytes} B" for name in race.wrong]
        draft.wrong |= set(race.wrong)
        right = {n: t for n, t in finalists.items() if n not in draft.wrong and t}
        if not right:
            continue
        smaller = [size for size in draft.times if size < nbytes]
        previous = draft.faster.get(max(smaller), usual) if smaller else usual
        draft.times[nbytes] = before.learn(race)
        # Without a time of the usual choice nothing can be called faster: the best is taken.
        draft.usual[nbytes] = usual if usual in right else min(right, key=lambda n: low(right[n]))
        winner = settle(right, usual, previous)
        if winner != usual and usual in right:
            draft.faster[nbytes] = winner
            found.faster += 1
        found.measured += 1
        found.table.entries[draft.key] = draft.entry()
        on_table(found.table)


def _draft(comm: Communicator, planned: PlannedRace, settings: TuningSettings) -> Draft:
    collective, memory = planned.collective, planned.memory
    sizes = [0] if collective == "barrier" else sorted({planned.whole(n) for n in settings.sizes})

    def usual(nbytes: int) -> str:
        return candidate_names(comm, collective, nbytes, memory, leave_open=True)[1]

    return Draft(key_of(comm, collective, memory, settings.dtype), sizes, usual)


def _second_pass(
    comm: Communicator,
    settings: TuningSettings,
    found: Tuned,
    drafts: Mapping[tuple[str, str], Draft],
    on_table: Callable[[TuningTable], Any],
    stopped: Callable[[], bool],
) -> None:
    """Race each winner of the first pass with the usual choice alone, later in the run."""

    def sizes(collective: str, memory: str) -> Sequence[int]:
        draft = drafts.get((collective, memory))
        return [] if draft is None else sorted(draft.faster)

    def cost(planned: PlannedRace) -> float:
        draft = drafts[planned.collective, planned.memory]
        pair = draft.faster[planned.nbytes], draft.usual[planned.nbytes]
        return PROOF * sum(draft.times[planned.nbytes][name] for name in pair)

    # The fastest of many is in part the luckiest one.  So it must win again, against one only.
    for planned in planned_races(comm, settings, stopped, cost, sizes):
        draft, nbytes = drafts[planned.collective, planned.memory], planned.nbytes
        pair = [draft.usual[nbytes], draft.faster[nbytes]]
        raced = steady_race(comm, planned, pair, lambda ranking: [e for _, e in ranking], stopped)
        if raced is None or draft.wrong & {*pair} or raced[0].wrong or len(raced[1]) < len(pair):
            continue
        if settle(raced[1], pair[0], pair[0]) == pair[1]:
            draft.confirmed[nbytes] = pair[1]
            found.confirmed += 1
            found.table.entries[draft.key] = draft.entry()
            on_table(found.table)


def settle(finalists: Mapping[str, list[float]], usual: str, previous: str) -> str:
    """Return the new choice: `usual`, else `previous`, unless the fastest one is clearly faster.

    `finalists` has the seconds of each iteration by name, `usual` is the present choice of "auto",
    and `previous` is the winner at the next smaller size.  Clearly faster means that the 20th
    percentile is smaller by more than 3 %, and by more than twice its statistical error
    (:func:`uncertainty`), of at least five iterations.
    """
    seconds = {name: low(times) for name, times in finalists.items()}
    # Chance makes no changes: among equals the choice stays, or is that of the smaller size.
    best = min(seconds, key=lambda name: seconds[name])
    for name in (usual, previous):
        if name in seconds:
            noise = 2 * math.hypot(uncertainty(finalists[name]), uncertainty(finalists[best]))
            few = min(len(finalists[name]), len(finalists[best])) < PROOF
            if few or seconds[name] <= max(MARGIN, 1 + noise) * seconds[best]:
                return name
    return best


def uncertainty(seconds: Sequence[float]) -> float:
    """Return the standard error of the 20th percentile, divided by it.

    Of n times, 0.2 n ± 0.4 √n are expected to be below the true percentile, whatever the
    distribution (a binomial one); the error is half the distance of the times at these ranks.
    """
    ordered, n = sorted(seconds), len(seconds)
    first = math.floor(max(0.2 * n - 0.4 * n**0.5, 0))
    last = math.ceil(min(0.2 * n + 0.4 * n**0.5, n - 1))
    return (ordered[last] - ordered[first]) / 2 / low(seconds)


def key_of(comm: Communicator, collective: str, memory: str, dtype: Any) -> Key:
    """Return the key of the tuning table's entry for calls of a collective on arrays of `dtype`."""
    call = example_call(Caller(comm.rank, comm.size), collective, 8, find_op("sum"))
    call = replace(call, dtype=np.dtype(dtype))
    library = comm.backend.library
    return Key(library, tuple(map(len, comm.topology.groups)), kind_for(call), collective, memory)


def existing_table(comm: Communicator, path: str) -> TuningTable | None:
    """Return the tuning table in a file, which rank 0 reads; None without the file; collective.

    If the file holds no tuning table, every rank raises ConfigError.
    """

    def load() -> TuningTable | None:
        try:
            return TuningTable.load(path) if Path(path).exists() else None
        except ConfigError as error:
            raise ConfigError(
                f"{error}: expected a table of `mpidist tune`, or a new file"
            ) from error

    return from_rank_0(comm, load, f"the table {path}", ConfigError)
