"""Which way serves a call: what the caller, the configuration and the rules say; with reasons."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace

from ..calls.call import Call
from ..errors import UnknownName, Unsupported
from ..schedule.registry import (
    NATIVE,
    SINGLE_COPY,
    STAGED,
    SYMMETRIC,
    Choice,
    Groups,
    algorithms,
    find,
)
from .config import CollectiveConfig
from .estimates import Advice, memory_of
from .rules import (
    STAGING_BYTES,
    WITH_NATIVE,
    WITH_SYMMETRIC,
    WITHOUT_NATIVE,
    Rule,
    levels_for,
    single_copy_range,
    staged_below,
)

AHEAD = 0.9
"""One way must be predicted to take at most this part of the time of the one that the rules name.

The model knows nothing of what the processors have to do besides; and two ways that take about as
long must not change places from launch to launch, for their bits may differ.
"""


@dataclass(frozen=True)
class Contest:
    """Two ways to serve a call between nodes.

    Attributes
    ----------
    two : Choice
        Algorithm on two levels, which the rules name for these bytes.
    flat : list of Choice
        Algorithms that take all ranks for alike, first the one that the rules name for these bytes;
        native is taken to be the best of them.
    prior : bool
        Whether the rules, as they were measured over a slow link, are for two levels.
    """

    two: Choice
    flat: list[Choice]
    prior: bool


def contest(
    call: Call, groups: Groups, crowded: bool, able: Callable[[str], Choice | None]
) -> Contest | None:
    """Return the ways that compete; None where there is nothing to choose.

    ``able(name)`` returns an algorithm if it can serve the call.
    """
    if len(groups) < 2 or call.uneven_alltoall:
        return None
    where = call.size, len(groups), crowded

    def fitting(rules: tuple[Rule, ...]) -> list[Choice]:
        """Give the algorithms that serve, those first whose rule holds for these bytes."""
        ordered = sorted(rules, key=lambda rule: not rule.holds(call.nbytes, *where))
        names = dict.fromkeys(rule.name for rule in ordered if rule.name != NATIVE)
        return [choice for name in names if (choice := able(name)) is not None]

    levels = [rule for rule in WITH_NATIVE.get(call.collective, ()) if rule.between_nodes]
    two, flat = fitting(tuple(levels)), fitting(WITHOUT_NATIVE[call.collective])
    if not two or not flat:
        return None
    prior = any(r.name == two[0].name and r.holds(call.nbytes, *where) for r in levels)
    return Contest(two[0], flat, prior)


def by_links(
    call: Call, found: Contest, native: bool, advice: Advice
) -> tuple[Choice | None, str] | None:
    """Choose by the measured links; the same on every rank, which have the same constants.

    Parameters
    ----------
    call : Call
        What is to be served.
    found : Contest
        What competes.
    native : bool
        Whether the library can serve the call; it stands for the best flat algorithm, after a
        barrier: a native call with a deadline waits first until all have come.
    advice : Advice
        With the cost model.

    Returns
    -------
    choice : Choice or None
        The algorithm, None for native.
    why : str
        With the times.
    """
    flats = found.flat if native else found.flat[:1]
    times = advice.between_nodes(call.collective, [found.two, *flats], call.nbytes)
    if times is None:
        return None
    two, (flat, best) = times[0], min(zip(times[1:], flats), key=lambda pair: pair[0])
    flat_name = f"{NATIVE} (as {best.name})" if native else best.name
    if native and found.prior and call.collective != "barrier":
        meeting = find("barrier", WITHOUT_NATIVE["barrier"][0].name)
        flat += (advice.between_nodes("barrier", [meeting], 0) or [0.0])[0]
    takes_two = two * AHEAD <= flat if found.prior else two <= AHEAD * flat
    pair = [f"{found.two.name} {_time(two)}", f"{flat_name} {_time(flat)}"]
    why = f"cost model with the measured links: {', '.join(pair if takes_two else pair[::-1])}"
    if advice.scaled_down:
        why += f" ({advice.scaled_down})"
    return (found.two if takes_two else None if native else best), why


def _time(seconds: float) -> str:
    return f"{seconds * 1e6:,.4g} µs" if seconds < 1e-2 else f"{seconds * 1e3:,.4g} ms"


_ANY = float("inf")


@dataclass(frozen=True)
class Way:
    """One way to serve a call.

    Attributes
    ----------
    name : str
        Name of an executor such as ``"native"``, or of an algorithm with its parameter.
    choice : Choice or None
        The algorithm, which is run over messages; None for the other executors.
    why : str
        The reason, as a sentence.
    can : bool
        Whether it can serve the call at all.
    seconds : float or None
        Expected time; only in the answer of ``explain``.
    basis : str
        Source of the expected time.
    missing : tuple of str
        Names of the calibration's constants that are still to be measured and could change this
        choice; empty if none could.
    """

    name: str
    choice: Choice | None
    why: str
    can: bool = True
    seconds: float | None = None
    basis: str = ""
    missing: tuple[str, ...] = ()


@dataclass(frozen=True)
class Means:
    """What a communicator has to serve a call with.

    Attributes
    ----------
    groups : tuple of tuple of int
        The ranks of each node.
    reasons : mapping of str to (str or None)
        For every executor but messages, in order of listing: why it cannot serve the call, or None
        if it can.
    vendor : str
        The name of the MPI library, for example "Open MPI"; empty without MPI.
    crowded : bool
        Whether there are more ranks than cores.
    """

    groups: Groups
    reasons: Mapping[str, str | None]
    vendor: str = ""
    crowded: bool = False


# What the executors do, in the list of ``explain``.
_SUMMARIES = {
    NATIVE: "the backend's own collective",
    SYMMETRIC: "every rank reads and writes the others' arrays",
    STAGED: "every rank reads what the others copied into shared memory",
    SINGLE_COPY: "every rank reads the others' private arrays",
}


class Ways:
    """The ways to serve one call; each algorithm is looked up and asked once, when it is named.

    Parameters
    ----------
    call : Call
        The call.
    means : Means
        The executors' reasons, and the facts that rules depend on.
    """

    def __init__(self, call: Call, means: Means):
        self.call, self.means, self.nbytes = call, means, call.nbytes
        self._reasons = dict(means.reasons)
        self._choices: dict[str, Choice] = {}

    def why_not(self, name: str) -> str | None:
        """Return why a way cannot serve the call, or None if it can.

        Raises
        ------
        UnknownName
            If no executor and no algorithm has that name.
        """
        if name not in self._reasons:
            choice = find(self.call.collective, name)
            self._choices[name] = choice
            self._reasons[name] = why_not(choice, self.call, self.means.groups)
        return self._reasons[name]

    def can(self, name: str) -> bool:
        """Return whether a way can serve the call."""
        known = self._reasons
        return (known[name] if name in known else self.why_not(name)) is None

    def algorithm(self, name: str) -> Choice | None:
        """Return an algorithm if it can serve the call, else None."""
        return self._choices[name] if self.can(name) else None

    def taken(self, name: str, why: str) -> Way:
        """Return a way that can serve the call as the chosen one, or raise Unsupported."""
        reason = self.why_not(name)
        if reason is not None:
            raise self.unsupported(name, reason)
        choice = self._choices.get(name)
        return Way(name if choice is None else choice.name, choice, why)

    def every(self) -> list[Way]:
        """Return every way with whether it can serve the call, and why not: for ``explain``."""
        return list(self._each())

    def _each(self) -> Iterator[Way]:
        for name, reason in self.means.reasons.items():
            summary = _SUMMARIES.get(name, f"the executor {name}")
            if name == SYMMETRIC and self.call.collective == "barrier":
                summary = "the ranks meet by numbers in shared memory"
            yield Way(name, None, reason or summary, reason is None)
        for algorithm in algorithms(self.call.collective):
            reason = self.why_not(algorithm.name)
            choice = self._choices[algorithm.name]
            yield Way(algorithm.name, choice, reason or algorithm.summary, reason is None)

    def first(self, why: str) -> Way:
        """Return the first way that can serve the call, or raise Unsupported."""
        for way in self._each():
            if way.can:
                return replace(way, why=why)
        raise self.unsupported("auto", "no registered algorithm can serve this call")

    def unsupported(self, name: str, reason: str) -> Unsupported:
        """Return the error that names the ways that can serve the call."""
        able = ", ".join(way.name for way in self._each() if way.can)
        call = self.call
        return Unsupported(
            f"rank {call.rank}: {call.collective} {name!r}: {reason}; able to serve this call: "
            f"{able or 'nothing that is registered'}"
        )


def why_not(choice: Choice, call: Call, groups: Groups) -> str | None:
    """Return why an algorithm cannot serve a call, or None if it can."""
    algorithm = choice.algorithm
    reason = algorithm.unsupported(call.size, groups=groups)
    if reason is not None:
        return reason
    if call.op is not None and not call.op.commute and not algorithm.ordered:
        name = algorithm.name
        return f"op {call.op.name!r} is not commutative and {name} combines out of rank order"
    if algorithm.equal_blocks and not call.even:
        return f"{algorithm.name} needs equal counts"
    return None


def choose(
    ways: Ways, algorithm: str, config: CollectiveConfig, advice: Advice | None = None
) -> Way:
    """Choose how to serve a call.

    Precedence: the call's ``algorithm=``, a strategy or threshold that the user set, the tuning
    table, the measured links and the cost model, shipped rules.  An explicit name is never replaced
    by another way.

    Parameters
    ----------
    ways : Ways
        The ways to serve the call.
    algorithm : str
        What the call asks for.
    config : CollectiveConfig
        What the user set.
    advice : Advice, optional
        The tuning table and the cost model.

    Returns
    -------
    Way
        The way.  Where its `missing` is not empty, constants of the cost model would decide, and
        the shipped rules did: calibrate, and choose again.

    Raises
    ------
    UnknownName
        If there is no such algorithm.
    Unsupported
        If it cannot serve this call; the message names what can.
    """
    call = ways.call
    if algorithm != "auto":
        return ways.taken(algorithm, "the call asks for it")
    commutes = call.op is None or call.op.commute
    asked = config.asked(call.collective, ways.nbytes, call.size, commutes)
    if asked is not None:
        return ways.taken(asked, "the configuration asks for it")
    tuned, without = _tuned(ways, advice)
    if tuned is not None:
        return tuned
    way = _untuned(ways, advice)
    return replace(way, why=f"{way.why}; {without}") if without else way


def _tuned(ways: Ways, advice: Advice | None) -> tuple[Way | None, str]:
    """Return the way that the tuning table names, if it can serve; else None and why not."""
    call = ways.call
    if advice is None or advice.table is None:
        return None, ""
    entry, without = advice.entry(
        call, memory_of(call.collective != "barrier" and ways.can(SYMMETRIC))
    )
    if entry is None:
        return None, without
    name, first, above = entry.at(ways.nbytes)
    table = f"tuning table {advice.table.source}"
    try:
        reason = ways.why_not(name)
    except UnknownName:
        reason = "there is no such way"
    if reason is not None:
        return None, f"the {table} names {name}, but {reason}"
    upto = "on" if above == _ANY else f"to below {_size(above)}"
    return ways.taken(name, f"{table}: {name} from {_size(first)} {upto}"), ""


def _untuned(ways: Ways, advice: Advice | None) -> Way:
    """Choose by the measured links, else by the cost model, else by the shipped rules."""
    shared = _by_shared_memory(ways)
    fastest, missing = (None, ()) if advice is None else _predicted(ways, advice, shared is None)
    way = fastest or shared or _by_rules(ways)
    return replace(way, missing=missing) if missing else way


def _predicted(ways: Ways, advice: Advice, by_messages: bool) -> tuple[Way | None, tuple[str, ...]]:
    """Return the fastest way by the calibration; else None, and the constants that are missing.

    Links are compared only where no shared memory serves the call: `by_messages`.
    """
    call, means, missing = ways.call, ways.means, advice.missing
    if advice.model is None and not missing:
        return None, ()
    between = None
    if by_messages and means.groups == advice.groups:
        between = contest(call, means.groups, means.crowded, ways.algorithm)
    linked = None if between is None else by_links(call, between, ways.can(NATIVE), advice)
    if linked is not None:
        choice, why = linked
        return ways.taken(NATIVE if choice is None else choice.name, why), ()
    rivals = _rivals(ways)
    fastest = advice.cheapest(call, rivals)
    if fastest is not None:
        choice, why = fastest
        return ways.taken(choice.name, why), ()
    return None, missing if rivals or between is not None else ()


def _rivals(ways: Ways) -> list[Choice]:
    """Return the algorithms among which the cost model decides, where it is calibrated.

    These are what the rules name and what can serve, where native cannot.
    """
    call, means = ways.call, ways.means
    if ways.can(NATIVE) or ways.can(SYMMETRIC) or call.uneven_alltoall:
        return []
    names = dict.fromkeys(rule.name for rule in WITHOUT_NATIVE[call.collective])
    if len(means.groups) > 1:
        names |= dict.fromkeys(levels_for(call.collective))
    able = [choice for name in names if (choice := ways.algorithm(name)) is not None]
    return able if len(able) > 1 else []


def _by_shared_memory(ways: Ways) -> Way | None:
    """Return the way through memory that the ranks share, if the rules name one."""
    call, means, nbytes = ways.call, ways.means, ways.nbytes
    crowd = ", with more ranks than cores" if means.crowded else ""
    least = WITH_SYMMETRIC[call.collective][means.crowded]
    if nbytes >= least and ways.can(SYMMETRIC):
        since = f"from {_size(least)} on" if least else "at every size"
        return ways.taken(SYMMETRIC, f"shipped rule: symmetric {since}{crowd}")
    below = staged_below(call.collective, means.vendor, means.crowded)
    if nbytes < below and ways.can(STAGED):
        slot = below > STAGING_BYTES
        upto = f"up to {_size(STAGING_BYTES)}" if slot else f"below {_size(below)}"
        return ways.taken(STAGED, f"shipped rule: staged {upto}{crowd}")
    first, below = single_copy_range(call.collective, means.vendor, means.crowded)
    if first <= nbytes < below and ways.can(SINGLE_COPY):
        since = f"from {_size(first)}" + (f" to below {_size(below)}" if below < _ANY else " on")
        return ways.taken(SINGLE_COPY, f"shipped rule: single_copy {since}{crowd}")
    return None


def _by_rules(ways: Ways) -> Way:
    """Choose by the shipped rules, where shared memory does not serve."""
    call, means = ways.call, ways.means
    native = ways.can(NATIVE)
    if native and call.collective not in WITH_NATIVE:
        return ways.taken(NATIVE, "shipped rule: native at every size")
    rules = WITH_NATIVE[call.collective] if native else WITHOUT_NATIVE[call.collective]
    nbytes = _ANY if call.uneven_alltoall else ways.nbytes  # the ranks must choose alike
    where = call.size, len(means.groups), means.crowded
    for rule in rules:
        if not rule.holds(nbytes, *where) or not ways.can(rule.name):
            continue
        limit = f"below {_size(rule.below)}" if rule.below < _ANY else "for large buffers"
        if rule.below == _ANY and not any(
            other.below < _ANY and other.holds(0, *where) for other in rules
        ):
            limit = "at every size"
        return ways.taken(rule.name, f"shipped rule: {rule.name} {limit}")
    return ways.first("nothing that the shipped rules name can serve this call")


def _size(nbytes: float) -> str:
    for unit, name in ((1 << 30, "GiB"), (1 << 20, "MiB"), (1 << 10, "KiB")):
        if nbytes >= unit:
            return f"{nbytes / unit:.4g} {name}"
    return f"{nbytes:g} B"
