"""Data races of a schedule in shared memory, found by vector clocks.

A *race* is two accesses to one block of one buffer, by different strands, at least one of them a
write, neither before the other.  An access is before another one

* if it is in an earlier round of the same strand;
* if a meeting is between them, at which the later one's rank awaits the earlier one's;
* if a message is between them: sent after the one, and received before the other.

Every strand counts its rounds; `Strand.known` has the last round of every other strand that is
before its present one, and is replaced by a new dict, never changed.  So an access is remembered as
two numbers, strand and round (an *epoch*, as in FastTrack: Flanagan and Freund, PLDI 2009), and
compared by one look-up.

The caller of each rank writes all its buffers before the call and after it.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

from ..errors import ScheduleError
from .contract import Contract
from .memories import Memory
from .strand import Known, Strand

Epoch = tuple[int, int, int]  # strand, its count of rounds, and the number of the round
BEFORE = 1  # the count of rounds of a rank's caller, before the call


class Column:
    """The accesses to one block of one buffer, on all ranks; its owner is the rank that has it."""

    __slots__ = ("folds", "reads", "writes")

    def __init__(self) -> None:
        self.writes: dict[int, Epoch] = {}  # the last one, by owner
        self.reads: dict[int, list[Epoch]] = {}  # all, by owner; but
        self.folds: list[tuple[Epoch, Sequence[int]]] = []  # those of several owners at once

    def accesses(self) -> Iterator[tuple[Epoch, Sequence[int]]]:
        """Yield all reads, each with its owners."""
        yield from self.folds
        for owner, epochs in self.reads.items():
            yield from ((epoch, (owner,)) for epoch in epochs)


class Races:
    """The accesses of all ranks to buffers that others reach; raises ScheduleError for a race.

    Unless the contract has an input apart (alltoall), a call can be in place: then "in" and "out"
    are one memory, and what holds for both is checked.
    """

    def __init__(self, contract: Contract, memory: Memory, size: int):
        self._memory, self._size = memory, size
        self._in_place = contract.input_buffer != "in" and not memory.kernels
        reached = memory.reads | memory.writes
        # A rank's own accesses matter only where another rank's can meet them.
        self._read_here = memory.writes | ({"in"} if "out" in memory.writes else set())
        if memory.kernels:  # the caller writes between calls, and may not wait for a strand
            self._read_here = reached
        self._written_here = reached
        self._columns: dict[tuple[str, int], Column] = {}
        self._overwritten: dict[int, set[int]] = {}  # block: ranks whose "in" may be gone
        self._strands: list[Strand] = []
        self._met: set[tuple[int, ...]] = set()
        self._awaited: set[tuple[int, int]] = set()  # a rank and one that it awaited

    def begin(self, strand: Strand) -> None:
        """Number a strand that starts; a strand of a ``parallel`` knows what its parent knows."""
        # The ranks' whole schedules begin first, so their numbers are the ranks: if an owner is in
        # what a strand knows, the owner has called before.
        strand.thread = len(self._strands)
        self._strands.append(strand)
        strand.tick = BEFORE + 1
        parent = strand.parent
        if parent is None:
            strand.known = {strand.rank: BEFORE}
        else:
            strand.known = {**parent.known, parent.thread: parent.tick - 1}
        strand.begun = strand.known

    def learn(self, strand: Strand, known: Known, thread: int, tick: int) -> None:
        """Add what another strand knew, and its rounds up to `tick`, to what a strand knows."""
        merged = dict(strand.known)
        for other, count in (*known.items(), (thread, tick)):
            if merged.get(other, 0) < count:
                merged[other] = count
        strand.known = merged

    def read_here(self, strand: Strand, buffer: str, block: int) -> None:
        """Record that a strand reads a block of its own rank."""
        if buffer == "in" and self._overwritten:
            self._check_input(strand, (strand.rank,), block)
        if buffer in self._read_here:
            self.read(strand, (strand.rank,), buffer, block)

    def read(self, strand: Strand, owners: Sequence[int], buffer: str, block: int) -> None:
        """Record that a strand reads a block of one buffer of several ranks, its `owners`."""
        column = self._column(buffer, block)
        known, thread = strand.known, strand.thread
        writes = column.writes
        if writes:
            for owner in owners:
                last = writes.get(owner)
                if last is None:
                    if owner not in known and buffer not in self._memory.scratch:
                        raise self._too_early(strand, owner, buffer, block, "reads")
                elif last[0] != thread and known.get(last[0], 0) < last[1]:
                    raise self._race(strand, owner, buffer, block, "reads", last, "writes")
        elif not known.keys() >= set(owners):
            owner = next(o for o in owners if o not in known)
            raise self._too_early(strand, owner, buffer, block, "reads")
        if buffer == "in" and self._overwritten:
            self._check_input(strand, owners, block)
        epoch = (thread, strand.tick, strand.number)
        if len(owners) == 1:
            column.reads.setdefault(owners[0], []).append(epoch)
        else:
            column.folds.append((epoch, owners))

    def _check_input(self, strand: Strand, owners: Sequence[int], block: int) -> None:
        gone = self._overwritten.get(block)
        if gone is not None and not gone.isdisjoint(owners):
            owner = next(o for o in owners if o in gone)
            whose = "" if owner == strand.rank else f" of rank {owner}"
            raise strand.error(
                f"reads 'in'{whose} after 'out' was written, which is the same memory if the call "
                "is in place",
                block,
            )

    def write_here(self, strand: Strand, buffer: str, block: int, same: bool = False) -> None:
        """Record that a strand writes a block of its own rank.

        `same` means that the value is the same block of "in": in place, that is no write.
        """
        if buffer in self._written_here:
            self.write(strand, strand.rank, buffer, block, same)
        elif buffer == "out" and self._in_place and not same:
            self._overwritten.setdefault(block, set()).add(strand.rank)

    def write(
        self, strand: Strand, owner: int, buffer: str, block: int, same: bool = False
    ) -> None:
        """Record that a strand writes a block of `owner`; see `write_here` for `same`."""
        column = self._column(buffer, block)
        last = column.writes.get(owner)
        if last is None:
            if owner not in strand.known and buffer not in self._memory.scratch:
                raise self._too_early(strand, owner, buffer, block, "writes")
        elif last[0] != strand.thread and strand.known.get(last[0], 0) < last[1]:
            raise self._race(strand, owner, buffer, block, "writes", last, "writes")
        if column.reads or column.folds:
            self._check_reads(strand, owner, buffer, buffer, block, column)
        if buffer == "out" and self._in_place and not same:
            source = self._columns.get(("in", block))
            if source is not None:
                self._check_reads(strand, owner, buffer, "in", block, source)
            self._overwritten.setdefault(block, set()).add(owner)
        column.writes[owner] = (strand.thread, strand.tick, strand.number)

    def _check_reads(
        self, strand: Strand, owner: int, buffer: str, read: str, block: int, column: Column
    ) -> None:
        """Raise if a read of the buffer `read`, in `column`, is not before a write of `buffer`."""
        known, thread = strand.known, strand.thread
        epochs = column.reads.get(owner, [])
        if column.folds:
            epochs = epochs + [epoch for epoch, owners in column.folds if owner in owners]
        for epoch in epochs:
            if epoch[0] != thread and known.get(epoch[0], 0) < epoch[1]:
                place = f"{read!r}, the same memory in place," * (read != buffer)
                raise self._race(strand, owner, buffer, block, "writes", epoch, "reads", place)

    def _column(self, buffer: str, block: int) -> Column:
        column = self._columns.get((buffer, block))
        if column is None:
            column = self._columns[buffer, block] = Column()
        return column

    def meet(self, group: tuple[int, ...]) -> None:
        """Record that all ranks of a group have awaited each other."""
        self._met.add(group)

    def await_ranks(self, rank: int, others: Iterable[int]) -> None:
        """Record that a rank has awaited others."""
        self._awaited.update((rank, other) for other in others)

    def check_end(self, ends: list[Strand]) -> None:
        """Raise if a rank may still use a buffer when its owner returns; `ends` are the ranks."""
        # After a last meeting of all, the ranks know the same, in one dict: then one look-up tells
        # of an access that it is before every rank's return.
        shared = ends[0].known
        floor = shared if all(end.known is shared for end in ends) else {}
        together = any(len(group) == self._size for group in self._met)
        for (buffer, block), column in self._columns.items():
            if buffer in self._memory.scratch:
                # Kernels' calls are all in the schedule, so that later ones were checked like this.
                if not together and not self._memory.kernels:
                    self._check_turns(buffer, block, column)
                continue
            for epoch, owners in column.accesses():
                if floor.get(epoch[0], 0) < epoch[1]:
                    self._check_returns(ends, epoch, owners, buffer, block, "reads")
            for owner, epoch in column.writes.items():
                if floor.get(epoch[0], 0) < epoch[1]:
                    self._check_returns(ends, epoch, (owner,), buffer, block, "writes")

    def _check_returns(
        self,
        ends: list[Strand],
        epoch: Epoch,
        owners: Iterable[int],
        buffer: str,
        block: int,
        does: str,
    ) -> None:
        rank = self._strands[epoch[0]].rank
        for owner in owners:
            if owner != rank and ends[owner].known.get(epoch[0], 0) < epoch[1]:
                raise self._strands[epoch[0]].error(
                    f"race: {does} {buffer!r} of rank {owner}, which may have returned to its "
                    "caller: it must meet this rank afterwards",
                    block,
                    epoch[2],
                )

    def _check_turns(self, buffer: str, block: int, column: Column) -> None:
        """Raise if the owner of scratch memory does not await its readers in every call."""
        for epoch, owners in column.accesses():
            rank = self._strands[epoch[0]].rank
            for owner in owners:
                met = (owner, rank) in self._awaited or owner == rank
                if not met and not any(rank in g and owner in g for g in self._met):
                    raise ScheduleError(
                        f"race: reads {buffer!r} of rank {owner}, which may use it again in a "
                        "later call: it never awaits this rank",
                        rank=rank,
                        round=epoch[2],
                        block=block,
                    )

    def _too_early(
        self, strand: Strand, owner: int, buffer: str, block: int, does: str
    ) -> ScheduleError:
        return strand.error(
            f"race: {does} {buffer!r} of rank {owner}, which may not have called yet: it must meet "
            "this rank first",
            block,
        )

    def _race(
        self,
        strand: Strand,
        owner: int,
        buffer: str,
        block: int,
        does: str,
        other: Epoch,
        did: str,
        place: str = "",
    ) -> ScheduleError:
        rank = self._strands[other[0]].rank
        whose = "its own" if owner == strand.rank else f"rank {owner}'s"
        who = "another strand of this rank" if rank == strand.rank else f"rank {rank}"
        when = f"in round {other[2]}"
        name = self._strands[other[0]].name(other[2])
        if name is not None:
            who, when = name, "too"
        return strand.error(
            f"race: {does} {whose} {buffer!r}, which {who} {did}{' as ' + place if place else ''} "
            f"{when}: neither is before the other",
            block,
        )
