"""The measurement of collectives: candidates interleaved against drift, every result checked."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Container, Mapping, Sequence
from dataclasses import dataclass, field
from time import perf_counter
from typing import Any

import numpy as np

from ..communicator.communicator import Communicator
from ..errors import Unsupported
from ..measure import algbw, busbw, median, spread
from ..selection.tuning import MEMORIES, PRIVATE, SYMMETRIC
from .candidates import Candidate, candidates, knows
from .cases import BARE, Case, Workload
from .machine import Watch, describe_stream, make_header, measure_stream
from .race import in_turn, no_garbage_collection
from .results import (
    BOUND_NOTE,
    CHANGED_NOTE,
    USED_NOTE,
    Refusal,
    Results,
    Row,
    bound_percent,
    times,
)


@dataclass(frozen=True)
class Settings:
    """Settings of a measurement: sizes, algorithms, dtype, operation and time limits.

    Parameters
    ----------
    sizes : sequence of int
        Bytes of the whole buffer.
    algorithms : sequence of str, optional
        Names for ``algorithm=``; by default native, auto and all others.  The bare mpi4py call is
        always measured.
    dtype, op : str
        Dtype of the elements; operation of reductions.
    root : int
        Root of rooted collectives.
    in_place : bool
        Write the result over the input.
    memory : {"auto", "private", "symmetric", "both"}
        Memory of the candidates' arrays; those of the bare call are always private.  With "auto"
        the candidate "auto" is measured in both kinds of memory, where the ranks have both.
    iterations : int
        Largest number of timed calls of each candidate, at each size.
    budget : float
        Seconds for each collective and size; fewer iterations are planned where they would take
        longer, but at least 3.
    limit : float
        Seconds after which a collective and size is cut short; a candidate whose first call takes
        longer is not measured.
    data : ndarray, optional
        Real numbers as input of reductions, in place of pseudo-random whole ones.
    bits : bool
        Also check whether the results of all ranks have the same bits.
    """

    sizes: Sequence[int] = (8, 64 << 10, 1 << 20)
    algorithms: Sequence[str] | None = None
    dtype: Any = "float32"
    op: str = "sum"
    root: int = 0
    in_place: bool = False
    memory: str = PRIVATE
    iterations: int = 200
    budget: float = 2.0
    limit: float = 30.0
    data: np.ndarray | None = field(default=None, repr=False)
    bits: bool = False


_MIN_ITERATIONS = 3  # iterations, however long they take
_COLUMNS = 7  # figures that the ranks exchange for each candidate


@dataclass
class Entrant:
    """One candidate at one size, with its times and whether its results were correct."""

    candidate: Candidate
    case: Case
    work: Workload
    run: Callable[[], Any]
    # Seconds of the slowest rank's call, one per iteration.
    times: list[float] = field(default_factory=list)
    # Seconds of the slowest rank in writing the input, the call and the first reading, together.
    used: list[float] = field(default_factory=list)
    wrong: int = 0  # calls, warm-up included, with a wrong result on some rank
    identical: bool = True  # all ranks had the same bits after every call

    def __post_init__(self) -> None:
        self._result = self.case.result(self.name == BARE)

    def read(self) -> None:
        """Read the whole result once, as a program would that uses it."""
        for words in self._result:
            np.bitwise_or.reduce(words)

    @property
    def name(self) -> str:
        """Name of the candidate."""
        return self.candidate.name


class Contest:
    """Candidates of one collective at one size, which are called in turn on all ranks.

    `works` has the test data by kind of memory; of `settings`, `limit` and `bits` are used.  Every
    method that calls candidates is collective.
    """

    reads = False  # whether the result is read, and the reading timed

    def __init__(
        self,
        comm: Communicator,
        works: Mapping[str, Workload],
        nbytes: int,
        settings: Settings,
    ):
        self.comm, self.works, self.settings = comm, works, settings
        self.cases: dict[str, Case] = {kind: work.case(nbytes) for kind, work in works.items()}
        self.case = next(iter(self.cases.values()))  # cases differ in their memory only
        self.one_clock = comm.topology.num_nodes == 1  # ranks of a node share their clock
        self.entries: list[Entrant] = []
        self.refused: list[tuple[Candidate, str]] = []  # with the reason
        self.spent = 0.0
        self.over = False  # rank 0's time was up at the end of the last cycle; alike on all ranks
        self.checking = True

    def admit(self, candidate: Candidate) -> None:
        """Call a candidate once; add it to `entries`, or to `refused` if unsupported or slow."""
        name, case = candidate.name, self.cases[candidate.memory]
        if candidate.other is None and not knows(self.comm, name, case.collective):
            self.refused.append((candidate, f"{case.collective} has no {name}"))
            return
        try:
            run = candidate.runner(self.comm, case)
            entry = Entrant(candidate, case, self.works[candidate.memory], run)
            seconds, _ = self.cycle([entry])[0]
        except Unsupported as error:
            self.refused.append((candidate, str(error).removeprefix(f"rank {case.rank}: ")))
            return
        if seconds > self.settings.limit:
            limit = f"the limit of {self.settings.limit:g} s"
            self.refused.append((candidate, f"one call took {seconds:.1f} s, over {limit}"))
            return
        self.entries.append(entry)

    def warm_up(self) -> None:
        """Call each candidate once more: the second call with an array binds its program."""
        self.cycle(self.entries)

    def cycle(self, entries: list[Entrant], iteration: int = 0) -> list[tuple[float, float]]:
        """Call each of `entries` once, with new data, in the order of an iteration.

        Return for each the seconds of the slowest rank's call, and of the slowest rank's writing,
        call and reading, together.
        """
        begun = perf_counter()
        figures = np.zeros((len(entries) + 1, _COLUMNS))
        for line, found in zip(figures, in_turn(entries, iteration, self._call)):
            line[:] = found
        self.spent += perf_counter() - begun
        # One exchange for all, also of what rank 0 says of the time: if each rank looked at its own
        # clock, some would stop, and the others wait for them in the next call.
        figures[-1, 0] = self.comm.rank == 0 and self.must_end()
        figures = self.comm.allreduce(figures, "max", out=figures)
        self.over = bool(figures[-1, 0])
        # Largest values of all ranks; the smallest ones are those of the negative figures.
        for line, entry in zip(figures, entries):
            latest_in, first_out = line[2], -line[3]
            # Nobody may leave a barrier before the last rank has come to it.
            early = self.case.collective == "barrier" and self.one_clock and latest_in > first_out
            entry.wrong += bool(line[1]) or early
            entry.identical = bool(entry.identical and line[4] == -line[5])
        return [(call, used) for call, used in figures[:-1, [0, 6]].tolist()]

    def must_end(self) -> bool:
        """Return whether the calls so far took longer than the limit, by this rank's clock.

        Not collective: :meth:`cycle` uses the answer of rank 0.
        """
        return self.spent > self.settings.limit

    def _call(self, entry: Entrant) -> tuple[float, ...]:
        """Call one candidate once with new data, after a barrier; return this rank's measurements.

        They are (seconds, wrong, begin, -end, checksum, -checksum, used) of the call.  The maximum
        over the ranks then gives the slowest time, whether any is wrong, the latest begin, the
        earliest end, whether all checksums are equal, and the slowest time with writing and
        reading.
        """
        case = entry.case
        # The call before may have been another candidate's, on the same arrays: to store where
        # other ranks have read there takes up to ten times as long.  So each has one for itself.
        for _ in range(2 if len(self.entries) > 1 else 1):
            turn = entry.work.next_turn()
            used = -perf_counter()
            case.fill(turn)
            used += perf_counter()
            if entry.candidate.before is not None:
                entry.candidate.before()
            self.comm.barrier()
            begun = perf_counter()
            entry.run()
            ended = perf_counter()
            # A rank that checks at once would take a shared core from one still in the call.
            self.comm.barrier()
            used += ended - begun
            if self.reads:
                used -= perf_counter()
                entry.read()
                used += perf_counter()
        wrong = self.checking and not case.check(turn, entry.name == BARE)
        bits = 0
        if self.settings.bits and case.out is not None:
            bits = zlib.crc32(case.out.view(np.uint8).data)
        return ended - begun, wrong, begun, -ended, bits, -bits, used


class Series(Contest):
    """Timed iterations of the candidates of one collective at one size.

    The constructor warms the candidates up.  Of `settings`, `iterations` and `budget` are used too.
    """

    reads = True

    def __init__(
        self,
        comm: Communicator,
        works: Mapping[str, Workload],
        nbytes: int,
        candidates: Sequence[Candidate],
        settings: Settings,
    ):
        super().__init__(comm, works, nbytes, settings)
        self.done, self.machine = 0, Watch(comm)  # timed iterations; looks at the machine
        for candidate in candidates:
            self.admit(candidate)
        begun = perf_counter()
        self.warm_up()
        self.seconds = self._agree(perf_counter() - begun)  # of an iteration
        planned = settings.budget / max(self.seconds, 1e-9)
        self.iterations = int(
            max(min(_MIN_ITERATIONS, settings.iterations), min(planned, settings.iterations))
        )

    def run(self, turn: int, passes: int) -> None:
        """Time the iterations of pass number `turn` of `passes`, until the time limit.

        The passes share the planned number of iterations; between them, other sizes are measured.
        """
        count, rest = divmod(self.iterations, passes)
        count += turn < rest
        if self.over or not count:
            return
        self.machine.look()
        for k in range(count):
            if self.over:
                break
            self.done += 1
            # Numbers over all passes, 0 3 6 …, then 1 4 7 …, 2 5 8 …: each is an order of its own.
            found = self.cycle(self.entries, turn + passes * k)
            for entry, (call, used) in zip(self.entries, found):
                entry.times.append(call)
                entry.used.append(used)
        self.machine.look()

    def _agree(self, seconds: float) -> float:
        """Return rank 0's `seconds` on all ranks, so that all plan the same iterations."""
        return float(self.comm.broadcast(np.array([seconds]), root=0)[0])


PASSES = 3  # passes over all sizes
LONG = 0.1  # seconds of an iteration from which warming up again is no use


OnStep = Callable[[str, int], Any]


def measure(
    comm: Communicator,
    collectives: Sequence[str],
    settings: Settings,
    on_step: OnStep = lambda collective, nbytes: None,
    others: Sequence[Candidate] = (),
) -> Results:
    """Measure collectives on all ranks; collective, with the same arguments everywhere.

    The time of an iteration is that of its slowest rank, from a barrier on; a row has the median.

    Parameters
    ----------
    comm : Communicator
        The ranks that measure.
    collectives : sequence of str
        Names of the collectives.
    settings : Settings
        Sizes, algorithms, dtype, operation and time limits.
    on_step : callable
        Called with collective and bytes before each size of each pass (:func:`steps` times).
    others : sequence of Candidate
        Libraries to measure beside mpidist.

    Returns
    -------
    Results
        The rows, the same on every rank; the header is empty.

    Raises
    ------
    UnknownName
        If a name in ``settings.algorithms`` is an algorithm of none of the collectives.
    Unsupported
        If symmetric memory was asked for, and there is none.
    """
    results = Results()
    every = {
        c: [*candidates(comm, c, settings.algorithms, settings.memory, collectives), *others]
        for c in collectives
    }
    for collective in collectives:
        _measure_one(comm, collective, every[collective], settings, results, on_step)
    return results


def steps(collectives: Sequence[str], settings: Settings) -> int:
    """Return how often :func:`measure` will call `on_step`, for a progress bar."""
    return sum(PASSES * len(_sizes(c, settings)) for c in collectives)


def node_counts(nodes: int) -> list[int]:
    """Return the numbers of nodes to measure: the powers of two below `nodes`, and `nodes`."""
    powers = [1 << k for k in range(nodes.bit_length()) if 1 << k < nodes]
    return [*powers, nodes]


def measure_scaling(
    comm: Communicator,
    collectives: Sequence[str],
    settings: Settings,
    on_step: OnStep = lambda collective, nbytes: None,
) -> Results:
    """Measure collectives on all ranks of the first 1, 2, 4, … and all nodes; collective.

    See :func:`measure` for the parameters.  Meanwhile the ranks of the other nodes wait without a
    deadline, and poll rarely.  Rank 0 returns the rows of all numbers of nodes, other ranks those
    they took part in; ``header["nodes"]`` maps each number of ranks (as a string) to its number of
    nodes.
    """
    found, nodes = Results(benchmark="scaling"), {}
    timeout, comm.timeout = comm.timeout, None
    for count in node_counts(comm.topology.num_nodes):
        members = [rank for group in comm.topology.groups[:count] for rank in group]
        part = comm.split(0 if comm.rank in members else None)
        if part is not None:
            part.timeout = timeout
            some = measure(part, collectives, settings, on_step)
            nodes[str(part.size)] = count
            found.rows += some.rows
            found.unsupported += some.unsupported
            found.iterations |= {f"{part.size} ranks {k}": n for k, n in some.iterations.items()}
            part.free()
        comm.barrier()
    comm.timeout = timeout
    found.header = {**make_header(comm), "nodes": nodes, "iterations": found.iterations}
    found.notes += _changed_note(found.rows)
    return found


def scaling_steps(comm: Communicator, collectives: Sequence[str], settings: Settings) -> int:
    """Return how often :func:`measure_scaling` calls `on_step` on rank 0, for a progress bar."""
    return len(node_counts(comm.topology.num_nodes)) * steps(collectives, settings)


def run_benchmark(
    comm: Communicator,
    collectives: Sequence[str],
    settings: Settings,
    on_step: OnStep = lambda collective, nbytes: None,
    stream: bool | None = None,
    others: Sequence[Candidate] = (),
) -> Results:
    """Measure collectives; return results with the header and notes of the run; collective.

    `stream` says whether to measure the memory bandwidth too; by default it is measured if all
    candidates are in symmetric memory.  See :func:`measure` for the other parameters.
    """
    results = measure(comm, collectives, settings, on_step, others)
    results.header = {**make_header(comm), "iterations": results.iterations}
    if settings.memory in (SYMMETRIC, "both") if stream is None else stream:
        results.header["stream"] = measure_stream(comm).as_header()
        results.notes.append(describe_stream(results.header))
    results.notes += _memory_notes(results.rows)
    if comm.size == 1:
        results.notes.append("1 rank: nothing is sent; `mpidist run -n N` starts N ranks")
    if any(bound_percent(row, results.header) is not None for row in results.rows):
        results.notes.append(BOUND_NOTE)
    if any("used_us" in row.figures for row in results.rows):
        results.notes.append(USED_NOTE)
    results.notes += _changed_note(results.rows)
    return results


def _changed_note(rows: Sequence[Row]) -> list[str]:
    return [CHANGED_NOTE] * any(row.figures.get("changed") for row in rows)


_KINDS = {PRIVATE: "ordinary numpy arrays", SYMMETRIC: "arrays of comm.empty()"}


def _memory_notes(rows: Sequence[Row]) -> list[str]:
    """Return a line for each kind of memory: what it is, and how fast "auto" is in it.

    There are none if all arrays are private.
    """
    if not any(row.memory == SYMMETRIC for row in rows):
        return []
    notes = []
    for kind in MEMORIES:
        mine = [row for row in rows if row.candidate == "auto" and row.memory == kind and row.bytes]
        ratios = sorted(row.ratio for row in mine if row.ratio is not None)
        text = f"{kind}: {_KINDS[kind]}"
        if ratios:
            least, most = times(ratios[0]), times(ratios[-1])
            span = least if least == most else f"{least} to {most}"
            text += f"; auto is {span} times as fast as {BARE}"
        notes.append(text)
    return notes


def _sizes(collective: str, settings: Settings) -> list[int]:
    return [0] if collective == "barrier" else list(settings.sizes)


def _measure_one(
    comm: Communicator,
    collective: str,
    every: list[Candidate],
    settings: Settings,
    results: Results,
    on_step: OnStep,
) -> None:
    sizes = _sizes(collective, settings)
    kinds = {candidate.memory for candidate in every}
    works = workloads(comm, collective, max(sizes), settings, kinds)
    series: dict[int, Series] = {}
    # What else a machine does comes in spells of seconds.  So no size is measured all at once::
    #
    #     pass 0   8 B | 64 KiB | 1 MiB |      a third of the iterations of each
    #     pass 1   8 B | 64 KiB | 1 MiB |      each warmed up again, as those between have
    #     pass 2   8 B | 64 KiB | 1 MiB |      taken its place in the caches
    with no_garbage_collection():
        for turn in range(PASSES):
            for nbytes in sizes:
                on_step(collective, nbytes)
                if nbytes not in series:
                    series[nbytes] = Series(comm, works, nbytes, every, settings)
                elif series[nbytes].iterations > turn and series[nbytes].seconds < LONG:
                    series[nbytes].warm_up()
                series[nbytes].run(turn, PASSES)
    for one in series.values():
        results.iterations[f"{collective} {one.case.nbytes}"] = one.done
        _add(results, one, comm, settings)


def workloads(
    comm: Communicator, collective: str, largest: int, settings: Settings, kinds: Container[str]
) -> dict[str, Workload]:
    """Return the workload of a collective by kind of memory, private always; collective."""
    work = Workload(
        collective,
        comm.rank,
        comm.size,
        settings.root,
        largest,
        settings.dtype,
        settings.op,
        settings.in_place,
        settings.data,
    )
    works = {PRIVATE: work}
    if SYMMETRIC in kinds:
        works[SYMMETRIC] = work.elsewhere(comm.empty)
    return works


def _add(results: Results, series: Series, comm: Communicator, settings: Settings) -> None:
    """Append to the results the rows of one collective at one size, and its refused candidates."""
    case = series.case
    results.unsupported += [
        Refusal(case.collective, candidate.name, case.nbytes, reason, candidate.memory)
        for candidate, reason in series.refused
    ]
    bare_entry = next((e for e in series.entries if e.name == BARE and e.times), None)
    reference = median(bare_entry.times) if bare_entry else None
    for entry in series.entries:
        if entry.times:
            row = _row(entry, reference, comm)
            if settings.bits:
                row.figures["same_bits"] = entry.identical
            if case.nbytes:
                seconds = median(entry.used)
                row.figures["used_us"] = 1e6 * seconds
                if bare_entry and seconds > 0:
                    row.figures["used_ratio"] = median(bare_entry.used) / seconds
            row.figures |= series.machine.figures()
            results.rows.append(row)


def _row(entry: Entrant, reference: float | None, comm: Communicator) -> Row:
    case, seconds = entry.case, median(entry.times)
    return Row(
        work=case.collective,
        candidate=entry.name,
        backend=entry.name if entry.name == BARE or entry.candidate.other else comm.backend.name,
        ranks=comm.size,
        bytes=case.nbytes,
        dtype=str(entry.work.dtype),
        op=case.op.name if case.op is not None else None,
        in_place=case.in_place,
        time_us=seconds * 1e6,
        algbw_gbs=algbw(case.nbytes, seconds),
        busbw_gbs=busbw(case.collective, case.nbytes, seconds, comm.size),
        ratio=reference / seconds if reference is not None and seconds > 0 else None,
        correct=not entry.wrong,
        memory=entry.candidate.memory,
        spread=spread(entry.times),
    )
