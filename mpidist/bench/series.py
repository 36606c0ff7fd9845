"""One collective at one size: its contenders in turn, iteration by iteration."""

from __future__ import annotations

import random
import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from time import perf_counter
from typing import Any

import numpy as np

from ..errors import Unsupported
from .cases import Case, Workload
from .contenders import BARE, Contender, bare, knows, ours
from .records import PRIVATE


@dataclass(frozen=True)
class Settings:
    """What to measure and for how long.

    Parameters
    ----------
    sizes : sequence of int
        Bytes of the whole buffer.
    algorithms : sequence of str, optional
        Names; by default native, auto and all there are.  The bare mpi4py call is always measured.
    dtype, op : str
        Of the elements; of the combination.
    root : int
        For collectives that have one.
    in_place : bool
        The result takes the memory of the input.
    memory : {"private", "symmetric", "both"}
        Where the contenders' arrays are; those of the bare call are always private.
    iterations : int
        At most so many calls are timed.
    budget : float
        Seconds for one collective and size, after which no further iteration is planned.
    limit : float
        Seconds after which one is cut short; a single call that takes longer is not repeated.
    data : ndarray, optional
        Real numbers to combine instead of whole ones.
    bits : bool
        Find out whether all ranks got the same bits.
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


LEAST = 3  # iterations, however long they take
_COLUMNS = 6  # of what the ranks tell each other for each contender


@dataclass
class Entry:
    """One contender at one size.

    Attributes
    ----------
    times : list of float
        Seconds of the slowest rank, iteration by iteration.
    wrong : int
        Calls, warm-up included, whose result was wrong on some rank.
    identical : bool
        Whether all ranks had the same bits after every call.
    """

    contender: Contender
    case: Case
    work: Workload
    run: Callable[[], Any]
    times: list[float] = field(default_factory=list)
    wrong: int = 0
    identical: bool = True

    @property
    def name(self) -> str:
        """Of the way."""
        return self.contender.name


class Field:
    """Contenders of one collective at one size, which are called in turn on all ranks.

    Parameters
    ----------
    comm : Communicator
        On which; collective.
    works : mapping of str to Workload
        By the kind of memory that contenders name.
    nbytes : int
        Of the whole buffer.
    settings : Settings
        Limit and bits are used.

    Attributes
    ----------
    entries : list of Entry
        Those that can serve.
    refused : list of (Contender, str)
        The others, and why.
    over : bool
        Whether rank 0's time is up, as all ranks know since the last cycle.
    checking : bool
        Whether results are looked at.
    """

    def __init__(self, comm: Any, works: Mapping[str, Workload], nbytes: int, settings: Settings):
        self.comm, self.works, self.settings = comm, works, settings
        self.cases: dict[str, Case] = {kind: work.case(nbytes) for kind, work in works.items()}
        self.case = next(iter(self.cases.values()))  # they differ in their memory only
        self.one_clock = comm.topology.num_nodes == 1  # ranks of a node share their clock
        self.entries: list[Entry] = []
        self.refused: list[tuple[Contender, str]] = []
        self.spent = 0.0
        self.over, self.checking = False, True

    def admit(self, contender: Contender) -> None:
        """Make a contender and call it once; refuse it if it cannot serve or takes too long."""
        name, case = contender.name, self.cases[contender.memory]
        if not knows(self.comm, name, case.collective):
            self.refused.append((contender, f"{case.collective} has no {name}"))
            return
        try:
            run = bare(self.comm, case) if name == BARE else ours(self.comm, case, name)
            entry = Entry(contender, case, self.works[contender.memory], run)
            seconds = self.cycle([entry])[0]
        except Unsupported as error:
            self.refused.append((contender, str(error).removeprefix(f"rank {case.rank}: ")))
            return
        if seconds > self.settings.limit:
            limit = f"the limit of {self.settings.limit:g} s"
            self.refused.append((contender, f"one call took {seconds:.1f} s, over {limit}"))
            return
        self.entries.append(entry)

    def warm_up(self) -> None:
        """Call everyone once more: the second call with an array is the first that is bound."""
        self.cycle(self.entries)

    def cycle(self, entries: list[Entry]) -> list[float]:
        """Call each contender once, with data of its own; give the slowest rank's times."""
        begun = perf_counter()
        told = np.zeros((len(entries) + 1, _COLUMNS))
        for line, entry in zip(told, entries):
            line[:] = self._call(entry)
        self.spent += perf_counter() - begun
        told[-1, 0] = self.comm.rank == 0 and self.must_end()
        told = self.comm.allreduce(told, "max", out=told)
        self.over = bool(told[-1, 0])
        for line, entry in zip(told, entries):
            latest_in, first_out = line[2], -line[3]
            early = self.case.collective == "barrier" and self.one_clock and latest_in > first_out
            entry.wrong += bool(line[1]) or early
            entry.identical = entry.identical and line[4] == -line[5]
        return told[:-1, 0].tolist()

    def must_end(self) -> bool:
        """Tell, on rank 0, whether the time is up."""
        return self.spent > self.settings.limit

    def _call(self, entry: Entry) -> tuple[float, ...]:
        """Call one contender; give what this rank has to tell, of which the maximum is taken."""
        case, turn = entry.case, entry.work.next_turn()
        case.fill(turn)
        self.comm.barrier()
        begun = perf_counter()
        entry.run()
        ended = perf_counter()
        self.comm.barrier()  # who is through and looks at the result keeps a shared core
        wrong = self.checking and not case.check(turn, entry.name == BARE)
        bits = 0
        if self.settings.bits and case.out is not None:
            bits = zlib.crc32(case.out.view(np.uint8).data)
        return ended - begun, wrong, begun, -ended, bits, -bits


def in_turn(entries: Sequence[Entry], iteration: int) -> list[Entry]:
    """Give the order of an iteration, the same on every rank.

    Drawn, not rotated: else each would follow the same other one always, and find in the cache what
    that one left there.
    """
    order = list(entries)
    random.Random(iteration).shuffle(order)
    return order


class Series(Field):
    """The contenders of one collective at one size; making it warms them up.

    Parameters
    ----------
    contenders : sequence of Contender
        Who.
    comm, works, nbytes, settings
        See :class:`Field`; iterations and budget are used as well.

    Attributes
    ----------
    iterations : int
        How many are to be timed, the same on every rank.
    seconds : float
        Of one iteration, as rank 0 saw it before the first that is timed.
    """

    def __init__(
        self,
        comm: Any,
        works: Mapping[str, Workload],
        nbytes: int,
        contenders: Sequence[Contender],
        settings: Settings,
    ):
        super().__init__(comm, works, nbytes, settings)
        self.done = 0  # iterations that were timed
        for contender in contenders:
            self.admit(contender)
        begun = perf_counter()
        self.warm_up()
        self.seconds = self._agree(perf_counter() - begun)
        planned = settings.budget / max(self.seconds, 1e-9)
        self.iterations = int(
            max(min(LEAST, settings.iterations), min(planned, settings.iterations))
        )

    def run(self, turn: int, passes: int) -> None:
        """Time this pass's share of the iterations."""
        count, rest = divmod(self.iterations, passes)
        for k in range(count + (turn < rest)):
            if self.over:
                return
            self.done += 1
            order = in_turn(self.entries, turn + passes * k)
            for entry, seconds in zip(order, self.cycle(order)):
                entry.times.append(seconds)

    def _agree(self, seconds: float) -> float:
        """Give rank 0's figure to all: every rank must plan the same iterations."""
        return float(self.comm.broadcast(np.array([seconds]), root=0)[0])
