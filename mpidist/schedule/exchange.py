"""Posted messages of the prover's machine, and the matching of sends with receives."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from ..errors import ScheduleError
from .memory import SymbolicMemory
from .rounds import ONE_SIDED, Copy, Recv, Reduce, Send
from .strand import BlockPlace, Strand

Message = Send | Recv | Reduce
_MESSAGES = (Send, Recv, Reduce)
MessageKey = tuple[int, int, tuple[int, ...]]  # sender, receiver, strand


@dataclass(eq=False, slots=True)
class Posted:
    """One end of a message: a send or a receive that a strand has posted."""

    strand: Strand
    step: Message
    index: int  # of `step` in the strand's round
    content: list[Any]  # the values of a send, or the (buffer, block) pairs of a receive
    clock: int  # the strand's, when it was posted


class Exchange:
    """The messages of all ranks: sends match receives by peer, strand and order.

    ``move(send, receive)`` is called with the two ends of each message, as soon as both are posted.
    """

    def __init__(self, size: int, memory: SymbolicMemory, move: Callable[[Posted, Posted], None]):
        self.size, self.memory, self.move = size, memory, move
        self.sent, self.blocks_sent = [0] * size, [0] * size
        self._sends: dict[MessageKey, deque[Posted]] = {}
        self._receives: dict[MessageKey, deque[Posted]] = {}

    def post(self, strand: Strand) -> None:
        """Post each send and receive of a strand's round."""
        rank, path, clock = strand.rank, strand.path, strand.clock
        size, memory = self.size, self.memory
        posted: list[Posted] = []
        count, overwrites = 0, False
        for index, step in enumerate(strand.steps):
            if isinstance(step, Copy):
                continue
            if not isinstance(step, _MESSAGES):
                raise self._not_a_message(strand, step)
            peer = step.peer
            if not (isinstance(peer, int) and 0 <= peer < size) or peer == rank:
                raise self._not_a_peer(strand, step)
            places = memory.places(strand, step.buffer, step.blocks)
            posted.append(Posted(strand, step, index, places, clock))
            count += len(places)
            overwrites = overwrites or isinstance(step, Recv)
        if overwrites and count > len({place for item in posted for place in item.content}):
            self._check_clashes(strand, posted)  # a place is used twice: by two sends it may be
        strand.pending += len(posted)
        for item in posted:
            step = item.step
            if isinstance(step, Send):
                item.content = memory.read(strand, item.content)
                self.sent[rank] += 1
                self.blocks_sent[rank] += len(item.content)
                key = (rank, step.peer, path)
                partners, queues = self._receives.get(key), self._sends
            else:
                key = (step.peer, rank, path)
                partners, queues = self._sends.get(key), self._receives
            if not partners:
                queue = queues.get(key)
                if queue is None:
                    queues[key] = deque((item,))
                else:
                    queue.append(item)
                continue
            other = partners.popleft()
            if len(item.content) != len(other.content):
                raise self._unequal(item, other)
            if queues is self._sends:
                self.move(item, other)
            else:
                self.move(other, item)

    def _unequal(self, one: Posted, other: Posted) -> ScheduleError:
        send, receive = (one, other) if isinstance(one.step, Send) else (other, one)
        return receive.strand.error(
            f"expects a message of {len(receive.content)} blocks from rank "
            f"{send.strand.rank}, which sends {len(send.content)} in its round "
            f"{send.strand.number}",
            receive.content[0][1] if receive.content else None,
        )

    def _not_a_peer(self, strand: Strand, step: Message) -> ScheduleError:
        if isinstance(step.peer, int) and step.peer == strand.rank:
            return strand.error(f"{type(step).__name__} names this rank as its peer; use Copy")
        return strand.error(
            f"peer {step.peer!r} is not a rank of {self.size}: expected 0 … {self.size - 1}"
        )

    def _not_a_message(self, strand: Strand, step: Any) -> ScheduleError:
        if isinstance(step, ONE_SIDED):
            return strand.error(
                f"{type(step).__name__} needs the memory of other ranks: expected "
                "@algorithm(…, memory=…), or prove(…, memory=…)"
            )
        return strand.error(f"{step!r} is not a step, a round or a Parallel")

    def _check_clashes(self, strand: Strand, posted: list[Posted]) -> None:
        """Raise if a Recv of a round overwrites a block of another step of the round."""
        overwritten: set[BlockPlace] = set()
        for item in posted:
            if isinstance(item.step, Recv):
                places: list[BlockPlace] = item.content
                expected = len(overwritten) + len(places)
                overwritten.update(places)
                if len(overwritten) < expected:
                    raise strand.error("is received twice in one round", places[0][1])
        for item in posted:
            if not isinstance(item.step, Recv) and not overwritten.isdisjoint(item.content):
                use = "sent" if isinstance(item.step, Send) else "reduced"
                both = overwritten.intersection(item.content)
                raise strand.error(f"is {use} and overwritten in one round", min(both)[1])

    def waiting(self, strand: Strand) -> list[Posted]:
        """Return the sends and receives of a strand's current round that have no match yet."""
        found = []
        for step in strand.steps:
            if isinstance(step, (Copy, *ONE_SIDED)):
                continue
            if isinstance(step, Send):
                queue = self._sends.get((strand.rank, step.peer, strand.path), ())
            else:
                queue = self._receives.get((step.peer, strand.rank, strand.path), ())
            found += [p for p in queue if p.strand is strand and p.step is step]
        return found
