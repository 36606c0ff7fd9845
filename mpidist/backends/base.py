"""The interface of a backend, which moves bytes between ranks, and its default members."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple, Protocol, TypeVar

import numpy as np

from ..calls.call import Call
from ..errors import Unsupported
from .board import Board
from .recorder import Track
from .waiting import SPINS, Condition, Progress

_Made = TypeVar("_Made")
SHORT_BYTES = 8704  # limit of a short message: 8 KiB of data, and their description
MAX_MESSAGE_BYTES = 1 << 30  # limit of any message: MPI before 4.0 counts bytes in 32 bits


class Request(Protocol):
    """One pending message, to poll until it is complete."""

    def test(self) -> bool:
        """Make progress; return whether the message is complete."""


class ShortRequest(Request, Protocol):
    """The pending receive of a short message, one that ``isend_short`` sends."""

    @property
    def content(self) -> bytes | bytearray:
        """Buffer that begins with the received bytes, once ``test()`` has returned True.

        The bytes behind the message are undefined.  Empty from a backend that moves nothing.
        """

    def release(self) -> None:
        """Return the memory of `content` for another message; `content` is invalid afterwards."""


class AnyShortRequest(ShortRequest, Protocol):
    """The pending receive of a short message from any rank."""

    @property
    def source(self) -> int:
        """Rank of the sender, once ``test()`` has returned True."""


class AllOf:
    """Several pending messages as one request."""

    __slots__ = ("_requests",)

    def __init__(self, requests: Iterable[Request]):
        self._requests = list(requests)

    def test(self) -> bool:
        """Make progress; return whether every message is complete."""
        requests = self._requests
        while requests:
            if not requests[-1].test():
                return False
            requests.pop()
        return True


def pieces(data: np.ndarray, most: int = MAX_MESSAGE_BYTES) -> Iterator[np.ndarray]:
    """Yield a flat array as it is, or, if it has more than `most` bytes, views of its parts.

    Each view is of dtype uint8 and has at most `most` bytes.
    """
    if data.nbytes <= most:
        yield data
        return
    memory = data.view(np.uint8)
    for start in range(0, memory.size, most):
        yield memory[start : start + most]


@dataclass(slots=True)
class RoundMessage:
    """One message of a round: `data` is received from `peer` if `incoming`, else sent to it."""

    incoming: bool
    peer: int
    data: np.ndarray  # 1-D, contiguous, any dtype; moved as bytes
    tag: int


class Transfer(Protocol):
    """The messages of one round, bound to their memory; it can be started any number of times."""

    def start(self) -> None:
        """Post every message."""

    def test(self) -> bool:
        """Make progress; return whether every message is complete."""


class PendingArrival(Protocol):
    """A non-blocking wait until all ranks have announced one operation."""

    @property
    def alike(self) -> bool:
        """Whether all ranks announced the same operation; valid once all have arrived."""

    def test(self) -> bool:
        """Make progress; return whether all ranks have arrived."""


class Native(Protocol):
    """Interface of a backend's own collectives, such as those of an MPI library."""

    def why_not(self, call: Call) -> str | None:
        """Return why the library cannot serve a call, as a sentence, or None if it can."""

    def actions(self, call: Call) -> list[Callable[[], Any]]:
        """Return functions to call in order: the library's blocking call, arithmetic around it."""

    def started(
        self, call: Call
    ) -> tuple[list[Callable[[], Any]], Transfer, list[Callable[[], Any]]]:
        """Return functions to call before, the library's non-blocking call, functions after it."""


class Notice(NamedTuple):
    """Why an operation will not complete: a text, and whether ranks made different calls.

    `lost` is the rank that is dead; None if none is.
    """

    text: str
    mismatch: bool = False
    lost: int | None = None


class AbsentRanks(Protocol):
    """Interface of the roll call, which exchanges the state of operations with other nodes.

    The ranks of one node read each other's state on the arrival board of the node.

    Attributes
    ----------
    absent : tuple of int
        The ranks of other nodes: they are absent from the arrival board.
    """

    absent: tuple[int, ...]

    def ask(self, sequence: int) -> None:
        """Ask rank + 1 (cyclic) for its operation number `sequence`, if it is on another node.

        It is asked once per operation and answers when it reaches the operation; :meth:`mismatches`
        compares the answer.
        """

    def mismatches(self, sequence: int, fingerprint: int) -> dict[int, str]:
        """Return, by rank, the descriptions of operations `sequence` unlike this rank's.

        Only the answers received so far count.  `fingerprint` identifies this rank's operation.
        """

    def tell(self, sequence: int, fingerprint: int, text: str) -> None:
        """Send the ranks of other nodes fingerprint and text of this rank's operation."""

    def notify(self, sequence: int, notice: Notice) -> None:
        """Send the ranks of other nodes the reason why operation `sequence` will not complete."""

    def notices(self, sequence: int) -> dict[int, Notice]:
        """Return, by rank, received reasons why an operation up to `sequence` cannot complete."""

    def answer(self) -> None:
        """Answer the questions that have arrived, and record the arrived answers and notices."""

    def missing(self, sequence: int) -> tuple[int, ...]:
        """Ask the ranks of other nodes; return those that have not reached operation `sequence`.

        A rank that does not answer in time counts as missing.  The time is up to the class;
        :class:`~mpidist.backends.roll_call.RollCall` waits 300 ms.
        """


class Backend(Protocol):
    """The transport between `size` ranks: a backend inherits from this class.

    A backend is used by one thread at a time.  Messages between two ranks with one tag keep their
    order.  The members in ``DEFAULTS`` have the defaults given here; :func:`complete` supplies them
    to a backend whose class does not inherit from this one.

    Attributes
    ----------
    name : str
        Name of the backend, for reports.
    library : str
        Library and version, by which a tuning table is found; without a library the `name`.
    rank, size : int
        This rank, and the number of ranks.
    tag_limit : int
        The tags are 0 ... ``tag_limit - 1``; at least 32767, as MPI promises.
    board : Board
        The arrival board of the ranks of this node.
    hosts : sequence
        A key per rank; ranks with equal keys share a node.
    crowded : bool
        Whether a node has more ranks than cores; equal on all ranks, because the rules of
        ``algorithm="auto"`` depend on it.
    native : Native or None
        The backend's own collectives; None if it has none.
    shares_memory : bool
        Whether the ranks of each node, as `hosts` tells them, are processes that have mapped the
        memory of one arrival board; equal on all ranks.
    patience : tuple of int
        How long a wait in shared memory spins: the number of reads in a row, then of reads that
        yield the core in between; see :func:`~mpidist.backends.waiting.spin`.
    threads : bool
        Whether several threads may call the backend at the same time.
    roll_call : AbsentRanks or None
        Asks the ranks of other nodes about their operations; None if there are no other nodes.
    alike : bool
        Whether all ranks announced the same operation in the last :meth:`arrive` between nodes.
    track : Track or None
        Records the operations in this process's flight record, if it has one.
    """

    name: str
    library: str
    rank: int
    size: int
    tag_limit: int
    board: Board
    hosts: Sequence[object]
    crowded: bool = False
    native: Native | None = None
    shares_memory: bool = False
    patience: tuple[int, int] = SPINS
    threads: bool = False
    roll_call: AbsentRanks | None = None
    alike: bool = True
    track: Track | None = None

    def isend(self, data: np.ndarray, peer: int, tag: int) -> Request:
        """Begin to send a contiguous array."""

    def irecv(self, data: np.ndarray, peer: int, tag: int) -> Request:
        """Begin to receive a message of exactly the array's length into a contiguous array."""

    def isend_short(self, content: bytes, peer: int, tag: int) -> Request:
        """Begin to send at most `SHORT_BYTES` bytes, for :meth:`irecv_short`."""

    def irecv_short(self, peer: int, tag: int) -> ShortRequest:
        """Begin to receive a message of :meth:`isend_short`, of any length."""

    def wait(self, test: Condition, deadline: float | None, progress: Progress = None) -> bool:
        """Wait until ``test()`` is true; return False if `deadline` passed first.

        `deadline` is a time of ``time.monotonic``; None waits for ever.  `progress` is called now
        and then, so that other pending operations advance.
        """

    def split(self, color: int | None, key: int) -> Backend | None:
        """Return a backend over the ranks of one color, ordered by key, or None for color None."""

    def abort(self, code: int) -> None:
        """End the job on all ranks."""

    def subgroup(self, ranks: Sequence[int], tag: int) -> Backend:
        """Return a backend over `ranks`, in that order; only these call it, with the same tag.

        `tag` keeps this call apart from others at the same time.  By default unsupported.
        """
        raise Unsupported(
            f"rank {self.rank}: the {self.name} backend cannot make a group by its members alone: "
            "use split(), which all ranks of the communicator call"
        )

    def irecv_short_any(self, tag: int) -> AnyShortRequest:
        """Begin to receive a message of :meth:`isend_short` from any rank.

        By default unsupported.
        """
        raise Unsupported(
            f"rank {self.rank}: the {self.name} backend cannot receive from any rank (peer=None): "
            "pass the rank of the sender"
        )

    def iprobe(self, peer: int | None, tag: int) -> int | None:
        """Return the sender of a message that has arrived and was not received; None without one.

        `peer` is the rank whose messages count, None for any rank.  By default unsupported.
        """
        raise Unsupported(f"rank {self.rank}: the {self.name} backend cannot probe for messages")

    def bind(self, messages: Sequence[RoundMessage]) -> Transfer | None:
        """Return persistent requests for the messages of a round, or None if unsupported.

        By default None: then an :class:`UnboundTransfer` posts the messages anew in each run.
        """
        return None

    def arrive(self, sequence: int, deadline: float | None, progress: Progress = None) -> bool:
        """Wait until every rank has announced operation `sequence`; return False past the deadline.

        `deadline` and `progress` are those of :meth:`wait`.  By default the board is polled.
        """
        return self.wait(lambda: self.board.all_reached(sequence), deadline, progress)

    def begin_arrival(self, sequence: int) -> PendingArrival:
        """Begin a non-blocking wait until every rank has announced operation `sequence`.

        Needed for native collectives in the background between nodes; by default unsupported.
        """
        raise Unsupported(
            f"rank {self.rank}: the {self.name} backend has no non-blocking wait for the ranks of "
            "other nodes, which native collectives in the background need"
        )

    def missing(self, sequence: int) -> tuple[int, ...]:
        """Return the ranks known not to have announced operation `sequence`.

        By default only ranks of this node are known, from the arrival board.
        """
        return self.board.missing(sequence)

    def translate(self, error: BaseException) -> BaseException:
        """Convert an exception of the transport library to one of :mod:`mpidist.errors`.

        By default the error itself.
        """
        return error

    def in_world(self) -> Sequence[int]:
        """Return the numbers of all ranks in the whole job, by which its launcher knows them."""
        return range(self.size)

    def lost(self) -> Mapping[int, str]:
        """Return the ranks known to be dead, and how each of them ended; by default none."""
        return {}

    def notice_losses(self) -> Mapping[int, str]:
        """Return the dead ranks of this node, and let blocking calls of the library with them end.

        Any thread may call it, also while another one is in such a call.
        """
        return {}

    def raised(self, rank: int) -> bool:
        """Return whether a rank of this node is known to have ended by an exception."""
        return False

    def why_no_survivors(self) -> str | None:
        """Return why the ranks cannot go on after the loss of one; None if they can."""
        return f"the {self.name} backend does not go on after the loss of a rank"

    def survivors(self, make: Callable[[Backend], _Made], seconds: float | None) -> _Made:
        """Return ``make(backend)`` of a backend over the ranks that are alive; collective.

        It is called where :meth:`why_no_survivors` returns None.  `make` may use messages.  If a
        rank dies meanwhile, it is called again on all others.  `seconds` is the time until the
        deadline, by which CollectiveTimeout is raised.
        """
        raise Unsupported(f"rank {self.rank}: {self.why_no_survivors()}")

    def leave_all(self) -> None:
        """Let the calls of all ranks end, on every communicator of this process; not collective."""
        raise Unsupported(f"rank {self.rank}: {self.why_no_survivors()}")

    def vote(self, flag: bool, seconds: float | None) -> bool:
        """Return whether all ranks that are alive vote True: the same on all; collective.

        Also after a loss and :meth:`leave_all`, but only where :meth:`why_no_survivors` is None.
        CollectiveTimeout is raised if a rank that is alive does not vote in `seconds`.
        """
        raise Unsupported(f"rank {self.rank}: {self.why_no_survivors()}")

    def close(self) -> None:
        """Free the backend's resources; collective.  By default nothing is done."""
        return None


DEFAULTS = (
    *("crowded", "native", "shares_memory", "patience", "threads", "roll_call", "alike"),
    *("bind", "arrive", "begin_arrival", "missing", "translate", "close"),
    *("subgroup", "irecv_short_any", "iprobe", "track", "lost", "in_world"),
    *("why_no_survivors", "survivors", "notice_losses", "leave_all", "vote"),
    "raised",
)
"""The members of :class:`Backend` that have a default."""


def complete(backend: Backend) -> Backend:
    """Add defaults for the members that a backend's class does not define; return the backend."""
    for name in set(DEFAULTS).difference(dir(backend)):
        default = vars(Backend)[name]
        setattr(backend, name, partial(default, backend) if callable(default) else default)
    return backend


class UnboundTransfer(AllOf):
    """A round without persistent requests: its messages are posted anew at each start.

    Parameters
    ----------
    bank : list of int
        One number, shared by all rounds of a program and set before each run: the bank (range of
        tags) of the run.  Concurrent operations have different banks, so their messages do not mix.
    space : int
        Number of tags in a bank.
    """

    __slots__ = ("_isend", "_irecv", "_messages", "_bank", "_space")

    def __init__(
        self, backend: Backend, messages: Sequence[RoundMessage], bank: list[int], space: int
    ):
        self._isend, self._irecv = backend.isend, backend.irecv
        self._messages, self._bank, self._space = messages, bank, space
        super().__init__(())

    def start(self) -> None:
        """Post every message, receives first."""
        # tags.in_bank, written out: it is called for every message of the background.
        isend, irecv, base = self._isend, self._irecv, self._bank[0] * self._space
        self._requests = [
            (irecv if m.incoming else isend)(m.data, m.peer, m.tag + base) for m in self._messages
        ]
