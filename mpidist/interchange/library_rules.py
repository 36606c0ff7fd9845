"""Rules for a library of collectives: its own algorithms by ranks and bytes, and where from.

They come from two sources.  *Measured*: its algorithms were forced one by one on these ranks, and a
rule stands only where one is faster than the library's choice beyond the noise.  *Predicted*: the
cost model ran our schedules of the same name, for ranks that are not here; a rule stands only where
one is cheaper than every other beyond the model's error.  Elsewhere the library chooses.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from ..errors import InvalidArgument, UnknownName, Unsupported
from ..measure import round_size
from ..schedule.cost import Link, cost
from ..schedule.registry import Groups, find
from ..schedule.rounds import Recv, Reduce, Send, Step, block_tuple
from ..schedule.unrolled import Strands, Written, materialise
from ..selection.estimates import AHEAD
from ..selection.tuning import PRIVATE, Key, TuningEntry

DEFAULT = "default"
"""In the place of an algorithm: what the library chooses by itself."""
MEASURED, PREDICTED = "measured", "predicted"
MANY = 1 << 17  # messages of a schedule from which its simulation takes over 5 s


Schedules = Mapping[str, str | tuple[str, ...] | None]


@dataclass(frozen=True)
class LibraryCollective:
    """A collective of a library, under its name there."""

    name: str
    # For each of its algorithms that rules can name, our algorithm of the same schedule; several
    # where the library chooses further.
    schedules: Schedules
    number: int = -1  # where the library has numbers


@dataclass(frozen=True)
class LibraryRule:
    """A rule: `algorithm` serves buffers of `first` to `last` bytes on `ranks` ranks.

    Bytes are those of the whole buffer.  `gains` are the least and the greatest ratio of times at
    the sizes within: of the library's choice if `basis` is "measured", of the second fastest
    algorithm if it is "predicted", over that of `algorithm`.
    """

    collective: str
    ranks: int
    first: int
    last: int
    algorithm: str  # the library's name
    basis: str
    gains: tuple[float, float]

    def __str__(self) -> str:
        """Return the rule as a comment has it."""
        low, high = (f"{gain:.2f}" for gain in self.gains)
        other = "the library's choice" if self.basis == MEASURED else "the next by the model"
        return (
            f"{self.collective} on {self.ranks} ranks, {round_size(self.first)} to "
            f"{round_size(self.last)}: {self.algorithm}, {self.basis}: "
            f"{low if low == high else f'{low} to {high}'} times as fast as {other}"
        )


def of_entry(entry: TuningEntry, basis: str) -> list[LibraryRule]:
    """Return the rules of an entry whose candidates are the library's algorithms and DEFAULT.

    They end with the sizes that have times: nothing is known beyond.
    """
    rules = []
    for rule in entry.rules:
        first = max(int(rule.start), min(entry.times))
        last = int(min(rule.below - 1, max(entry.times)))
        inside = [times for n, times in entry.times.items() if first <= n <= last]
        if rule.choose != DEFAULT and inside:
            gains = [_other(times, rule.choose) / times[rule.choose] for times in inside]
            rules.append(
                LibraryRule(
                    entry.key.collective,
                    sum(entry.key.ranks_per_node),
                    first,
                    last,
                    rule.choose,
                    basis,
                    (min(gains), max(gains)),
                )
            )
    return rules


def _other(times: Mapping[str, float], chosen: str) -> float:
    """Return the time that a gain compares with: the library's, else that of the second fastest."""
    if DEFAULT in times:
        return times[DEFAULT]
    return min(seconds for name, seconds in times.items() if name != chosen)


def predicted(
    collective: str,
    schedules: Schedules,
    ranks: int,
    sizes: Sequence[int],
    model: Mapping[str, float],
    on_step: Callable[[], object] = lambda: None,
    groups: Groups | None = None,
    link: Link | None = None,
) -> list[LibraryRule]:
    """Return the rules that the cost model gives, by default for ranks on equal links.

    Parameters
    ----------
    collective : str
        Name of the collective.
    schedules : mapping of str to str, tuple of str or None
        Our algorithm for each of the library's, of several the fastest; None leaves it out.
    ranks : int
        Number of ranks, which need not be here.
    sizes : sequence of int
        Bytes of the whole buffer, at which the schedules are simulated; one of more than 131,072
        messages only if it can be the fastest.
    model : mapping
        ``alpha``, ``beta`` and optionally ``gamma`` of :func:`~mpidist.schedule.cost.cost`.
    on_step : callable
        Called after each algorithm of the library at each size.
    groups, link : optional
        The ranks of each node, and the link between nodes, of
        :func:`~mpidist.schedule.cost.cost`.

    Raises
    ------
    Unsupported
        If fewer than two of the library's algorithms have a schedule: nothing can be compared.
    """
    every: dict[str, list[str]] = {}
    for name, ours in schedules.items():
        names = [ours] if isinstance(ours, str) else ours or ()
        able = [
            n for n in names if find(collective, n).algorithm.unsupported(ranks, groups) is None
        ]
        every |= {name: able} if able else {}
    if len(every) < 2:
        raise Unsupported(
            f"{collective} on {ranks} ranks: {len(every) or 'none'} of its algorithms "
            f"{', '.join(schedules)} has a schedule here: expected two or more, to compare their "
            "predicted times"
        )
    times: dict[int, dict[str, float]] = {}
    chosen: dict[int, str] = {}
    simulation = Simulation(collective, ranks, model, groups, link)
    for nbytes in sorted(sizes):
        at = times[nbytes] = {}
        for name in sorted(every, key=lambda name: simulation.messages(every[name])):
            limit = min(at.values(), default=math.inf) / AHEAD
            at[name] = min(simulation.seconds(one, nbytes, limit) for one in every[name])
            on_step()
        best = min(at, key=lambda name: at[name])
        # The library's own choice may be any of them: only what beats all the others is a gain.
        chosen[nbytes] = best if at[best] <= AHEAD * _other(at, best) else DEFAULT
    key = Key("", (ranks,), "float", collective, PRIVATE)
    return of_entry(TuningEntry.from_points(key, chosen, times), PREDICTED)


class Simulation:
    """The cost model for some ranks; of long schedules that cannot win, a lower bound will do."""

    def __init__(
        self,
        collective: str,
        ranks: int,
        model: Mapping[str, float],
        groups: Groups | None,
        link: Link | None,
    ):
        self.collective, self.ranks, self.groups, self.link = collective, ranks, groups, link
        self.alpha, self.beta = model["alpha"], model["beta"]
        self.gamma = model.get("gamma", 0.0)
        self._loads: dict[str, tuple[int, int, int]] = {}

    def messages(self, names: Iterable[str]) -> int:
        """Return the number of messages of the longest port of these schedules."""
        return max(self._load(name)[0] for name in names)

    def seconds(self, name: str, nbytes: int, limit: float) -> float:
        """Return the cost of a schedule in seconds.

        Of one with very many messages it is a lower bound, if that is `limit` or more.
        """
        messages, parts, count = self._load(name)
        if messages * self.ranks > MANY:
            alpha, beta = self.alpha, self.beta
            if self.link is not None:
                alpha, beta = min(alpha, self.link.alpha), min(beta, self.link.beta)
            # A port has one message at a time, so a rank takes at least the time of its own.
            least = messages * alpha + parts * (nbytes // count) * beta
            if least >= limit:
                return least
        return cost(
            self.collective,
            find(self.collective, name),
            self.ranks,
            nbytes,
            alpha=self.alpha,
            beta=self.beta,
            gamma=self.gamma,
            groups=self.groups,
            link=self.link,
        ).seconds

    def _load(self, name: str) -> tuple[int, int, int]:
        """Return the messages and the blocks of rank 0's fuller port, and the number of blocks."""
        if name not in self._loads:
            choice = find(self.collective, name)
            known, count = choice.algorithm, choice.algorithm.block_count(self.ranks, self.groups)
            (schedule,) = known.schedules([0], self.ranks, 0, choice.arity or 2, self.groups)
            ports: dict[bool, list[int]] = {True: [], False: []}
            for step in _steps(materialise(schedule)):
                if isinstance(step, (Send, Recv, Reduce)):
                    ports[isinstance(step, Send)].append(len(block_tuple(step.blocks)))
            fuller = max(ports.values(), key=len)
            self._loads[name] = len(fuller), sum(fuller), max(count, 1)
        return self._loads[name]


def _steps(written: Written) -> Iterator[Step]:
    """Yield all steps of a schedule, also those in its strands."""
    for item in written:
        if isinstance(item, Strands):
            for strand in item.strands:
                yield from _steps(strand)
        else:
            yield from item


def check_rules(
    rules: Iterable[LibraryRule], known: Mapping[str, LibraryCollective], library: str
) -> None:
    """Raise InvalidArgument if a library, or its format, has no such collective or algorithm."""
    for rule in rules:
        collective = collective_of(rule.collective, known, library)
        if rule.algorithm not in collective.schedules:
            raise UnknownName(
                f"{library} {rule.collective} algorithm", rule.algorithm, [*collective.schedules]
            )


def collective_of(
    name: str, known: Mapping[str, LibraryCollective], library: str
) -> LibraryCollective:
    """Return a collective of a library; InvalidArgument if its rules cannot name it."""
    if name not in known:
        raise InvalidArgument(
            f"{name}: {library} has no choice of algorithms that a file could make for it; "
            f"expected {', '.join(known)}"
        )
    return known[name]
