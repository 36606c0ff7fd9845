"""The exceptions that mpidist raises: one tree under :class:`MpidistError`."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from types import MappingProxyType


class MpidistError(Exception):
    """Base class of all errors that mpidist raises."""


class ScheduleError(MpidistError):
    """A schedule violates the contract of its collective, or of the pipeline.

    Attributes
    ----------
    rank, round, block : int or None
        Rank, round and block of the fault; None where they are unknown.
    stage, step : int or None
        Virtual stage of a fault in a pipeline, and number of the rank's action, from 0.
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
    """The algorithm or backend cannot serve this call; the message names alternatives."""


class UnsupportedDtype(Unsupported, TypeError):
    """The operation is not defined for the array's dtype."""


class InvalidArgument(MpidistError, ValueError):
    """An argument is wrong; the message names rank, argument, value and allowed values."""


class InvalidRank(InvalidArgument):
    """A rank outside ``0 … size - 1``.

    Parameters
    ----------
    rank, size : int
        The given rank, and the size of the communicator; also attributes.
    argument : str
        Name of the argument.
    caller : int, optional
        The rank on which it was given.
    """

    def __init__(self, rank: object, size: int, argument: str = "rank", caller: int | None = None):
        self.rank, self.size = rank, size
        who = f"rank {caller}: " if caller is not None else ""
        super().__init__(f"{who}{argument}={rank!r} is not a rank: expected 0 … {size - 1}")


class UnknownName(InvalidArgument):
    """A name that is not registered; the message has the most similar and all known names.

    Parameters
    ----------
    kind : str
        Kind of object that was looked up, for the message: "collective", "op".
    name : object
        The unknown name.
    known : iterable of str
        The registered names.
    elsewhere : mapping of str to str
        Names in other libraries, in lower case, and the registered names of the same things.
    """

    def __init__(
        self,
        kind: str,
        name: object,
        known: Iterable[str],
        elsewhere: Mapping[str, str] = MappingProxyType({}),
    ):
        known, same = sorted({*known}), elsewhere.get(str(name).lower())
        import difflib  # takes 5 ms, for an error alone

        near = [same] if same else difflib.get_close_matches(str(name), known, n=3, cutoff=0.5)
        hint = f"did you mean {' or '.join(map(repr, near))}? " if near else ""
        super().__init__(f"unknown {kind} {name!r}; {hint}known: {', '.join(known)}")


class ConfigError(InvalidArgument):
    """A configuration has a wrong value, or contradicts itself or the communicator."""


class LaunchError(MpidistError):
    """The processes of a job were started wrongly, or not at all; the message gives the cause."""


class CheckpointError(MpidistError):
    """A checkpoint could not be written or loaded; earlier complete ones are kept."""


class ReplicasDiffer(MpidistError):
    """Parameters, or gradients of one batch, differ between ranks; the message names them all.

    Attributes
    ----------
    at_fault : bool
        Whether this rank has differed too often, so that it is better to go on without it.
    another_is : bool
        Whether another rank has.
    """

    def __init__(self, message: str, at_fault: bool = False, another_is: bool = False):
        super().__init__(message)
        self.at_fault, self.another_is = at_fault, another_is


class CommunicationError(MpidistError):
    """Base class of errors in the communication between ranks."""


class CollectiveTimeout(CommunicationError, TimeoutError):
    """A deadline passed before every rank or message had arrived.

    Attributes
    ----------
    collective : str
        Name of the operation that did not complete.
    sequence : int or None
        Number of that operation among the communicator's collectives, from 1.
    missing : tuple of int
        Ranks that had not reached the operation; empty if all had, or if that is unknown.
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
    """The communicator serves no more calls: an operation can neither complete nor be cancelled."""


class CommunicatorInUse(MpidistError, RuntimeError):
    """A call was made inside another call of the same communicator, or beside it in a thread.

    Nothing was begun, and the call that is inside is not affected; the message names both places.
    """


class CollectiveMismatch(CommunicationError):
    """The ranks did not call the same collective with matching arguments.

    Attributes
    ----------
    harmless : bool
        Whether the communicator stays usable: no message was sent, or it was received and dropped.
    """

    harmless = False


class MessageMismatch(CollectiveMismatch):
    """A message has another dtype or shape than the array it should be received into.

    It is received and dropped, so the communicator stays usable.

    Attributes
    ----------
    sender, tag : int
        Rank that sent the message, and its tag.
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

    ``comm.survivors()`` returns a communicator of the other ranks, where the launch allows it.

    Attributes
    ----------
    ranks : tuple of int
        The lost ranks that are known so far, in order; empty if none is.
    reasons : dict of int to str
        How each of them ended, where that is known: "on node3 was killed by signal 9 (SIGKILL)".
    echo : bool
        Whether this error only follows from an error that another rank has raised itself.
    """

    echo = False

    def __init__(
        self,
        message: str,
        *,
        ranks: Iterable[int] = (),
        reasons: Mapping[int, str] = MappingProxyType({}),
    ):
        super().__init__(message)
        self.ranks, self.reasons = tuple(sorted(ranks)), dict(reasons)


def wrong_length(rank: int, expected: int, peer: int, sent: int) -> CollectiveMismatch:
    """Return the error for a message of `sent` bytes from `peer`, which is not of the array's."""
    return CollectiveMismatch(
        f"rank {rank}: expected {expected} bytes from rank {peer}, which sent {sent}: the ranks "
        "disagree on the array's length"
    )


def unpicklable(what: str, value: object, error: Exception) -> InvalidArgument:
    """Return the error for an object that pickle refused; `what` describes it in the message."""
    kind = type(value)
    name = (
        kind.__qualname__
        if kind.__module__ == "builtins"
        else f"{kind.__module__}.{kind.__qualname__}"
    )
    return InvalidArgument(
        f"{what} of type {name} cannot be pickled: {type(error).__name__}: {error}"
    )
