"""The exceptions that ended ranks: printed once for all ranks that failed alike."""

from __future__ import annotations

import signal
import sys
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace

from .. import errors
from ..foreign import shown
from ..measure import plural
from .ranks import LOST, RankState

LINE = 160  # characters of an exception in the last line of a job
INTERRUPT = KeyboardInterrupt.__name__
SETTLED = 1.0  # seconds after which the first exceptions are printed, if the job goes on
# These usually follow another rank's failure.  A hang may begin where a deadline passes; the other
# two are never where it begins, but may be told before the failure that they name.
_FOLLOW = {errors.CollectiveTimeout: 1, errors.RankFailed: 2, errors.CommunicatorBroken: 2}
_FAR = {kind.__name__: far for kind, far in _FOLLOW.items()}

# What a program is refused for, or cannot be read for, is the same at each start.  A MemoryError is
# of Python or of mpidist: one of numpy and of PyTorch has a class of its own.
_AGAIN = (errors.InvalidArgument, errors.Unsupported, SyntaxError, ImportError, NameError)
_KINDS = {kind for base in (*_AGAIN, MemoryError) for kind in (base, *base.__subclasses__())}
COME_AGAIN = frozenset(kind.__name__ for kind in _KINDS)


def from_the_cause(kind: str) -> int:
    """Return how far from the cause exceptions of a class usually are; 0 if they follow none."""
    return _FAR.get(kind, 0)


@dataclass
class Failure:
    """The exception that ended a rank."""

    number: int  # the rank
    host: str
    kind: str  # name of the exception's class
    line: str  # class and message
    text: str  # the traceback

    @property
    def comes_again(self) -> str:
        """What would be the same at each start; "" if that is not sure."""
        return self.kind if self.kind in COME_AGAIN else ""

    @property
    def follows(self) -> int:
        """How far from the cause the exception is: 0 for one that follows no other rank's."""
        return from_the_cause(self.kind)

    def __str__(self) -> str:
        line = self.without_rank(f": {self.line}")[2:]
        short = line if len(line) <= LINE else f"{line[:LINE]}…"
        return f"rank {self.number} on {self.host} failed first: {short}"

    def without_rank(self, text: str) -> str:
        """Return `text` without this rank's "rank N: " where an exception's message begins."""
        return text.replace(f": rank {self.number}: ", ": ")

    @property
    def keys(self) -> tuple[str, str]:
        """The traceback with and without this rank's number; failures that share one are alike."""
        return self.text, self.without_rank(self.text)


@dataclass
class Failures:
    """The exceptions of a job's ranks, in the order in which they arrive."""

    ranks: int  # of the job
    known: list[Failure] = field(default_factory=list)
    printed: int = 0  # how many of `known`
    _since: float = 0.0  # arrival of the first that is not printed
    _shown: set[str] = field(default_factory=set)  # keys

    def add(self, number: int, host: str, described: dict[str, str]) -> None:
        """Add a rank's exception; raise KeyError or TypeError if `described` has another form."""
        texts = [str(described[name]) for name in ("kind", "line", "text")]
        if self.printed == len(self.known):
            self._since = time.monotonic()
        self.known.append(Failure(number, host, *texts))

    def cause(self, states: Iterable[RankState]) -> Failure | RankState | None:
        """Return the first exception of those that are nearest to the cause.

        If all follow another rank's failure, as :class:`RankFailed` does, return the first of
        `states` whose rank reported no exception, and ended by a signal (but SIGTERM, by which
        launchers end ranks) or with an exit code other than 0; without such a state, that
        exception.  None if no rank reported an exception.
        """
        first = min(self.known, key=lambda failure: failure.follows, default=None)
        if first is None or not first.follows:
            return first
        told = {failure.number for failure in self.known}
        others = [replace(s, status=s.left or s.status) for s in states if s.number not in told]
        ended = (s for s in others if s.status not in (None, 0, LOST, -signal.SIGTERM))
        return next(ended, first)

    def print_settled(self) -> None:
        """Print the new exceptions 1 s after the first of them, when equal ones have arrived."""
        if self.printed < len(self.known) and time.monotonic() > self._since + SETTLED:
            self.print()

    def print(self) -> None:
        """Print each new traceback once, with its ranks.

        A traceback printed before gets one line, and so does an exception that usually follows
        another rank's failure (:attr:`Failure.follows`), unless it is the first one printed.
        """
        # Texts of ranks that fail alike may differ in their "rank N: " only.  So a failure is found
        # by its text with that and without, and joins the first group that has either.
        groups: list[list[Failure]] = []
        known: dict[str, list[Failure]] = {}
        for failure in sorted(self.known[self.printed :], key=lambda each: each.follows):
            group = next((known[key] for key in failure.keys if key in known), [])
            if not group:
                groups.append(group)
            group.append(failure)
            known |= dict.fromkeys(failure.keys, group)
        self.printed = len(self.known)
        for group in groups:
            one = group[0]
            who = f"{ranks_listed([each.number for each in group])} of {self.ranks} failed"
            text, line = one.text, f": {one.line}"
            if any(each.text != text for each in group):
                text, line = one.without_rank(text), one.without_rank(line)
            again = not self._shown.isdisjoint(one.keys)
            if again or (one.follows and self._shown):
                _write(f"{who}{' alike' * again}{line}\n")
            else:
                _write(f"{who}; the job ends\n{text}")
            self._shown.update(*(each.keys for each in group))


def _write(text: str) -> None:
    sys.stderr.write(shown(text if text.endswith("\n") else f"{text}\n"))
    sys.stderr.flush()


def ranks_listed(ranks: Sequence[int]) -> str:
    """Return ranks as text, ``rank 2`` or ``ranks 0-3, 5``."""
    runs: list[list[int]] = []
    for rank in sorted(set(ranks)):
        if runs and rank == runs[-1][-1] + 1:
            runs[-1][1:] = [rank]
        else:
            runs.append([rank])
    parts = ["-".join(map(str, run)) for run in runs]
    return f"{plural(len(set(ranks)), 'rank')} {', '.join(parts)}"
