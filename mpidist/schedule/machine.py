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
from ..measure import plural
from .contract import Contract
from .exchange import Exchange, Posted
from .memories import Memory
from .memory import SymbolicMemory
from .notebook import html_fields
from .one_sided import OneSided
from .registry import Groups
from .rounds import (
    ONE_SIDED,
    Copy,
    Meet,
    Parallel,
    Reduce,
    Schedule,
    Send,
    Step,
    Wait,
    block_tuple,
    steps_of,
)
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
        Length of the longest chain of messages, each of which is sent only after the one before;
        a meeting, and a round that reads or writes other ranks' memory, count as one message.
    messages : int
        Messages of all ranks together, and words (Signal); `sent` has the number of messages that
        each rank sends.
    blocks_moved : int
        Blocks in all messages together; `blocks_sent` has the number that each rank sends.
    reductions : int
        Blocks combined on all ranks together.
    written : tuple of int
        Distinct blocks of ``out`` and ``tmp`` of each rank that are written: the memory that it
        needs.
    ordered : bool
        Whether every result combines the contributions in rank order.
    identical : bool
        Whether all ranks compute each result by the same expression, and so get the same bits.
    meetings : int
        Largest number of meetings of any rank.
    blocks_read, blocks_stored : int
        Blocks that all ranks together read in other ranks' memory, and store there.
    at_once : bool or None
        Whether no partial results are combined: all contributions to a result are, in one round.
        None where nobody judged it, since the algorithm does not claim it.
    tree : bool or None
        Whether results are combined as the fixed tree over the ranks, or can be: all at once.
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
    meetings: int = 0
    blocks_read: int = 0
    blocks_stored: int = 0
    at_once: bool | None = None
    tree: bool | None = None

    def _repr_html_(self) -> str:
        return html_fields(self)


Watch = Callable[[object, Strand, "Posted | None"], None]


class Machine:
    """All ranks of one schedule, which `run` executes symbolically to return the proof.

    `parts` are the schedules by rank, and `count` is the number of blocks.  With `equal_blocks`, a
    block may be put into another one's place.  With a `memory`, ranks of one of the `groups` (by
    default all) reach each other's buffers.

    ``watch(step, strand, send)`` is called when a message has arrived at `strand` (`step` is the
    Recv or Reduce, `send` the posted send), and after any other step (`send` is None).  The
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
        memory: Memory | None = None,
        groups: Groups | None = None,
    ):
        self.contract, self.root, self.count, self.watch = contract, root, count, watch
        self.parts = list(parts)
        self.size = size = len(self.parts)
        if contract.per_rank and (count < size or count % size):
            raise ScheduleError(f"{contract.name} needs a multiple of {size} blocks, not {count}")
        self.memory = SymbolicMemory(contract, size, root, count, equal_blocks, memory)
        self.shared: OneSided | None = None
        if memory is not None:
            nodes = groups or (tuple(range(size)),)
            self.shared = OneSided(memory, self.memory, nodes, self._depart)
        self.exchange = Exchange(size, self.memory, self._move)
        self.ready: deque[Strand] = deque()
        self.live: set[Strand] = set()
        self.depth = 0
        self.arrival = 0  # tick at which the latest message arrived
        self.unordered: tuple[int, int] | None = None
        self.rounds = [0] * size

    def run(self) -> Proof:
        """Run every rank to its end, check the end state, and return the proof."""
        ends = [Strand.of(rank, part) for rank, part in enumerate(self.parts)]
        for strand in ends:
            self._start(strand)
        self._drain()
        self._check_nothing_left()
        shared = self.shared
        if shared is not None:
            shared.check_end(ends)
        self.unordered, identical = self.memory.check_end(self.rounds)
        meetings, blocks_read, blocks_stored = (0, 0, 0) if shared is None else shared.counts()
        return Proof(
            collective=self.contract.name,
            size=self.size,
            root=self.root,
            block_count=self.count,
            rounds=max(self.rounds),
            depth=self.depth,
            messages=sum(self.exchange.sent) + (0 if shared is None else shared.words.posted),
            blocks_moved=sum(self.exchange.blocks_sent),
            reductions=self.memory.reductions,
            sent=tuple(self.exchange.sent),
            blocks_sent=tuple(self.exchange.blocks_sent),
            written=tuple(len(blocks) for blocks in self.memory.written),
            ordered=self.unordered is None,
            identical=identical,
            meetings=meetings,
            blocks_read=blocks_read,
            blocks_stored=blocks_stored,
            at_once=self.memory.partial is None,
            tree=self.memory.off_tree is None,
        )

    # -- rounds ---------------------------------------------------------------------------------

    def _start(self, strand: Strand) -> None:
        if self.shared is not None:
            self.shared.races.begin(strand)
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
        shared, rounds, rank = self.shared, self.rounds, strand.rank
        for item in strand.rounds:
            if isinstance(item, Parallel):
                if self._open(strand, item):
                    return
                continue
            strand.steps = steps_of(item)
            strand.number += 1
            rounds[rank] += 1
            if shared is not None and shared.checked(strand):
                if self._waits(shared, strand):
                    return
                self._finish_round(strand)
                continue
            strand.pending = 1  # so that the strand is not woken before all messages are posted
            self.exchange.post(strand)
            strand.pending -= 1
            if strand.pending or self._delays(strand):
                return
            self._finish_round(strand)
        self._end(strand)

    def _waits(self, shared: OneSided, strand: Strand) -> bool:
        """Begin a round in other ranks' memory; return whether the strand must wait in it."""
        step = strand.steps[0]
        if isinstance(step, Wait):
            return shared.words.wait(strand)
        if not isinstance(step, Meet):
            return self._delays(strand)
        strand.pending = 1
        shared.meet(strand, step)
        return True

    def _delays(self, strand: Strand) -> bool:
        """Return whether a round without messages takes time, after which its strand is woken."""
        return False

    def _depart(self, strand: Strand) -> None:
        """Make a strand ready that leaves a meeting."""
        strand.pending = 0
        self.ready.append(strand)

    def _open(self, parent: Strand, item: Parallel) -> bool:
        kernels = self.shared is not None and self.shared.memory.kernels
        touched: dict[BlockPlace, tuple[int, bool]] | None = None if kernels else {}
        children = [
            Strand.of(parent.rank, s, (*parent.path, k), parent, touched, parent.clock)
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
        if self.shared is not None:
            self.shared.races.learn(parent, strand.known, strand.thread, strand.tick)
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
        shared = self.shared
        if shared is not None and self._finish_shared(shared, strand, steps):
            return
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
        memory.close(strand)
        if shared is not None:
            strand.tick += 1

    def _finish_shared(self, shared: OneSided, strand: Strand, steps: tuple[Step, ...]) -> bool:
        """Finish a round of a schedule in shared memory; return whether it had one-sided steps."""
        for heard in strand.heard:
            shared.races.learn(strand, *heard)
        strand.heard = ()
        if not (shared.memory.kernels or any(isinstance(step, ONE_SIDED) for step in steps)):
            return False
        if not isinstance(steps[0], (Meet, Wait)):
            strand.clock += 1
            shared.perform(strand, steps)
        if self.watch is not None:
            for step in steps:
                self.watch(step, strand, None)
        strand.tick += 1
        return True

    def _copy(self, strand: Strand, step: Copy) -> None:
        self.memory.close(strand)
        sources = self.memory.places(strand, step.source, step.source_blocks)
        targets = self.memory.places(strand, step.target, step.target_blocks)
        if len(sources) != len(targets):
            raise strand.error(
                f"copies {len(sources)} blocks to {len(targets)}: expected equally many"
            )
        values = self.memory.read(strand, sources)
        for source, place, value in zip(sources, targets, values):
            same = source[0] == "in" and place == ("out", source[1])  # no write if in place
            self.memory.write(strand, place, value, same)
        if self.watch is not None:
            self.watch(step, strand, None)

    # -- messages -------------------------------------------------------------------------------

    def _move(self, send: Posted, receive: Posted, sent: bool = False) -> None:
        """Deliver a message: its arrival is one more than the later clock of its two strands.

        With `sent` the sender has gone on before.
        """
        sender, receiver = send.strand, receive.strand
        receiver.received[receive.index] = (receive.content, send.content)
        # Not of this round of the sender: its other steps may come after the message.
        if self.shared is not None:
            receiver.heard += ((sender.known, sender.thread, sender.tick - 1),)
        before, other = send.clock, receive.clock
        self.arrival = after = (before if before > other else other) + 1
        ends = (receiver,) if sent else (sender, receiver)
        for strand in ends:
            if strand.clock < after:
                strand.clock = after
            strand.pending -= 1
        if self.watch is not None:
            self.watch(receive.step, receiver, send)
        for strand in ends:
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
        if isinstance(strand.steps[0], Meet):
            return self._meeting_text(strand, strand.steps[0])
        where = strand.name(strand.number) or f"rank {strand.rank} in round {strand.number}"
        if isinstance(strand.steps[0], Wait):
            assert self.shared is not None
            first = self.shared.words.missing(strand)[0]
            return f"{where} waits for rank {first.peer} on {first.channel}"
        waits = [
            f"{type(p.step).__name__}({p.step.peer}, blocks={p.step.blocks})"
            for p in self.exchange.waiting(strand)
        ]
        return f"rank {strand.rank} in round {strand.number} waits in {', '.join(waits)}"

    def _meeting_text(self, strand: Strand, step: Meet) -> str:
        assert self.shared is not None
        missing = self.shared.missing(strand)
        ended = [rank for rank in missing if all(s.rank != rank for s in self.live)]
        after = [f"rank {rank} has ended after round {self.rounds[rank]}" for rank in ended[:2]]
        return (
            f"rank {strand.rank} in round {strand.number} waits in {step!r} for "
            f"{plural(len(missing), 'rank')} {', '.join(map(str, missing))}"
            + "".join(f" ({text})" for text in after)
        )
