"""Every exception a user can catch: one tree under :class:`MpidistError`."""

from __future__ import annotations

import difflib
from collections.abc import Iterable


class MpidistError(Exception):
    """Base class of every error that mpidist raises on purpose."""


class ScheduleError(MpidistError):
    """A schedule does not do what its collective, or the pipeline, promises.

    Attributes
    ----------
    rank, round, block : int or None
        Where it goes wrong; None where the fault has no such place.
    stage, step : int or None
        The same for pipelines: the virtual stage, and the action of that rank, counted from 0.
    """

    def __init__(
        self,
        message: str,
        *,
        rank: int | None = None,
        round: int | None = None,
        block: int | None = None,
        stage: int | None = None,
        step: int | None = None,
    ):
        self.rank, self.round, self.block = rank, round, block
        self.stage, self.step = stage, step
        places = {"rank": rank, "stage": stage, "round": round, "block": block, "step": step}
        where = [f"{name} {value}" for name, value in places.items() if value is not None]
        super().__init__(f"{', '.join(where)}: {message}" if where else message)


class Unsupported(MpidistError):
    """The algorithm or backend cannot serve this call; the message names what can."""


class UnsupportedDtype(Unsupported, TypeError):
    """The operation is not defined for the array's dtype."""


class InvalidArgument(MpidistError, ValueError):
    """An argument is wrong; the message gives rank, argument, value and what is allowed."""


class InvalidRank(InvalidArgument):
    """A rank outside ``0 … size - 1``.

    Attributes
    ----------
    rank, size : int
        The rank that was given, and the size of the communicator.
    """

    def __init__(self, rank: object, size: int, argument: str = "rank", caller: int | None = None):
        self.rank, self.size = rank, size
        who = f"rank {caller}: " if caller is not None else ""
        super().__init__(f"{who}{argument}={rank!r} is not a rank: allowed are 0 … {size - 1}")


class UnknownName(InvalidArgument):
    """A name that nothing is registered under; the message gives the nearest ones."""

    def __init__(self, kind: str, name: object, known: Iterable[str]):
        known = sorted(known)
        near = difflib.get_close_matches(str(name), known, n=3, cutoff=0.5)
        hint = f"did you mean {' or '.join(map(repr, near))}? " if near else ""
        super().__init__(f"unknown {kind} {name!r}; {hint}known: {', '.join(known)}")


class ConfigError(InvalidArgument):
    """A configuration that contradicts itself or the communicator."""


class LaunchError(MpidistError):
    """The processes were started in a way that cannot work; the message says how to start them."""


class CheckpointError(MpidistError):
    """A checkpoint could not be written, or is damaged; what was complete before is still there."""


class ReplicasDiffer(MpidistError):
    """Ranks have other parameters; the message names these and the ranks (`check_replicas`)."""


class CommunicationError(MpidistError):
    """Base class of what goes wrong between ranks while they communicate."""


class CollectiveTimeout(CommunicationError, TimeoutError):
    """A deadline passed before every rank had arrived or every message had come.

    Attributes
    ----------
    collective : str
        The operation that was waited for.
    sequence : int or None
        Its number among the communicator's collectives, counted from 1.
    missing : tuple of int
        Ranks that had not reached it; empty where all had, or nothing is known.
    """

    def __init__(
        self,
        message: str,
        *,
        collective: str = "",
        sequence: int | None = None,
        missing: tuple[int, ...] = (),
    ):
        super().__init__(message)
        self.collective, self.sequence, self.missing = collective, sequence, missing


class CommunicatorBroken(CommunicationError):
    """The communicator was left with an operation that can neither finish nor be cancelled."""


class CollectiveMismatch(CommunicationError):
    """The ranks did not call the same collective with matching arguments.

    Attributes
    ----------
    harmless : bool
        The communicator stays usable: nothing was sent, or what was sent was taken and dropped.
    """

    harmless = False


class MessageMismatch(CollectiveMismatch):
    """A message is not of the dtype and shape of the array that is to receive it.

    It is taken and dropped, so the communicator stays usable.

    Attributes
    ----------
    sender, tag : int
        Who sent it, and with which tag.
    sent, expected : str
        Dtype and shape of the message, and of the array.
    """

    harmless = True

    def __init__(self, message: str, *, sender: int, tag: int, sent: str, expected: str):
        super().__init__(message)
        self.sender, self.tag, self.sent, self.expected = sender, tag, sent, expected


class DeadlockError(CommunicationError):
    """Every rank waits for a message that no rank will send (seen by the simulated backend)."""


class RankFailed(CommunicationError):
    """Another rank ended with an exception, or was killed.

    Attributes
    ----------
    echo : bool
        This rank only found out: the cause is elsewhere.
    """

    echo = False
