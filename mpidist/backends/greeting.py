"""Greetings: between nodes a call's first message names the call, and the receiver compares it.

Ranks of one node compare their calls on the arrival board.  Ranks of other nodes send a greeting
ahead of their data, which adds no latency: a rank posts its receives from a peer once it has
compared the peer's greeting.  So no call receives the data of another call, and no message that is
longer than expected is ever received (Open MPI 5.0.11 would write past the end of the receiver's
array).  A peer that only receives greets too, so that two roots of a broadcast detect each other;
nobody waits for these greetings, and a mismatch may be reported in a later call.
"""

from __future__ import annotations

import atexit
import weakref
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from ..errors import CollectiveMismatch
from .base import Backend, RoundMessage, Transfer
from .record import Record
from .tags import GREETING, in_bank

NBYTES = 128
_MOST_LATE = 64
Bind = Callable[[Sequence[RoundMessage]], Transfer]


class NamedCall(NamedTuple):
    """A call as the ranks compare it: its fingerprint, text and sequence number."""

    fingerprint: int = 0
    call: str = ""
    sequence: int = 0

    def compare(self, header: Record, rank: int, peer: int, expected: int) -> None:
        """Raise CollectiveMismatch if the peer names another call or not `expected` bytes."""
        fingerprint, nbytes = header.numbers
        if fingerprint == self.fingerprint and nbytes == expected:
            return
        if fingerprint != self.fingerprint:
            raise CollectiveMismatch(
                f"rank {rank}: collective #{self.sequence} is {self.call} here and {header.text} "
                f"on rank {peer}; MPIDIST_DEBUG=1 shows each rank's call site"
            )
        raise CollectiveMismatch(
            f"rank {rank}: {self.call} (collective #{self.sequence}): expected {expected} bytes "
            f"from rank {peer}, which sends {nbytes}: the ranks disagree on the array's length"
        )


def _header() -> Record:
    """Return memory for a greeting: fingerprint, number of bytes to the receiver, text."""
    return Record(2, NBYTES)


class LateGreetings:
    """Receives of greetings from peers that send this rank no data; compared when they arrive."""

    def __init__(self, backend: Backend):
        self._backend = weakref.proxy(backend)  # the key of this object in `_late_greetings`
        self._pending: deque[tuple[Any, Record, int, NamedCall]] = deque()

    def expect(self, peer: int, tag: int, named: NamedCall) -> None:
        """Post the receive of a greeting from `peer`, to be compared with this rank's `named`."""
        header = _header()
        request = self._backend.irecv(header.data, peer, tag)
        self._pending.append((request, header, peer, named))

    def look(self) -> bool:
        """Compare the arrived greetings; return whether at most `_MOST_LATE` (64) are pending.

        Raises CollectiveMismatch if a peer names another call; this rank's may have ended already.
        """
        pending = self._pending
        for _ in range(len(pending)):
            request, header, peer, named = pending.popleft()
            if request.test():
                named.compare(header, self._backend.rank, peer, 0)
            else:
                pending.append((request, header, peer, named))
        return len(pending) <= _MOST_LATE

    def cancel(self) -> None:
        """Cancel the pending receives, at exit, before their memory is freed."""
        while self._pending:
            self._pending.pop()[0].cancel()


_late_greetings: weakref.WeakKeyDictionary[Backend, LateGreetings] = weakref.WeakKeyDictionary()


def late_greetings_of(backend: Backend) -> LateGreetings:
    """Return the one `LateGreetings` object of a backend, created at its first use."""
    if backend not in _late_greetings:
        _late_greetings[backend] = LateGreetings(backend)
    return _late_greetings[backend]


@atexit.register
def _cancel() -> None:
    for late in _late_greetings.values():
        late.cancel()


class _Peer:
    """One rank of another node: its greeting, and the bytes sent to it and expected from it."""

    __slots__ = ("rank", "sent", "expected", "header", "transfer", "heard")

    def __init__(self, rank: int):
        self.rank, self.sent, self.heard = rank, 0, False
        self.expected: int | None = None  # bytes of its data; None: it sends nothing
        self.header = _header()
        self.transfer: Transfer


class Greeting:
    """The greetings of one program, to and from the ranks of other nodes (`absent`).

    `bank` is a list of one number, set before each run: the run's bank (range of `space` tags).
    `late` are those of all programs of the communicator.
    """

    def __init__(
        self, rank: int, absent: frozenset[int], late: LateGreetings, bank: list[int], space: int
    ):
        self._rank, self.absent, self._late = rank, absent, late
        self._bank, self._space = bank, space
        self._peers: dict[int, _Peer] = {}
        self._heads: dict[int, Record] = {}
        self._sends: Transfer
        self._named = NamedCall()

    def count(self, message: RoundMessage) -> None:
        """Add a message of the program to the bytes exchanged with its peer."""
        if message.peer not in self.absent:
            return
        peer = self._peers.setdefault(message.peer, _Peer(message.peer))
        if message.incoming:
            peer.expected = (peer.expected or 0) + message.data.nbytes
        else:
            peer.sent += message.data.nbytes

    def bind(self, bind: Bind) -> bool:
        """Bind the greetings once all messages are counted; return whether any greeting is sent."""
        self._heads = {rank: _header() for rank in self._peers}
        self._sends = bind(
            [RoundMessage(False, rank, head.data, GREETING) for rank, head in self._heads.items()]
        )
        for peer in self._peers.values():
            if peer.expected is not None:
                peer.transfer = bind([RoundMessage(True, peer.rank, peer.header.data, GREETING)])
        return bool(self._peers)

    def name(self, sequence: int, call: str, fingerprint: int) -> None:
        """Set the call that the next run serves: its sequence number, text and fingerprint."""
        if self._named.fingerprint != fingerprint:
            for rank, head in self._heads.items():
                head.numbers[0], head.numbers[1] = fingerprint, self._peers[rank].sent
                head.text = call
        self._named = NamedCall(fingerprint, call, sequence)

    def start(self) -> None:
        """Post the greetings of this rank and the receives of the peers' greetings."""
        # A broadcast from rank 0 over the nodes {0, 1} and {2, 3, 4}, where only 0 → 2 crosses:
        #
        #     0 ── greeting, data ──▶ 2   2 compares the greeting, then posts the data's receive
        #     0 ◀──── greeting ────── 2   0 does not wait: it compares it later, perhaps in a later
        #                                 call; else two roots of a broadcast would go unnoticed
        #     0 → 1, 2 → 3, 2 → 4         no greetings: ranks of one node compare on the board
        self._late.look()
        for peer in self._peers.values():
            peer.heard = False
            if peer.expected is not None:
                peer.transfer.start()
            else:
                tag = in_bank(GREETING, self._bank[0], self._space)
                self._late.expect(peer.rank, tag, self._named)
        self._sends.start()

    def test(self) -> bool:
        """Return whether this rank's greetings are sent and at most `_MOST_LATE` are awaited."""
        return self._sends.test() and self._late.look()

    def heard(self, ranks: Sequence[int]) -> bool:
        """Return whether the greetings of `ranks` have arrived and name the same call.

        Raises CollectiveMismatch if one names another call, or another number of bytes.
        """
        for rank in ranks:
            peer = self._peers[rank]
            if not peer.heard:
                if not peer.transfer.test():
                    return False
                self._named.compare(peer.header, self._rank, rank, peer.expected or 0)
                peer.heard = True
        return True


class Greeted:
    """A round whose receives are posted once their senders' greetings have been compared."""

    __slots__ = ("_greeting", "_ranks", "_sends", "_receives", "_left", "_posted")

    def __init__(self, greeting: Greeting, messages: Sequence[RoundMessage], bind: Bind):
        receives = [m for m in messages if m.incoming]
        sends = [m for m in messages if not m.incoming]
        self._greeting = greeting
        self._ranks = tuple({m.peer for m in receives} & greeting.absent)
        self._sends = bind(sends) if sends else None
        self._receives, self._posted = bind(receives), False
        self._left: list[Transfer] = []  # a complete persistent request must not be tested again

    def start(self) -> None:
        """Post the sends of the round; its receives follow in `test`."""
        self._left = []
        if self._sends is not None:
            self._sends.start()
            self._left.append(self._sends)
        self._posted = False

    def test(self) -> bool:
        """Post the receives once the greetings are compared; return whether all is complete."""
        if not self._posted:
            if not self._greeting.heard(self._ranks):
                return False
            self._posted = True
            self._receives.start()
            self._left.append(self._receives)
        while self._left and self._left[-1].test():
            self._left.pop()
        return not self._left
