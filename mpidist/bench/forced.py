"""The MPI library's own algorithms, forced one by one: which is fastest, and which is in force.

An algorithm is forced by the library's control variable, in the running job.  So all of them, and
the library's own choice, take turns in every iteration, as candidates of any other race::

    first pass     every size: all algorithms, in heats      winner, if faster beyond the noise
    second pass    those sizes: winner and default alone     a rule, if faster beyond it again
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from time import perf_counter
from typing import Any

import numpy as np

from ..backends.control_variables import ControlVariable, library_path
from ..communicator.communicator import Communicator
from ..errors import Unsupported
from ..foreign import read_file
from ..interchange import mpich, openmpi
from ..interchange.library_rules import DEFAULT, LibraryCollective, LibraryRule
from ..measure import low
from ..selection.tuning import PRIVATE, Key, TuningEntry
from .candidates import Candidate, bare_on, mpi_communicator
from .cases import Case, Workload
from .machine import Watch, make_header
from .race import no_garbage_collection, nothing
from .tuner import FIRST, Race, faster_half, settle

OPEN_MPI, MPICH = "Open MPI", "MPICH"
_TWO = "two_proc"  # Open MPI's algorithms for two ranks, an error on others


class Forced:
    """The algorithms of the MPI library for some collectives, each as a candidate.

    Collective.  Raises Unsupported if the library has other algorithms, or no control variables.
    """

    def __init__(self, comm: Communicator, library: str):
        self.comm, self.mpi, self.library = comm, mpi_communicator(comm), library
        self.known: Mapping[str, LibraryCollective] = {
            OPEN_MPI: openmpi.COLLECTIVES,
            MPICH: mpich.COLLECTIVES,
        }[library]
        self._variables: dict[str, ControlVariable] = {}
        self._communicators: dict[tuple[str, str], Any] = {}
        if library == OPEN_MPI:
            ControlVariable("coll_tuned_use_dynamic_rules").set(1)

    def names(self, collective: str) -> list[str]:
        """Return the algorithms of a collective that this library has, DEFAULT first."""
        values = self._variable(collective).values
        known = self.known[collective].schedules
        if self.library == OPEN_MPI:
            # Files name algorithms by numbers: those must be this library's.
            for name in known:
                expected = openmpi.number(collective, name)
                if values.get(name, expected) != expected:
                    raise Unsupported(
                        f"{collective}: algorithm {name} of this Open MPI has number "
                        f"{values[name]}: expected {expected}"
                    )
        here = [n for n in known if n in values and self._serves(collective, n)]
        if len(here) < 2:
            raise Unsupported(f"{collective}: this library has none of {', '.join(known)}")
        return [DEFAULT, *here]

    def _serves(self, collective: str, name: str) -> bool:
        if self.library == MPICH:  # forced, it would take another one without a word
            return mpich.serves(collective, name, self.comm.size)
        return name != _TWO or self.comm.size == 2

    def candidate(self, collective: str, name: str) -> Candidate:
        """Return the candidate that makes the bare call by an algorithm, or by default."""
        variable = self._variable(collective)
        value = 0 if name == DEFAULT else variable.values[name]
        if self.library == MPICH:  # reads the variable in every call
            force = partial(variable.set, value)
            return Candidate(name, PRIVATE, partial(self._runner, self.mpi, force), force)
        key = collective, name
        if key not in self._communicators:  # Open MPI reads it when a communicator is made
            variable.set(value)
            self._communicators[key] = self.mpi.Dup()
            variable.set(0)
        return Candidate(name, PRIVATE, partial(self._runner, self._communicators[key], nothing))

    def close(self) -> None:
        """Let the library choose again, and free the communicators; collective."""
        for variable in self._variables.values():
            variable.set(0)
        for made in self._communicators.values():
            made.Free()
        self._communicators.clear()

    def _runner(self, mpi: Any, force: Callable[[], Any], case: Case) -> Callable[[], Any]:
        """Return the bare call after a first one; Unsupported if the algorithm refuses the case."""
        from mpi4py import MPI

        call = bare_on(mpi, case)
        force()
        try:
            call()
        except MPI.Exception as error:
            raise Unsupported(f"{case.collective} of {case.nbytes} B: {error}") from None
        return call

    def _variable(self, collective: str) -> ControlVariable:
        if collective not in self._variables:
            name = self.known[collective].name
            form = "coll_tuned_{}_algorithm" if self.library == OPEN_MPI else _CVAR
            name = name if self.library == OPEN_MPI else name.upper()
            self._variables[collective] = ControlVariable(form.format(name))
        return self._variables[collective]


_CVAR = "MPIR_CVAR_{}_INTRA_ALGORITHM"


class ForcedRace(Race):
    """A race between the algorithms of the MPI library."""

    def __init__(self, forced: Forced, work: Workload, nbytes: int, seconds: float):
        until = perf_counter() + seconds
        super().__init__(forced.comm, {PRIVATE: work}, nbytes, PRIVATE, until)
        self.forced = forced

    def candidate(self, name: str) -> Candidate:
        """Return the candidate of a name."""
        return self.forced.candidate(self.case.collective, name)


@dataclass
class Measured:
    """What a measurement of the library's algorithms has found."""

    entries: list[TuningEntry] = field(default_factory=list)
    about: dict[str, Any] = field(default_factory=dict)  # the machine, the library, the date
    # What speaks against the figures: other processes, a machine that changed.
    doubts: list[str] = field(default_factory=list)
    busy: bool = False  # with other processes
    wrong: list[str] = field(default_factory=list)  # collective, algorithm, bytes

    def seen(self, machine: Watch) -> Measured:
        """Look at the machine for the last time, and return self; collective."""
        self.doubts, self.busy = machine.again(), bool(machine.busy)
        return self


def measure(
    comm: Communicator,
    library: str,
    algorithms: Mapping[str, Collection[str]],
    sizes: Sequence[int],
    budget: float,
    busy_too: bool = True,
) -> Measured:
    """Find the sizes at which an algorithm of the library is faster than its choice; collective.

    `library` is OPEN_MPI or MPICH; `algorithms` has the names to measure, by collective; `sizes`
    are bytes of the whole buffer, `budget` is the seconds for everything together.  The result,
    equal on all ranks, has an entry for each collective, of its algorithms and DEFAULT.  Raises
    Unsupported if the library has other algorithms than known, or cannot be told to use one.
    Without `busy_too` nothing is measured on a busy machine.
    """
    forced, end = Forced(comm, library), perf_counter() + budget
    machine, found = Watch(comm).begin(), Measured(about=make_header(comm))
    if machine.busy and not busy_too:
        return found.seen(machine)
    collectives = list(algorithms)
    every = [(name, n) for name in collectives for n in _sizes(name, sizes)]
    works = {
        name: Workload(name, comm.rank, comm.size, 0, max(sizes), "float32") for name in collectives
    }
    chosen: dict[str, dict[int, str]] = {name: {} for name in collectives}
    times: dict[str, dict[int, dict[str, float]]] = {name: {} for name in collectives}
    winners: dict[tuple[str, int], str] = {}
    with no_garbage_collection():
        for name, nbytes in every:
            race = ForcedRace(forced, works[name], nbytes, FIRST * budget / len(every))
            names = [DEFAULT, *(n for n in forced.names(name) if n in algorithms[name])]
            finalists = race.run(names, faster_half(DEFAULT))
            found.wrong += [f"{name} {wrong} {race.case.nbytes} B" for wrong in race.wrong]
            right = {n: t for n, t in finalists.items() if n not in race.wrong and t}
            nbytes = race.case.nbytes
            times[name][nbytes] = {e.name: low(e.times) for e in race.entries if e.times}
            chosen[name][nbytes] = DEFAULT
            winner = settle(right, DEFAULT, DEFAULT) if DEFAULT in right else DEFAULT
            if winner != DEFAULT:
                winners[name, nbytes] = winner
        for k, ((name, nbytes), winner) in enumerate(winners.items()):
            # The fastest of many is in part the luckiest.  So it must win again, against one only.
            left = max(end - perf_counter(), 0.1) / (len(winners) - k)
            race = ForcedRace(forced, works[name], nbytes, left)
            pair = race.run([DEFAULT, winner], lambda ranking: [entry for _, entry in ranking])
            won = len(pair) == 2 and settle(pair, DEFAULT, DEFAULT) == winner
            if not race.wrong and won:
                chosen[name][nbytes] = winner
                times[name][nbytes] |= {n: low(t) for n, t in pair.items()}
    forced.close()
    for name in collectives:
        key = Key(library, tuple(map(len, comm.topology.groups)), "float", name, PRIVATE)
        found.entries.append(TuningEntry.from_points(key, chosen[name], times[name]))
    return found.seen(machine)


def _sizes(collective: str, sizes: Sequence[int]) -> Sequence[int]:
    return [0] if collective == "barrier" else sorted(set(sizes))


def own_tree(comm: Communicator) -> str:
    """Return the tree of algorithms of the MPICH that this job runs on."""
    return mpich.own_tree(read_file(library_path()))


# -- which algorithm is in force ------------------------------------------------------------------

SUMS = ("allreduce", "reduce", "reduce_scatter")
"""Collectives whose bits tell algorithms apart: sums of real numbers in another order."""


@dataclass(frozen=True)
class SumBits:
    """Checksums of sums of random numbers in one job: of the bare call, and of each algorithm."""

    rule: LibraryRule
    nbytes: int
    bare: int
    forced: Mapping[str, int]  # by algorithm


def sum_bits(comm: Communicator, library: str, rules: Sequence[LibraryRule]) -> list[SumBits]:
    """Return the checksums for each rule at its least and greatest bytes; collective.

    Rules for other numbers of ranks, and of collectives that sum nothing, are left out.
    """
    forced, found = Forced(comm, library), []
    for rule in rules:
        if rule.ranks != comm.size or rule.collective not in SUMS:
            continue
        names = forced.names(rule.collective)
        for nbytes in dict.fromkeys(_whole(n, comm, rule) for n in (rule.first, rule.last)):
            case = _random_case(comm, rule.collective, nbytes)
            bits = {n: _bits(comm, case, forced.candidate(rule.collective, n)) for n in names}
            found.append(SumBits(rule, nbytes, bits.pop(DEFAULT), bits))
    forced.close()
    return found


@dataclass(frozen=True)
class InForce:
    """Whether a rule is in force at one size, by jobs that were started with and without a file."""

    within: SumBits
    without: SumBits

    @property
    def _forced(self) -> Mapping[str, int]:
        # With the file, as an algorithm may call another collective that follows it too.  But in
        # Open MPI 4 the file precedes what is forced: all are alike, and the other job has them.
        alike = len(set(self.within.forced.values())) == 1
        return self.without.forced if alike else self.within.forced

    @property
    def holds(self) -> bool:
        """Whether bare calls with the file have the bits of the rule's algorithm."""
        return self.within.bare == self._forced[self.within.rule.algorithm]

    @property
    def others(self) -> list[str]:
        """The other algorithms with these bits."""
        own, bits = self.within.rule.algorithm, self._forced
        return [name for name in bits if name != own and bits[name] == bits[own]]

    def __str__(self) -> str:
        """Return "yes" or "NO"; "same without" if bare calls without the file have these bits."""
        if not self.holds:
            return "NO"
        return "same without" if self.within.bare == self.without.bare else "yes"


def _whole(nbytes: int, comm: Communicator, rule: LibraryRule) -> int:
    """Return the size nearest to `nbytes` within a rule that whole float32 of all ranks have."""
    step = 4 * (comm.size if rule.collective == "reduce_scatter" else 1)
    up, down = -(-nbytes // step) * step, nbytes // step * step
    return up if up <= rule.last else down


def _random_case(comm: Communicator, collective: str, nbytes: int) -> Case:
    data = np.random.default_rng([comm.rank, nbytes]).standard_normal(max(nbytes // 4, 1))
    work = Workload(collective, comm.rank, comm.size, 0, max(nbytes, 4), "float32", data=data)
    case = work.case(nbytes)
    case.fill(0)
    return case


def _bits(comm: Communicator, case: Case, candidate: Candidate) -> int:
    """Return a checksum of all ranks' results of one call; collective."""
    if case.out is not None:
        case.out.fill(0)
    assert candidate.other is not None
    call = candidate.other(case)
    call()
    own = 0 if case.out is None else zlib.crc32(case.out.view(np.uint8).data)
    return zlib.crc32(repr(mpi_communicator(comm).allgather(own)).encode())
