"""Which way serves a call: what the caller, the configuration and the rules say; with reasons."""

from __future__ import annotations

from dataclasses import dataclass, replace

from .advice import Advice, memory_of
from .between_nodes import Contest, by_links, contest
from .call import Call
from .config import CollectiveConfig
from .errors import Unsupported
from .rules import (
    NATIVE,
    WITH_NATIVE,
    WITH_SYMMETRIC,
    WITHOUT_NATIVE,
    levels_for,
    single_copy_range,
    staged_below,
)
from .schedule.registry import Choice, Groups, algorithms, find
from .symmetric import SINGLE_COPY, STAGED, SYMMETRIC
from .symmetric.heap import STAGING_BYTES

_ANY = float("inf")


@dataclass(frozen=True)
class Way:
    """One way to serve a call.

    Attributes
    ----------
    name : str
        ``"native"``, or an algorithm's name with its parameter.
    choice : Choice or None
        The algorithm; None for native.
    why : str
        The reason, as a sentence.
    can : bool
        Whether it can serve the call at all.
    seconds : float or None
        The time that it is expected to take; only in what ``explain`` gives.
    basis : str
        Where that time is from.
    """

    name: str
    choice: Choice | None
    why: str
    can: bool = True
    seconds: float | None = None
    basis: str = ""


@dataclass(frozen=True)
class Means:
    """What a communicator has to serve calls with.

    Attributes
    ----------
    groups : tuple of tuple of int
        Which ranks share a node.
    no_native : str or None
        Why the backend's own collective cannot serve the call; None if it can.
    no_symmetric : str or None
        Why it cannot be served in symmetric memory; None if it can.
    no_staged : str or None
        Why private arrays cannot go through slots of shared memory; None if they can.
    no_single_copy : str or None
        Why the ranks cannot read each other's private arrays; None if they can.
    vendor : str
        The name of the MPI library, for example "Open MPI"; empty without MPI.
    crowded : bool
        Whether there are more ranks than cores.
    """

    groups: Groups
    no_native: str | None = None
    no_symmetric: str | None = "no array is in symmetric memory"
    no_staged: str | None = "the ranks share no memory"
    no_single_copy: str | None = "the ranks share no memory"
    vendor: str = ""
    crowded: bool = False


def ways(call: Call, means: Means) -> list[Way]:
    """List every way with whether it can serve the call, and why not: for ``explain``."""
    no_native = means.no_native
    found = [Way(NATIVE, None, no_native or "the backend's own collective", no_native is None)]
    direct = "every rank reads and writes the others' arrays"
    if call.collective == "barrier":
        direct = "the ranks meet by numbers in shared memory"
    shared = (
        (SYMMETRIC, means.no_symmetric, direct),
        (STAGED, means.no_staged, "every rank reads what the others copied into shared memory"),
        (SINGLE_COPY, means.no_single_copy, "every rank reads the others' private arrays"),
    )
    found += [Way(name, None, reason or how, reason is None) for name, reason, how in shared]
    for algorithm in algorithms(call.collective):
        choice = Choice(algorithm)
        reason = why_not(choice, call, means.groups)
        found.append(Way(algorithm.name, choice, reason or algorithm.summary, reason is None))
    return found


def why_not(choice: Choice, call: Call, groups: Groups) -> str | None:
    """Say why an algorithm cannot serve a call, or give None."""
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
    call: Call,
    algorithm: str,
    config: CollectiveConfig,
    means: Means,
    advice: Advice | None = None,
) -> Way:
    """Choose how to serve a call.

    Precedence: the call's ``algorithm=``, a strategy or threshold that the user set, the tuning
    table, shipped rules.  An explicit name is never replaced by another way.

    Raises
    ------
    UnknownName
        If there is no such algorithm.
    Unsupported
        If it cannot serve this call; the message names what can.
    """
    if algorithm != "auto":
        return _explicit(call, algorithm, means, "the call asks for it")
    commutes = call.op is None or call.op.commute
    asked = config.asked(call.collective, call.nbytes, call.size, commutes)
    if asked is not None:
        return _explicit(call, asked, means, "the configuration asks for it")
    tuned, without = _tuned(call, means, advice)
    if tuned is not None:
        return tuned
    way = _by_links(call, means, advice) or _by_cost(call, means, advice) or _by_rules(call, means)
    return replace(way, why=f"{way.why}; {without}") if without else way


def _tuned(call: Call, means: Means, advice: Advice | None) -> tuple[Way | None, str]:
    """Give the way that the tuning table names, if it can serve; else None and why not."""
    if advice is None or advice.table is None:
        return None, ""
    entry, without = advice.entry(
        call, memory_of(means.no_symmetric is None and call.collective != "barrier")
    )
    if entry is None:
        return None, without
    name, first, above = entry.at(call.nbytes)
    table = f"tuning table {advice.table.source}"
    base = name.partition("/")[0].partition(":")[0]
    way = next((w for w in ways(call, means) if w.name == base), None)
    if way is None or not way.can:
        reason = "there is no such way" if way is None else way.why
        return None, f"the {table} names {name}, but {reason}"
    choice = None if way.choice is None else find(call.collective, name)
    upto = "on" if above == _ANY else f"to below {_size(above)}"
    return Way(name, choice, f"{table}: {name} from {_size(first)} {upto}"), ""


def rivals(call: Call, means: Means) -> list[Choice]:
    """Give the algorithms that the rules name and that can serve, where native cannot.

    Among these the cost model decides, where it is calibrated.
    """
    if means.no_native is None or means.no_symmetric is None or call.uneven_alltoall:
        return []
    names = dict.fromkeys(rule.name for rule in WITHOUT_NATIVE[call.collective])
    if len(means.groups) > 1:
        names |= dict.fromkeys(levels_for(call.collective))
    choices = [find(call.collective, name) for name in names]
    able = [c for c in choices if why_not(c, call, means.groups) is None]
    return able if len(able) > 1 else []


def needs_calibration(
    call: Call, algorithm: str, config: CollectiveConfig, means: Means, advice: Advice | None
) -> bool:
    """Tell whether a choice would use constants that are still to be measured."""
    if advice is None or not advice.uncalibrated or algorithm != "auto":
        return False
    commutes = call.op is None or call.op.commute
    if config.asked(call.collective, call.nbytes, call.size, commutes) is not None:
        return False
    if _tuned(call, means, advice)[0] is not None:
        return False
    return bool(rivals(call, means)) or _between_nodes(call, means, advice) is not None


def _between_nodes(call: Call, means: Means, advice: Advice) -> Contest | None:
    """Give what competes between nodes; None where the call is not one between nodes."""
    if means.groups != advice.groups or _by_shared_memory(call, means) is not None:
        return None
    groups = means.groups
    return contest(call, groups, means.crowded, lambda c: why_not(c, call, groups) is None)


def _by_links(call: Call, means: Means, advice: Advice | None) -> Way | None:
    """Give one level or two by the measured links, where the ranks are on several nodes."""
    found = None if advice is None else _between_nodes(call, means, advice)
    if advice is None or found is None:
        return None
    chosen = by_links(call, found, means.no_native is None, advice)
    if chosen is None:
        return None
    choice, why = chosen
    return Way(NATIVE if choice is None else choice.name, choice, why)


def _by_cost(call: Call, means: Means, advice: Advice | None) -> Way | None:
    """Give the fastest by the cost model, where hand-written algorithms are all there is."""
    if advice is None or advice.model is None:
        return None
    found = advice.cheapest(call, rivals(call, means))
    return None if found is None else Way(found[0].name, *found)


def _by_shared_memory(call: Call, means: Means) -> Way | None:
    """Give the way through memory that the ranks share, if the rules name one."""
    crowd = ", with more ranks than cores" if means.crowded else ""
    least = WITH_SYMMETRIC[call.collective][means.crowded]
    if means.no_symmetric is None and call.nbytes >= least:
        since = f"from {_size(least)} on" if least else "at every size"
        return Way(SYMMETRIC, None, f"shipped rule: symmetric {since}{crowd}")
    below = staged_below(call.collective, means.vendor, means.crowded)
    if means.no_staged is None and call.nbytes < below:
        slot = below > STAGING_BYTES
        upto = f"up to {_size(STAGING_BYTES)}" if slot else f"below {_size(below)}"
        return Way(STAGED, None, f"shipped rule: staged {upto}{crowd}")
    first, below = single_copy_range(call.collective, means.vendor, means.crowded)
    if means.no_single_copy is None and first <= call.nbytes < below:
        since = f"from {_size(first)}" + (f" to below {_size(below)}" if below < _ANY else " on")
        return Way(SINGLE_COPY, None, f"shipped rule: single_copy {since}{crowd}")
    return None


def _by_rules(call: Call, means: Means) -> Way:
    """Choose by the shipped rules."""
    native = means.no_native is None
    shared = _by_shared_memory(call, means)
    if shared is not None:
        return shared
    if native and call.collective not in WITH_NATIVE:
        return Way(NATIVE, None, "shipped rule: native at every size")
    rules = WITH_NATIVE[call.collective] if native else WITHOUT_NATIVE[call.collective]
    nbytes = _ANY if call.uneven_alltoall else call.nbytes  # the ranks must choose alike
    where = call.size, len(means.groups), means.crowded
    for rule in rules:
        if not rule.holds(nbytes, *where):
            continue
        limit = f"below {_size(rule.below)}" if rule.below < _ANY else "for large buffers"
        if rule.below == _ANY and not any(
            other.below < _ANY and other.holds(0, *where) for other in rules
        ):
            limit = "at every size"
        why = f"shipped rule: {rule.name} {limit}"
        if rule.name == NATIVE:
            return Way(NATIVE, None, why)
        choice = find(call.collective, rule.name)
        if why_not(choice, call, means.groups) is None:
            return Way(choice.name, choice, why)
    able = [way for way in ways(call, means) if way.can]
    if not able:
        reason = "no registered algorithm can serve this call"
        raise _unsupported(call, "auto", reason, means)
    first = able[0]
    return Way(first.name, first.choice, "nothing that the shipped rules name can serve this call")


def _explicit(call: Call, name: str, means: Means, why: str) -> Way:
    if name == NATIVE:
        if means.no_native is not None:
            raise _unsupported(call, name, means.no_native, means)
        return Way(NATIVE, None, why)
    shared = {
        SYMMETRIC: means.no_symmetric,
        STAGED: means.no_staged,
        SINGLE_COPY: means.no_single_copy,
    }
    if name in shared:
        reason = shared[name]
        if reason is not None:
            raise _unsupported(call, name, reason, means)
        return Way(name, None, why)
    choice = find(call.collective, name)
    cannot = why_not(choice, call, means.groups)
    if cannot is not None:
        raise _unsupported(call, name, cannot, means)
    return Way(choice.name, choice, why)


def _unsupported(call: Call, name: str, reason: str, means: Means) -> Unsupported:
    able = [w.name for w in ways(call, means) if w.can]
    return Unsupported(
        f"rank {call.rank}: {call.collective} {name!r}: {reason}; able to serve this call: "
        f"{', '.join(able) or 'nothing that is registered'}"
    )


def _size(nbytes: float) -> str:
    for unit, name in ((1 << 30, "GiB"), (1 << 20, "MiB"), (1 << 10, "KiB")):
        if nbytes >= unit:
            return f"{nbytes / unit:.4g} {name}"
    return f"{nbytes:g} B"
