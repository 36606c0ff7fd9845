"""Agreement of ranks: what each did, or why it could not; equal settings; what rank 0 says.

A rank that raised alone would leave the others waiting for it in their next collective.  (That all
are in the same call is another question: mpidist.engine.agreement.)
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Generic, Protocol, TypeVar

from ..errors import CommunicationError, InvalidArgument, MpidistError
from ..foreign import shown

Made = TypeVar("Made")


class Group(Protocol):
    """The members of a communicator by which ranks agree."""

    rank: int

    def allgather_object(self, value: Any) -> list[Any]:
        """Return the objects of all ranks, in rank order."""

    def broadcast_object(self, value: Any) -> Any:
        """Return the object of rank 0."""


@dataclass(frozen=True)
class Answers(Generic[Made]):
    """What a function did on every rank."""

    values: list[Made]  # of all ranks, in order; None where it raised
    errors: dict[int, str]  # class and text of what it raised, by rank
    own: Exception | None  # what it raised on this rank
    lost: CommunicationError | None = None  # why the other ranks could not be told of `own`

    def told(self) -> str:
        """Return the errors as text, equal ones once: "on rank 0, 2: OSError: …; on rank 1: …"."""
        ranks: dict[str, list[str]] = {}
        for rank, text in self.errors.items():
            ranks.setdefault(text, []).append(str(rank))
        told = [f"on rank {', '.join(those)}: {text}" for text, those in ranks.items()]
        told += [f"the other ranks could not be told: {self.lost}"] if self.lost else []
        return "; ".join(told)


def answers(
    comm: Group,
    act: Callable[[], Made],
    exchange: Callable[[tuple[Any, str]], list[tuple[Any, str]]] | None = None,
) -> Answers[Made]:
    """Call a function on every rank, and return what it did on each; collective, one round.

    ``exchange(mine)`` returns what all ranks pass, by default `comm.allgather_object`.
    """
    value, own = None, None
    try:
        value = act()
    except Exception as error:  # whatever it is: the others must not wait for this rank
        own = error
    text = "" if own is None else text_of(own)
    try:
        every = (exchange or comm.allgather_object)((value, text))
    except CommunicationError as lost:
        if own is None:
            raise
        return Answers([], {comm.rank: text}, own, lost)
    errors = {rank: text for rank, (_, text) in enumerate(every) if text}
    return Answers([value for value, _ in every], errors, own)


def on_all_ranks(comm: Group, act: Callable[[], Made], what: str) -> list[Made]:
    """Call a function on every rank, and return the results of all; collective, one round.

    If it raises on any rank, its own error is raised there, and on the others InvalidArgument with
    the ranks and their reasons; `what` begins the message, such as "Pipeline: schedule".
    """
    found = answers(comm, act)
    if found.own is not None:
        raise found.own
    if found.errors:
        raise InvalidArgument(f"{what} fails {found.told()}")
    return found.values


def from_rank_0(
    comm: Group,
    make: Callable[[], Made],
    what: str,
    kind: type[MpidistError] = InvalidArgument,
) -> Made:
    """Call a function on rank 0, and return its result on every rank; collective, one round.

    If it raises, its own error is raised on rank 0, and `kind` on the others: with the same text if
    it is of that class, else with a text that `what` begins.
    """
    value, text, own = None, None, None
    if comm.rank == 0:
        try:
            value = make()
        except Exception as error:
            own = error
            same = isinstance(error, kind)
            text = str(error) if same else f"{what} fails on rank 0: {text_of(error)}"
    try:
        value, text = comm.broadcast_object((value, text))
    except CommunicationError:
        if own is None:
            raise
    if own is not None:
        raise own
    if text is not None:
        raise kind(text)
    return value  # type: ignore[return-value]


def check_same(
    what: str, every: Sequence[Mapping[str, Any]], kind: type[MpidistError] = InvalidArgument
) -> None:
    """Raise `kind` unless all ranks have the same settings; `what` begins the message; local.

    `every` has the settings of each rank by name, as the ranks exchanged them.
    """
    first = every[0]
    for rank, settings in enumerate(every):
        for name, value in settings.items():
            if value != first[name]:
                raise kind(
                    f"{what}: rank {rank} has {name}={value!r} where rank 0 has {first[name]!r}; "
                    "expected the same on all ranks"
                )


def text_of(error: Exception) -> str:
    """Return the class and text of an error, which may be of the user's own."""
    try:
        text = str(error)
    except Exception:  # the user's code again
        text = "its text cannot be had"
    return shown(f"{type(error).__name__}: {text}")
