"""On one level or two: what the measured links say, where the ranks are on several nodes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from .advice import Advice
from .call import Call
from .rules import NATIVE, WITH_NATIVE, WITHOUT_NATIVE, Rule
from .schedule.registry import Choice, Groups, find

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
