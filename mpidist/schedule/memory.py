"""The buffers of all ranks in the prover's machine, with symbolic values and access checks."""

from __future__ import annotations

from collections.abc import Sequence
from typing import cast

from ..errors import ScheduleError
from .contract import Contract, Datum
from .memories import Memory
from .races import Races
from .rounds import BUFFERS, Blocks
from .strand import BlockPlace, Strand
from .terms import Terms


class SymbolicMemory:
    """The value of every block of every rank, from the contract's start state on.

    Values are the numbers of symbolic expressions; see :class:`~mpidist.schedule.terms.Terms`.  A
    place is (buffer, block).  If ranks reach each other's `memory`, the input is in "in" as well.
    """

    def __init__(
        self,
        contract: Contract,
        size: int,
        root: int,
        count: int,
        equal_blocks: bool,
        memory: Memory | None = None,
    ):
        self.buffers = BUFFERS if memory is None else memory.buffers
        self.races: Races | None = None
        self.stored: dict[tuple[int, str, int], tuple[int, int]] = {}  # by other ranks: who, round
        self.contract, self.size, self.root, self.count = contract, size, root, count
        self.reductions = 0
        # The values that this round of a rank has combined in each place, and their combination: a
        # round combines them at once.  `partial` and `off_tree` are where the first ones are that
        # are no single contributions, or no part of the fixed tree: rank, round and block.
        self._joined: dict[Strand, dict[BlockPlace, tuple[dict[int, int], list[int]]]] = {}
        self._judged: set[int] = set()  # results of Folds
        self.partial: tuple[int, int, int] | None = None
        self.off_tree: tuple[int, int, int] | None = None
        self.terms = Terms(size, contract.idempotent)
        self.values: list[dict[str, dict[int, int]]] = []
        for rank in range(size):
            start = contract.input_blocks(rank, size, root, count)
            buffers: dict[str, dict[int, int]] = {name: {} for name in self.buffers}
            leaves = self.terms.leaves(rank, start)
            if memory is None or not memory.kernels:
                buffers[contract.input_buffer] = leaves
            if memory is not None:
                buffers["in"] = leaves.copy()
            self.values.append(buffers)
        # The round in which each place was last written.
        self.written: list[dict[BlockPlace, int]] = [{} for _ in range(size)]
        self._transposed = contract.name == "alltoall"
        self._equal = equal_blocks

    def places(self, strand: Strand, buffer: str, spec: Blocks) -> list[BlockPlace]:
        """Return the place of each block number in `spec`, the `blocks` of a step."""
        if buffer not in self.buffers:
            raise strand.error(f"{buffer!r} is not a buffer: expected {', '.join(self.buffers)}")
        if isinstance(spec, int):
            return [(buffer, spec)]
        return [(buffer, block) for block in spec]

    def read(self, strand: Strand, places: list[BlockPlace]) -> list[int]:
        """Return the values of blocks on the strand's rank, in the order of `places`.

        Raises ScheduleError if a block was never written, or a concurrent strand writes it.
        """
        buffers, races, alone = self.values[strand.rank], self.races, strand.siblings is None
        values = []
        for place in places:
            buffer, block = place
            value = buffers[buffer].get(block)
            if value is None:
                raise strand.error(f"reads {buffer!r} where nothing was written", block)
            if not alone:
                strand.touch(place, False)
            if races is not None:
                races.read_here(strand, buffer, block)
            values.append(value)
        return values

    def read_of(self, strand: Strand, owners: Sequence[int], buffer: str, block: int) -> list[int]:
        """Return the values of a block of other ranks, the `owners`, in their order.

        Raises ScheduleError if one was never written, or is in "out" what the rank has in "in".
        """
        values = [self.values[owner][buffer].get(block) for owner in owners]
        if None in values:
            owner = owners[values.index(None)]
            message = f"reads {buffer!r} of rank {owner} where nothing was written"
            raise strand.error(message, block)
        if buffer == "out":
            for owner in owners:
                if (buffer, block) not in self.written[owner]:
                    raise strand.error(
                        f"reads 'out' of rank {owner}, which is not written yet; its input is 'in'",
                        block,
                    )
        return cast("list[int]", values)

    def store(self, strand: Strand, owner: int, place: BlockPlace, value: int) -> None:
        """Set the value of a block of another rank; raises ScheduleError as :meth:`write` does."""
        buffer, block = place
        if buffer == "out" and not 0 <= block < self.count:
            raise self._beyond(strand, block)
        if not self._equal and (self._transposed or block != self.terms.block[value]):
            self._check_length(strand, owner, place, value)
        self.values[owner][buffer][block] = value
        self.written[owner][place] = 0
        self.stored[owner, buffer, block] = (strand.rank, strand.number)

    def join(self, rank: int, block: int, value: int) -> None:
        """Combine a value into a block of ``out``, which a barrier's rank learns in a meeting."""
        values = self.values[rank]["out"]
        values[block] = self.terms.combine(values[block], value)

    def write(self, strand: Strand, place: BlockPlace, value: int, same: bool = False) -> None:
        """Set the value of a block on the strand's rank; `same`: it is the same block of "in".

        Raises ScheduleError if the block is of the input or does not exist, if the value could be
        of another length, or if a concurrent strand uses the block.
        """
        buffer, block = place
        rank = strand.rank
        if buffer == "in":
            raise strand.error("writes to the input, 'in'; expected 'out' or 'tmp'", block)
        if buffer == "out" and not 0 <= block < self.count:
            raise self._beyond(strand, block)
        if not self._equal and (self._transposed or block != self.terms.block[value]):
            self._check_length(strand, rank, place, value)
        if strand.siblings is not None:
            strand.touch(place, True)
        if self.races is not None:
            self.races.write_here(strand, buffer, block, same)
        self.values[rank][buffer][block] = value
        self.written[rank][place] = strand.number

    def _beyond(self, strand: Strand, block: int) -> ScheduleError:
        return strand.error(f"does not exist: out has blocks 0 … {self.count - 1}", block)

    def reduce(self, strand: Strand, peer: int, place: BlockPlace, value: int) -> None:
        """Combine `value`, received from `peer`, into a block; the lower rank has the left operand.

        Raises ScheduleError as :meth:`read` and :meth:`write` do, and if blocks are mixed or a
        contribution is counted twice.
        """
        (own,) = self.read(strand, [place])
        left, right = (value, own) if peer < strand.rank else (own, value)
        self.reductions += 1
        try:
            combined = self.terms.combine(left, right)
        except ValueError as error:
            raise strand.error(str(error), place[1]) from None
        self.write(strand, place, combined)
        if self.partial is None or self.off_tree is None:
            places = self._joined.setdefault(strand, {})
            if place not in places:
                places[place] = {strand.rank: own, peer: value}, [combined]
            else:
                terms, results = places[place]
                terms[peer], results[0] = value, combined

    def close(self, strand: Strand) -> None:
        """Judge what a strand has combined since its last round, or a Copy in this one."""
        if self._joined:
            for (_, block), (terms, (result,)) in self._joined.pop(strand, {}).items():
                self.judge(strand, block, terms, result)

    def judge_fold(self, strand: Strand, block: int, terms: dict[int, int], result: int) -> None:
        """Judge what a Fold combines: ranks that fold the same have the same number for it."""
        if result not in self._judged:
            self._judged.add(result)
            self.judge(strand, block, terms, result)

    def judge(self, strand: Strand, block: int, terms: dict[int, int], result: int) -> None:
        """Note whether values combined at once are single contributions, or make up the tree.

        `terms` are the values by the ranks that bring them, in whose order they are combined.
        """
        if self.terms.idempotent or len(terms) < 2:
            return
        where = strand.rank, strand.number, block
        values = [terms[rank] for rank in sorted(terms)]
        if self.partial is None and not all(map(self.terms.single, values)):
            self.partial = where
        if self.off_tree is None and not self.terms.joins(values, result):
            self.off_tree = where

    def _check_length(self, strand: Strand, owner: int, place: BlockPlace, value: int) -> None:
        """Check a value that is not of the same block, or any if blocks move to others' places."""
        buffer, block = place
        origin, datum = self.terms.datum(value)
        fits = False
        if self._transposed:
            key = self.contract.length_key(owner, buffer, block, self.size, self.count)
            fits = key == (origin, datum)
        if not fits and buffer in BUFFERS:  # a place in a slot is long enough for any block
            message = (
                f"gets block {datum} of rank {origin}, which may differ in length; only with "
                "equal_blocks=True may a block move to another's place"
            )
            raise strand.error(message, block)

    def check_end(self, rounds: list[int]) -> tuple[tuple[int, int] | None, bool]:
        """Check every rank's final memory against the contract; `rounds` by rank are for the error.

        Returns the rank and block of the first result not combined in rank order (None if all are),
        and whether all ranks compute results of the same contributions by the same expression.
        """
        contract, size, root, n = self.contract, self.size, self.root, self.count
        unordered: tuple[int, int] | None = None
        identical = True
        right: dict[tuple[int, Datum | range], int] = {}  # a value by block and what it must be
        for rank in range(size):
            values = self.values[rank]["out"]
            ranks = contract.contributions(rank, size) if contract.contributions else range(0)
            for block in contract.output_blocks(rank, size, root, n):
                expected: Datum | range = ranks
                if contract.origin is not None:
                    expected = contract.origin(rank, block, size, root, n)
                value, known = values.get(block), right.get((block, expected))
                if value is not None and value == known:  # as on a rank before
                    continue
                value = self._result(rank, block, rounds[rank], expected)
                identical = identical and known is None
                right.setdefault((block, expected), value)
                if unordered is None and not self.terms.in_order(value):
                    unordered = (rank, block)
        return unordered, identical

    def _result(self, rank: int, block: int, rounds: int, expected: Datum | range) -> int:
        value = self.values[rank]["out"].get(block)
        if value is None:
            message = "the result is never written"
            raise ScheduleError(message, rank=rank, round=rounds or None, block=block)
        fault = self.terms.fault(value, block, expected)
        if fault:
            last = self.written[rank].get(("out", block), rounds) or None
            by = self.stored.get((rank, "out", block))
            if by is not None and last is None:
                fault += f", which rank {by[0]} stored in its round {by[1]}"
            raise ScheduleError(f"ends with {fault}", rank=rank, round=last, block=block)
        return value
