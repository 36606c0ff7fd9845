"""The prover's machine, which runs all ranks of a schedule on symbolic values.

Messages are exchanged under the strictest rule that MPI allows: a message moves only when its send
*and* its receive are posted, and a round ends only when all its messages have moved.  A schedule
that cannot deadlock under this rule cannot deadlock with any amount of buffering.  Strands of a
``parallel`` run concurrently within their window; each has its own messages.

The cost model is this machine with a clock of seconds; pictures are drawn from its `watch` calls.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from ..errors import ScheduleError
from .contract import Contract
from .exchange import Exchange, Posted
from .memory import SymbolicMemory
from .notebook import html_fields
from .rounds import Copy, Parallel, Reduce, Schedule, Send, block_tuple, steps_of
from .strand import BlockPlace, Strand


@dataclass(frozen=True)
class Proof:
    """The proof of a schedule for one size and root: its counts and properties.

    Attributes
    ----------
    block_count : int
        Number of blocks that the data are cut into.
    rounds : int
        Largest number of rounds of any rank (of all its strands together).
    depth : int
        Length of the longest chain of messages, each of which is sent only after the one before.
    messages : int
        Messages of all ranks together; `sent` has the number that each rank sends.
    blocks_moved : int
        Blocks in all messages together; `blocks_sent` has the number that each rank sends.
    reductions : int
        Blocks combined on all ranks together.
    written : tuple of int
        Distinct blocks of ``out`` and ``tmp`` that each rank writes: the memory that it needs.
    ordered : bool
        Whether every result combines the contributions in rank order.
    identical : bool
        Whether all ranks compute each result by the same expression, and so get the same bits.
    """

    collective: str
    size: int
    root: int
    block_count: int
    rounds: int
    depth: int
    messages: int
    blocks_moved: int
    reductions: int
    sent: tuple[int, ...]
    blocks_sent: tuple[int, ...]
    written: tuple[int, ...]
    ordered: bool
    identical: bool

    def _repr_html_(self) -> str:
        return html_fields(self)


Watch = Callable[[object, Strand, "Posted | None"], None]


class Machine:
    """All ranks of one schedule, which `run` executes symbolically to return the proof.

    Parameters
    ----------
    contract : Contract
        The contract to prove.
    parts : iterable of schedules
        The schedule of each rank.
    root, count : int
        The root, and the number of blocks that the data are cut into.
    equal_blocks : bool
        Whether all blocks have one length, so that a block may be put into another block's place.
    watch : callable, optional
        ``watch(step, strand, send)`` is called when a message has arrived at `strand` (`step` is
        the Recv or Reduce, `send` the posted send), and after a Copy (`send` is None).  The
        attribute `arrival` is then the time of the arrival, as `Strand.clock` counts it.
    """

    def __init__(
        self,
        contract: Contract,
        parts: Iterable[Schedule],
        root: int,
        count: int,
        equal_blocks: bool = False,
        watch: Watch | None = None,
    ):
        self.contract, self.root, self.count, self.watch = contract, root, count, watch
        self.parts = list(parts)
        self.size = size = len(self.parts)
        if contract.per_rank and (count < size or count % size):
            raise ScheduleError(f"{contract.name} needs a multiple of {size} blocks, not {count}")
        self.memory = SymbolicMemory(contract, size, root, count, equal_blocks)
        self.exchange = Exchange(size, self.memory, self._move)
        self.ready: deque[Strand] = deque()
        self.live: set[Strand] = set()
        self.depth = 0
        self.arrival = 0  # tick at which the latest message arrived
        self.unordered: tuple[int, int] | None = None
        self.rounds = [0] * size

    def run(self) -> Proof:
        """Run every rank to its end, check the end state, and return the proof."""
        for rank, part in enumerate(self.parts):
            self._start(Strand(rank, iter(part)))
        self._drain()
        self._check_nothing_left()
        self.unordered, identical = self.memory.check_end(self.rounds)
        return Proof(
            self.contract.name,
            self.size,
            self.root,
            self.count,
            max(self.rounds),
            self.depth,
            sum(self.exchange.sent),
            sum(self.exchange.blocks_sent),
            self.memory.reductions,
            tuple(self.exchange.sent),
            tuple(self.exchange.blocks_sent),
            tuple(len(w) for w in self.memory.written),
            self.unordered is None,
            identical,
        )

    # -- rounds ---------------------------------------------------------------------------------

    def _start(self, strand: Strand) -> None:
        self.live.add(strand)
        self.ready.append(strand)

    def _drain(self) -> None:
        """Advance all strands that are ready, until each strand waits or has ended."""
        while self.ready:
            self._advance(self.ready.popleft())

    def _advance(self, strand: Strand) -> None:
        """Run a strand, whose messages are complete, to the next round in which it must wait."""
        if strand.steps:
            self._finish_round(strand)
        for item in strand.rounds:
            if isinstance(item, Parallel):
                if self._open(strand, item):
                    return
                continue
            strand.steps = steps_of(item)
            strand.number += 1
            self.rounds[strand.rank] += 1
            strand.pending = 1  # so that the strand is not woken before all messages are posted
            self.exchange.post(strand)
            strand.pending -= 1
            if strand.pending:
                return
            self._finish_round(strand)
        self._end(strand)

    def _open(self, parent: Strand, item: Parallel) -> bool:
        touched: dict[BlockPlace, tuple[int, bool]] = {}
        children = [
            Strand(parent.rank, iter(s), (*parent.path, k), parent, touched, parent.clock)
            for k, s in enumerate(item.strands)
        ]
        parent.pending = len(children)
        window = item.window or len(children)
        parent.waiting = dict(enumerate(children[window:]))
        for child in children[:window]:
            self._start(child)
        return bool(children)

    def _end(self, strand: Strand) -> None:
        self.live.discard(strand)
        self.depth = max(self.depth, strand.clock)
        parent = strand.parent
        if parent is None:
            return
        parent.clock = max(parent.clock, strand.clock)
        parent.pending -= 1
        follower = parent.waiting.pop(strand.path[-1], None)
        if follower is not None:
            self._start(follower)
        elif parent.pending == 0:
            self.ready.append(parent)

    def _finish_round(self, strand: Strand) -> None:
        """Apply a strand's received messages and its copies, in the order of the round's steps."""
        steps, strand.steps = strand.steps, ()
        memory = self.memory
        for index, step in enumerate(steps):
            if isinstance(step, Send):
                continue
            if isinstance(step, Copy):
                self._copy(strand, step)
                continue
            places, values = strand.received.pop(index)
            if isinstance(step, Reduce):
                for place, value in zip(places, values):
                    memory.reduce(strand, step.peer, place, value)
            else:
                for place, value in zip(places, values):
                    memory.write(strand, place, value)

    def _copy(self, strand: Strand, step: Copy) -> None:
        sources = self.memory.places(strand, step.source, step.source_blocks)
        targets = self.memory.places(strand, step.target, step.target_blocks)
        if len(sources) != len(targets):
            raise strand.error(
                f"copies {len(sources)} blocks to {len(targets)}: expected equally many"
            )
        values = self.memory.read(strand, sources)
        for place, value in zip(targets, values):
            self.memory.write(strand, place, value)
        if self.watch is not None:
            self.watch(step, strand, None)

    # -- messages -------------------------------------------------------------------------------

    def _move(self, send: Posted, receive: Posted) -> None:
        """Deliver a message: its arrival is one more than the later clock of its two strands."""
        sender, receiver = send.strand, receive.strand
        receiver.received[receive.index] = (receive.content, send.content)
        self.arrival = after = max(send.clock, receive.clock) + 1
        for strand in (sender, receiver):
            strand.clock = max(strand.clock, after)
            strand.pending -= 1
        if self.watch is not None:
            self.watch(receive.step, receiver, send)
        for strand in (sender, receiver):
            if strand.pending == 0:
                self._wake(strand)

    def _wake(self, strand: Strand) -> None:
        """Make a strand ready, now that all messages of its round are complete."""
        self.ready.append(strand)

    def _check_nothing_left(self) -> None:
        stuck = sorted((s for s in self.live if s.steps), key=lambda s: (s.number, s.rank, s.path))
        if not stuck:
            return
        waits = "; ".join(self._wait_text(s) for s in stuck[:4])
        blocks = [b for p in self.exchange.waiting(stuck[0]) for b in block_tuple(p.step.blocks)]
        message = f"deadlock: {waits}{' …' if len(stuck) > 4 else ''}"
        raise stuck[0].error(message, blocks[0] if blocks else None)

    def _wait_text(self, strand: Strand) -> str:
        waits = [
            f"{type(p.step).__name__}({p.step.peer}, blocks={p.step.blocks})"
            for p in self.exchange.waiting(strand)
        ]
        return f"rank {strand.rank} in round {strand.number} waits in {', '.join(waits)}"
