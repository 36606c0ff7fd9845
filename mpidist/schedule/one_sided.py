"""The steps in other ranks' memory in the prover's machine: Get, Put, Fold, Combine and Meet."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import chain
from typing import Any

from ..errors import ScheduleError
from .memories import Memory
from .memory import SymbolicMemory
from .races import Races
from .registry import Groups
from .rounds import (
    Blocks,
    Combine,
    Copy,
    Fold,
    Get,
    Meet,
    Put,
    Recv,
    Reduce,
    Send,
    Signal,
    Step,
    Wait,
    block_tuple,
)
from .strand import Known, Strand
from .words import Words

Place = tuple[int, str, int]  # rank, buffer and block


@dataclass(slots=True)
class Meeting:
    """One meeting of a group: the strands that have arrived, and those that wait."""

    # By rank: the strand's number, its count of rounds, what it knew, and its clock.
    arrived: dict[int, tuple[int, int, Known, int]] = field(default_factory=dict)
    tokens: dict[int, list[int]] = field(default_factory=dict)  # in a barrier: values on arrival
    waiting: list[Strand] = field(default_factory=list)  # for the whole group
    # For some ranks: a strand and these ranks, by one of them that has not arrived yet.
    apart: dict[int, list[tuple[Strand, tuple[int, ...]]]] = field(default_factory=dict)


MeetingKey = tuple[tuple[int, ...], tuple[int, ...]]  # strand and group


class OneSided:
    """The accesses of all ranks to each other's memory, and their meetings.

    Only the ranks of one of the `groups`, a node, share memory.  ``depart(strand)`` is called with
    each strand that leaves a meeting.
    """

    def __init__(
        self,
        memory: Memory,
        symbolic: SymbolicMemory,
        groups: Groups,
        depart: Callable[[Strand], None],
    ):
        self.memory, self.symbolic, self._depart = memory, symbolic, depart
        size = symbolic.size
        self.races = symbolic.races = Races(symbolic.contract, memory, size)
        self.words = Words(depart)
        self.node = {rank: n for n, group in enumerate(groups) for rank in group}
        self._near = {rank: frozenset(group) - {rank} for group in groups for rank in group}
        self.meetings = [0] * size
        self.read, self.stored = [0] * size, [0] * size  # blocks of others, by the rank that does
        self._meetings: dict[MeetingKey, list[Meeting]] = {}
        self._counts: dict[MeetingKey, dict[int, int]] = {}

    def checked(self, strand: Strand) -> bool:
        """Return whether a round has one-sided steps; raise ScheduleError if it also has others.

        Of kernels, copies are such steps too: those of a round may happen in any order.
        """
        steps = strand.steps
        messages, others = False, self.memory.kernels
        for step in steps:
            if isinstance(step, (Send, Recv, Reduce)):
                messages = True
            elif isinstance(step, (Get, Put, Fold)):
                others = True
            elif isinstance(step, (Combine, Signal, Wait)):
                others = True
                if not self.memory.kernels:
                    raise strand.error(f"{step!r} needs the memory 'kernels'")
                if isinstance(step, Wait) and not all(isinstance(s, Wait) for s in steps):
                    raise strand.error("has a Wait beside other steps: expected waits alone")
            elif isinstance(step, Meet):
                if len(steps) > 1:
                    raise strand.error("has a Meet beside other steps; it is a round of its own")
                return True
        if messages and others:
            raise strand.error("has messages beside Get, Put or Fold; they are rounds of their own")
        return others

    # -- accesses -------------------------------------------------------------------------------

    def perform(self, strand: Strand, steps: tuple[Step, ...]) -> None:
        """Read everything that the steps of a round read, then write, since any may come first."""
        writes: list[tuple[int, Place, int, bool]] = []  # step, place, value, same block of "in"
        reads: dict[Place, int] | None = {} if len(steps) > 1 else None
        for index, step in enumerate(steps):
            if isinstance(step, Fold):
                self._fold(strand, index, step, reads, writes)
            elif isinstance(step, (Get, Put, Copy)):
                self._transfer(strand, index, step, reads, writes)
            elif isinstance(step, Combine):
                self._combine(strand, index, step, reads, writes)
            elif isinstance(step, Signal):
                if not (isinstance(step.peer, int) and 0 <= step.peer < self.symbolic.size):
                    raise self._not_near(strand, step.peer, step)
                self.words.post(strand, step)
            else:
                raise strand.error(f"{step!r} is not a step, a round or a Parallel")
        if reads is not None:
            self._check_clashes(strand, reads, writes)
        memory, rank = self.symbolic, strand.rank
        for _, (owner, buffer, block), value, same in writes:
            if owner == rank:
                memory.write(strand, (buffer, block), value, same)
            else:
                self.races.write(strand, owner, buffer, block)
                memory.store(strand, owner, (buffer, block), value)
                self.stored[rank] += 1

    def _transfer(
        self,
        strand: Strand,
        index: int,
        step: Get | Put | Copy,
        reads: dict[Place, int] | None,
        writes: list[tuple[int, Place, int, bool]],
    ) -> None:
        rank = strand.rank
        source = target = rank
        if isinstance(step, Copy):
            here, there = block_tuple(step.source_blocks), block_tuple(step.target_blocks)
        else:
            here, there = self._blocks(step.blocks, step.to)
            if step.peer not in self._near[rank]:
                raise self._not_near(strand, step.peer, step)
            if isinstance(step, Get):
                source = step.peer
            else:
                target = step.peer
                self._check_reach(strand, step.target, step.peer, "write")
        self._check_lengths(strand, here, there)
        self._check_buffers(strand, (step.source, step.target))
        if source != rank:
            self._check_reach(strand, step.source, source, "read")
        own = isinstance(step, Copy) and step.source == "in" and step.target == "out"
        for a, b in zip(here, there):
            if source == rank:
                (value,) = self.symbolic.read(strand, [(step.source, a)])
            else:
                (value,) = self.symbolic.read_of(strand, (source,), step.source, a)
                self.races.read(strand, (source,), step.source, a)
                self.read[rank] += 1
            if reads is not None:
                reads[source, step.source, a] = index
            writes.append((index, (target, step.target, b), value, own and a == b))

    def _fold(
        self,
        strand: Strand,
        index: int,
        step: Fold,
        reads: dict[Place, int] | None,
        writes: list[tuple[int, Place, int, bool]],
    ) -> None:
        peers, rank, memory = self.ranks(strand, step, step.peers), strand.rank, self.symbolic
        if not peers or len(set(peers)) < len(peers):
            raise strand.error(f"folds the ranks {peers}: expected each once, and at least one")
        others = tuple([peer for peer in peers if peer != rank])
        if not self._near[rank].issuperset(others):
            raise self._not_near(strand, min(set(others) - self._near[rank], key=str), step)
        if others:
            self._check_reach(strand, step.source, others[0], "read")
        self._check_buffers(strand, (step.source, step.target, step.own or step.source))
        here, there = self._blocks(step.blocks, step.to)
        self._check_lengths(strand, here, there)
        at = peers.index(rank) if len(others) < len(peers) else -1
        for a, b in zip(here, there):
            values = memory.read_of(strand, others, step.source, a)
            if others:
                self.races.read(strand, others, step.source, a)
                self.read[rank] += len(others)
            if at >= 0:
                own = (step.source, a) if step.own is None else (step.own, b)
                values[at:at] = memory.read(strand, [own])
                if reads is not None:
                    reads[(rank, *own)] = index
            if reads is not None:
                reads.update(dict.fromkeys([(peer, step.source, a) for peer in others], index))
            memory.reductions += len(peers) - 1
            try:
                value = memory.terms.fold(peers, values)
            except ValueError as error:
                raise strand.error(str(error), a) from None
            memory.judge_fold(strand, a, dict(zip(peers, values)), value)
            writes.append((index, (rank, step.target, b), value, False))

    def _combine(
        self,
        strand: Strand,
        index: int,
        step: Combine,
        reads: dict[Place, int] | None,
        writes: list[tuple[int, Place, int, bool]],
    ) -> None:
        rank, memory = strand.rank, self.symbolic
        for does, places in (("read", step.operands), ("write", step.targets)):
            for peer, buffer, blocks in places:
                self._check_buffers(strand, (buffer,))
                if peer != rank and peer not in self._near[rank]:
                    raise self._not_near(strand, peer, step)
                if peer != rank:
                    self._check_reach(strand, buffer, peer, does)
                self._check_lengths(strand, block_tuple(step.operands[0][2]), block_tuple(blocks))
        for at in range(len(block_tuple(step.operands[0][2]))):
            values = []
            for peer, buffer, blocks in step.operands:
                block = block_tuple(blocks)[at]
                if peer == rank:
                    values += memory.read(strand, [(buffer, block)])
                else:
                    values += memory.read_of(strand, (peer,), buffer, block)
                    self.races.read(strand, (peer,), buffer, block)
                    self.read[rank] += 1
                if reads is not None:
                    reads[peer, buffer, block] = index
            result, operand = values[0], block_tuple(step.operands[0][2])[at]
            try:
                for value in values[1:]:
                    result = memory.terms.combine(result, value)
            except ValueError as error:
                raise strand.error(str(error), operand) from None
            memory.reductions += len(values) - 1
            memory.judge(strand, operand, dict(enumerate(values)), result)
            for peer, buffer, blocks in step.targets:
                writes.append((index, (peer, buffer, block_tuple(blocks)[at]), result, False))

    def _blocks(self, here: Blocks, to: Blocks | None) -> tuple[tuple[int, ...], tuple[int, ...]]:
        blocks = block_tuple(here)
        return blocks, blocks if to is None else block_tuple(to)

    def _check_lengths(self, strand: Strand, here: Sequence[int], there: Sequence[int]) -> None:
        if len(here) != len(there):
            raise strand.error(f"copies {len(here)} blocks to {len(there)}: expected equally many")

    def ranks(self, strand: Strand, step: Step, ranks: Any) -> tuple[int, ...]:
        """Return the ranks that a step names as a tuple; raise ScheduleError if they are none."""
        try:
            return tuple(ranks)
        except TypeError:
            message = f"{step!r} has {ranks!r}: expected a range or tuple of ranks"
            raise strand.error(message) from None

    def _check_buffers(self, strand: Strand, buffers: tuple[str, ...]) -> None:
        for buffer in buffers:
            if buffer not in self.symbolic.buffers:
                self.symbolic.places(strand, buffer, ())  # raises

    def _not_near(self, strand: Strand, peer: Any, step: Step) -> ScheduleError:
        """Return the error for a peer that is not another rank of this node."""
        size = self.symbolic.size
        if not (isinstance(peer, int) and 0 <= peer < size):
            return strand.error(f"peer {peer!r} is not a rank of {size}: expected 0 … {size - 1}")
        if peer == strand.rank:
            return strand.error(f"{type(step).__name__} names this rank as its peer; use Copy")
        return strand.error(f"reaches the memory of rank {peer}, which is on another node")

    def _check_reach(self, strand: Strand, buffer: str, peer: int, does: str) -> None:
        reason = self.memory.why_not(does, buffer)
        if reason:
            raise strand.error(f"{does}s {buffer!r} of rank {peer}; {reason}")

    def _check_clashes(
        self, strand: Strand, reads: dict[Place, int], writes: list[tuple[int, Place, int, bool]]
    ) -> None:
        """Raise if a step of a round writes what another one reads or writes."""
        in_place = self.symbolic.contract.input_buffer != "in"
        written: set[Place] = set()
        for index, place, _, same in writes:
            rank, buffer, block = place
            whose = f" of rank {rank}" if rank != strand.rank else ""
            if place in written:
                raise strand.error(f"is written twice in one round in {buffer!r}{whose}", block)
            written.add(place)
            clash = reads.get(place, index) != index
            if in_place and buffer == "out" and not same:
                clash = clash or reads.get((rank, "in", block), index) != index
            if clash:
                raise strand.error(
                    f"is read and written in one round in {buffer!r}{whose}; the steps of a round "
                    "happen in any order",
                    block,
                )

    # -- meetings -------------------------------------------------------------------------------

    def meet(self, strand: Strand, step: Meet) -> None:
        """Let a strand arrive at a meeting; it departs when those that it awaits have arrived."""
        group, rank = self.ranks(strand, step, step.group), strand.rank
        awaits = None if step.awaits is None else self.ranks(strand, step, step.awaits)
        key = (strand.path, group)
        counts = self._counts.get(key)
        if counts is None:
            self._check_group(strand, group)
            counts = self._counts[key] = dict.fromkeys(group, 0)
            self._meetings[key] = []
        if rank not in counts or not counts.keys() >= set(awaits or ()):
            raise strand.error(f"is not a meeting of this rank, and of those it awaits: {step!r}")
        number = counts[rank]  # the n-th meetings of a group's ranks are one meeting
        counts[rank] += 1
        self.meetings[rank] += 1
        held = self._meetings[key]
        if number == len(held):
            held.append(Meeting())
        meeting = held[number]
        meeting.arrived[rank] = (strand.thread, strand.tick, strand.known, strand.clock)
        contract = self.symbolic.contract
        if contract.idempotent:
            values = self.symbolic.values[rank]["out"]
            meeting.tokens[rank] = [values[b] for b in range(self.symbolic.count)]
        if awaits is None:
            meeting.waiting.append(strand)
        else:
            meeting.apart.setdefault(rank, []).append((strand, awaits))
        self._release(meeting, group, rank)

    def _release(self, meeting: Meeting, group: tuple[int, ...], rank: int) -> None:
        """Let every strand depart whose awaited ranks have all arrived, of which `rank` is new."""
        arrived = meeting.arrived
        if len(arrived) == len(group):
            whole = len(meeting.waiting) == len(group)
            if whole:
                self.races.meet(group)
            # All that awaited the whole group leave with one dict: by its identity it is seen later
            # that they know the same.
            together = None
            for strand in meeting.waiting:
                if not whole:
                    self.races.await_ranks(strand.rank, group)
                together = self._leave(strand, meeting, group, together)
                self._depart(strand)
            meeting.waiting = []
        for strand, awaits in meeting.apart.pop(rank, ()):
            missing = next((peer for peer in awaits if peer not in arrived), None)
            if missing is None:
                self.races.await_ranks(strand.rank, awaits)
                self._leave(strand, meeting, awaits)
                self._depart(strand)
            else:
                meeting.apart.setdefault(missing, []).append((strand, awaits))

    def _leave(
        self,
        strand: Strand,
        meeting: Meeting,
        awaits: Sequence[int],
        merged: tuple[Known, int] | None = None,
    ) -> tuple[Known, int]:
        """Give a strand what those that it awaited knew on arrival; return that and their clock.

        `merged` is what this returned for another strand that awaited the same ranks.
        """
        if merged is None:
            merged = self._merge(strand, meeting, awaits)
        strand.known, clock = merged
        strand.clock = max(strand.clock, clock) + 1
        if self.symbolic.contract.idempotent:
            for peer in awaits:
                for block, value in enumerate(meeting.tokens[peer]):
                    self.symbolic.join(strand.rank, block, value)
        return merged

    def _merge(self, strand: Strand, meeting: Meeting, awaits: Sequence[int]) -> tuple[Known, int]:
        arrived = [meeting.arrived[peer] for peer in awaits]
        known = dict(strand.known)
        seen = {id(strand.known)}
        for _, _, other, _ in arrived:
            if id(other) not in seen:  # after a meeting of all, all know the same
                seen.add(id(other))
                for thread, tick in other.items():
                    if known.get(thread, 0) < tick:
                        known[thread] = tick
        known.update((thread, tick) for thread, tick, _, _ in arrived)
        return known, max((clock for *_, clock in arrived), default=0)

    def _check_group(self, strand: Strand, group: tuple[int, ...]) -> None:
        size = self.symbolic.size
        wrong = [r for r in group if not (isinstance(r, int) and 0 <= r < size)]
        if wrong or not group or len(set(group)) < len(group):
            raise strand.error(
                f"meets the ranks {group}: expected different ones of 0 … {size - 1}"
            )
        if len({self.node[r] for r in group}) > 1:
            raise strand.error(f"meets the ranks {group}, which are on several nodes")

    def missing(self, strand: Strand) -> list[int]:
        """Return the ranks that a strand, which is in a meeting, waits for."""
        for (_, group), meetings in self._meetings.items():
            for meeting in meetings:
                whole = ((one, group) for one in meeting.waiting)
                for waiting, awaits in chain(whole, *meeting.apart.values()):
                    if waiting is strand:
                        return [peer for peer in awaits if peer not in meeting.arrived]
        return []

    def counts(self) -> tuple[int, int, int]:
        """Return the most meetings of a rank, and the blocks read and stored, of a proof."""
        return max(self.meetings), sum(self.read), sum(self.stored)

    def check_end(self, ends: list[Strand]) -> None:
        """Raise if words are left, ranks met unequally often, or a buffer is used too late."""
        self.words.check_end()
        for (_, group), counts in self._counts.items():
            most = max(group, key=counts.__getitem__)
            least = min(group, key=counts.__getitem__)
            if counts[most] > counts[least]:
                raise ends[most].error(
                    f"comes to meeting {counts[most]} of the ranks {group}, to which rank {least} "
                    "does not come"
                )
        self.races.check_end(ends)
