"""Binding schedules to programs: blocks become memory, steps become operations."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol, cast

import numpy as np

from ..backends.base import Backend, RoundMessage, Transfer, UnboundTransfer
from ..backends.greeting import Greeted, Greeting, late_greetings_of
from ..backends.program import Action, Program, Round, Side
from ..backends.tags import STRANDS, of_strand, tags_of
from ..calls.call import Call
from ..errors import ScheduleError
from ..operations import ANY, AT_ONCE, Op, divides_first, is_mean
from ..schedule.contract import COLLECTIVES
from ..schedule.registry import GENERATION, Algorithm, Choice, Groups
from ..schedule.rounds import (
    ONE_SIDED,
    Copy,
    Recv,
    Reduce,
    Send,
    Step,
    block_tuple,
    blocks,
    segmented,
)
from ..schedule.unrolled import Lengths, Strands, Written, materialise
from ..selection.segmentation import Segmentation
from ..shared_memory.fold import fold_in_order
from .storage import Memory, MessageScratch, Piece, Storage, merge, merge_rows

if TYPE_CHECKING:
    from ..backends.roll_call import RollCall

_WRITTEN = 1024  # schedules, by algorithm, root and segments


# Bytes of the Python objects of a program, of each action and of each request, from the growth of
# a process that kept 1,000 programs (Open MPI 5.0.11 and MPICH 5.0.2).
_PROGRAM_BYTES, _ACTION_BYTES, _REQUEST_BYTES = 4 << 10, 2 << 10, 1 << 10


def held_bytes(program: Program) -> int:
    """Return the bytes of memory of a program: scratch memory, requests, and its own objects.

    Scratch memory that several programs share counts in each.
    """
    if not program.held:
        actions, scratch = [*program.before, *program.finish], program.scratch_bytes
        _add_actions(program.items, actions)
        if not program.requests:  # a kernel: only its actions refer to its scratch memory
            scratch = sum(_arrays_of(actions).values())
        program.held = _PROGRAM_BYTES + _ACTION_BYTES * len(actions) + scratch
        program.held += _REQUEST_BYTES * program.requests
    return program.held


def _arrays_of(actions: Sequence[Action]) -> dict[int, int]:
    """Return the bytes of each array that these actions own, by ``id(array)``.

    Views of users' memory are made from addresses, own nothing, and are left out.
    """
    found, ndarray = {}, np.ndarray
    for action in actions:
        for array in action.args if type(action) is partial else ():
            if type(array) is not ndarray:
                continue
            while type(base := array.base) is ndarray:
                array = base
            if base is None:  # else the user's memory, a view by address
                found[id(array)] = array.nbytes
    return found


def _add_actions(items: Sequence[Round | Side], actions: list[Action]) -> None:
    """Append the actions before and after the messages of all rounds in `items` to `actions`."""
    for item in items:
        if isinstance(item, Round):
            actions += item.before
            actions += item.after
        else:
            for strand in item.strands:
                _add_actions(strand, actions)


class _GreetingsSent:
    """Transfer at the end of a program with greetings, complete when the greetings are sent."""

    __slots__ = ("start", "test")

    def __init__(self, greeting: Greeting):
        self.start: Action = tuple  # does nothing, and is no call of Python code
        self.test = greeting.test


class Bindable(Protocol):
    """The members of a backend that binding needs; NCCL's StreamBackend has no others."""

    rank: int
    tag_limit: int

    @property
    def roll_call(self) -> RollCall | None:
        """The roll call, which asks ranks of other nodes for their calls; None if there is none."""

    def bind(self, messages: Sequence[RoundMessage]) -> Transfer | None:
        """Return a Transfer of the messages of a round, or None to post them one by one."""


def at_once(op: Op | None) -> bool:
    """Return whether the terms of an element must be combined at once."""
    return op is not None and op.grouping == AT_ONCE


class CallBinder:
    """Binds calls to schedules: each is unrolled once, then bound to each call's memory."""

    def __init__(self, groups: Groups, pipelining: Segmentation):
        self.groups, self.pipelining = groups, pipelining
        self._written: dict[Hashable, Written] = {}

    def program(
        self,
        backend: Backend | Bindable,
        memory: Memory,
        call: Call,
        choice: Choice,
        arity: int,
        persistent: bool = True,
    ) -> Program:
        """Return a new program: the call's schedule, bound to its arrays."""
        algorithm, contract = choice.algorithm, COLLECTIVES[call.collective]
        count = algorithm.block_count(call.size, groups=self.groups)
        segments, window = self._segments(call, algorithm, count)
        written = self._write_down(call, choice, arity, segments, window)
        if call.counts:
            each = count // call.size
            lengths = Lengths.per_rank(call.counts, call.out_counts, each, segments)
        else:
            lengths = Lengths.even(call.count, count, segments)
        x = None if call.x is None else memory.array(call.x)
        out = x if call.out is call.x else None if call.out is None else memory.array(call.out)
        if call.collective == "broadcast" and call.rank == call.root and call.in_place:
            out = None  # the root's array is only read, even if the schedule sends to it
        scaled: list[Round | Side] = []
        finish: list[Action] = []
        scratch_bytes = 0
        # A mean of half precision divides its terms, as their sum may overflow; others divide the
        # sum.  The result of an allreduce has room for the terms.
        if divides_first(call.op, call.dtype) and x is not None:
            brought = x
            if call.collective == "allreduce" and out is not None:
                x = out
            else:
                x = memory.allocate(brought.size)
                scratch_bytes = x.nbytes
            scaled = [Round((memory.divide(brought, x, call.size),), None, ())]
        elif is_mean(call.op) and not at_once(call.op) and out is not None and out.size:
            finish = [memory.divide(out, out, call.size)]
        place = (call.rank, call.size, call.root)
        storage = Storage(contract, place, lengths, x, out, memory)
        program = Binder(backend, memory, call.op, persistent).program(written, storage, finish)
        program.items[:0] = scaled
        program.scratch_bytes += scratch_bytes
        return program

    def _segments(self, call: Call, algorithm: Algorithm, block_count: int) -> tuple[int, int]:
        """Return the number of segments of each block, and of segments in flight at a time."""
        largest = -(-call.nbytes // max(block_count, 1))
        if call.counts:
            per_rank = max(1, block_count // call.size)
            largest = -(-max(call.counts) * call.dtype.itemsize // per_rank)
            if not call.even and call.collective == "alltoall":
                # Of unequal parts no rank knows the largest.
                return 1, self.pipelining.window
        nodes = len(self.groups)
        return self.pipelining.of(algorithm, call.size, nodes, block_count, largest)

    def _write_down(
        self, call: Call, choice: Choice, arity: int, segments: int, window: int
    ) -> Written:
        algorithm = choice.algorithm
        # GENERATION: one of its levels may have another schedule by now.
        key = (algorithm, arity, call.root, segments, window, GENERATION[0])
        if key not in self._written:

            def make() -> Any:
                return algorithm.schedule(call.rank, call.size, call.root, arity, self.groups)

            if len(self._written) >= _WRITTEN:
                self._written.clear()
            schedule = segmented(make, call.size, segments, window)
            self._written[key] = materialise(schedule)
        return self._written[key]


# Of each block that a round reduces: the ranks and pieces of its terms, and in a list its target.
Together = dict[tuple[str, int], tuple[list[int], list[Piece], list[Piece]]]


class Placed(NamedTuple):
    """A step of messages or a copy, with the memory of its blocks.

    `rows` has the pieces of a message, or pairs: operand and target of a reduction, target and
    source of a copy.
    """

    step: Step
    rows: Sequence[tuple[Piece, ...]]


def place(
    steps: Sequence[Step], storage: Storage, rank: int, part: tuple[int, int] = (0, 1)
) -> list[Placed]:
    """Return the steps of a round of `rank` with the memory of their blocks.

    ``part=(k, n)`` is piece k of n of each block.

    Sends are the first, because they send the contents that blocks had before the round; the others
    stay in order: two reductions of a block in one round combine in that order on every run, on
    which equal bits rest.
    """
    _check(steps, rank)
    sends = [step for step in steps if isinstance(step, Send)]
    rest = [step for step in steps if not isinstance(step, Send)]
    return [Placed(step, _rows_of(step, storage, part)) for step in (*sends, *rest)]


def _rows_of(step: Step, storage: Storage, part: tuple[int, int]) -> Sequence[tuple[Piece, ...]]:
    if isinstance(step, Copy):
        return [(_piece(one, part), _piece(other, part)) for one, other in _copied(step, storage)]
    assert isinstance(step, (Send, Recv, Reduce))
    places = [(step.buffer, b) for b in block_tuple(step.blocks)]
    if isinstance(step, Reduce):
        own = [_piece(storage.read(at), part) for at in places]
        return [(mine, _piece(storage.write(at), part)) for mine, at in zip(own, places)]
    where = storage.read if isinstance(step, Send) else storage.write
    return [(piece,) for piece in merge([_piece(where(at), part) for at in places])]


def _piece(whole: Piece, part: tuple[int, int]) -> Piece:
    k, count = part
    if count == 1:
        return whole
    array, start, stop = whole
    found = blocks(stop - start, count)[k]
    return array, start + found.start, start + found.stop


def _copied(step: Copy, storage: Storage) -> list[tuple[Piece, Piece]]:
    """Return the pair (target, source) of each block that a Copy copies, checked for its length.

    The target is the first, as in the `rows` of :class:`Placed`.
    """
    sources = [storage.read((step.source, b)) for b in block_tuple(step.source_blocks)]
    targets = [storage.write((step.target, b)) for b in block_tuple(step.target_blocks)]
    if len(sources) != len(targets):
        raise ScheduleError(
            f"a Copy from {step.source!r} to {step.target!r} copies {len(sources)} blocks to "
            f"{len(targets)}: expected equally many"
        )
    numbers = block_tuple(step.source_blocks), block_tuple(step.target_blocks)
    for source, target, block, onto in zip(sources, targets, *numbers):
        (_, source_start, source_stop), (_, target_start, target_stop) = source, target
        given, room = source_stop - source_start, target_stop - target_start
        if given != room:
            raise ScheduleError(
                f"has {given} elements, its target block {onto} has {room}", block=block
            )
    return list(zip(targets, sources))


def _check(steps: Sequence[Step], rank: int) -> None:
    sent = {(s.buffer, b) for s in steps if isinstance(s, Send) for b in block_tuple(s.blocks)}
    reduced = {(s.buffer, b) for s in steps if isinstance(s, Reduce) for b in block_tuple(s.blocks)}
    received: set[tuple[str, int]] = set()
    for step in steps:
        if isinstance(step, ONE_SIDED):
            name = type(step).__name__
            raise ScheduleError(
                f"{name} needs the memory of other ranks, which messages do not reach", rank=rank
            )
        if not isinstance(step, Copy) and step.peer == rank:
            raise ScheduleError(f"{step!r} names this rank as its peer; use Copy", rank=rank)
        # A Recv stores in the block itself while the round's messages are under way.  What a Reduce
        # receives waits in scratch memory until all are complete: a Send may have its block.
        if isinstance(step, Recv):
            for b in block_tuple(step.blocks):
                at = (step.buffer, b)
                if at in sent or at in received or at in reduced:
                    raise ScheduleError(
                        "is received, and also sent or received again, in one round", block=b
                    )
                received.add(at)


class Binder:
    """Walks the rounds of one rank in order and binds each to memory and to the backend.

    If `persistent`, the backend binds the messages of each round, where it can, instead of posting
    them one by one in each run.
    """

    def __init__(
        self,
        backend: Backend | Bindable,
        memory: Memory,
        op: Op | None,
        persistent: bool,
        bank: list[int] | None = None,
    ):
        self.backend, self.memory, self.op = backend, memory, op
        self.persistent = persistent
        self.messages = self._requests = 0
        self._bank, self._space = [0] if bank is None else bank, tags_of(backend.tag_limit).space
        roll_call = backend.roll_call
        self._greeting: Greeting | None = None
        if roll_call is not None and roll_call.absent:
            absent, late = frozenset(roll_call.absent), late_greetings_of(cast(Backend, backend))
            self._greeting = Greeting(backend.rank, absent, late, self._bank, self._space)

    def program(self, written: Written, storage: Storage, finish: Sequence[Action] = ()) -> Program:
        """Return the program of a whole schedule; `finish` are actions after its last round."""
        storage.prepare(written)
        arena = MessageScratch(self.memory)
        items = self._strand(written, storage, arena, 0, set())
        finishing = (*storage.finish(), *finish)
        return self.greeted(items, finishing, arena.total() + storage.scratch_elements)

    def greeted(
        self, items: list[Round | Side], finish: Sequence[Action], scratch_elements: int
    ) -> Program:
        """Return the program of bound rounds, with the greetings of ranks of other nodes."""
        greeting = self._greeting
        # The program ends when its greetings are sent: the next run writes in their memory.
        if greeting is not None and greeting.bind(self._bind):
            items = [
                Round((greeting.start,), None, ()),
                *items,
                Round((), _GreetingsSent(greeting), ()),
            ]
        return Program(
            items,
            tuple(finish),
            scratch_elements * self.memory.dtype.itemsize,
            self.messages,
            self._bank,
            requests=self._requests,
            named=greeting,
        )

    def _strand(
        self, written: Written, storage: Storage, arena: MessageScratch, tag: int, heard: set[int]
    ) -> list[Round | Side]:
        """Bind one strand: the rounds of a whole schedule, or of one of several concurrent parts.

        Its messages get the tag `tag`.  `heard` has the peers whose greetings were compared in
        earlier rounds; the peers whose greetings this strand compares are added to it.
        """
        items: list[Round | Side] = []
        for item in written:
            if isinstance(item, Strands):
                count = len(item.strands)
                if count > STRANDS:
                    raise ScheduleError(
                        f"parallel has {count} strands; expected at most {STRANDS}",
                        rank=self.backend.rank,
                    )
                # Strands do not wait for each other: each compares a peer's greeting itself.
                # Strand k + window starts when strand k has ended, and gets its scratch memory.
                known = [set(heard) for _ in item.strands]
                strands = [
                    self._strand(
                        s, storage, arena.within(k % item.window), of_strand(tag, k), known[k]
                    )
                    for k, s in enumerate(item.strands)
                ]
                heard.update(*known)
                items.append(Side(strands, item.window))
            else:
                placed = place(item, storage, self.backend.rank)
                items.append(self.round(placed, arena, tag, heard))
        return items

    def side(
        self,
        strands: Sequence[Sequence[Sequence[Placed]]],
        window: int,
        arena: MessageScratch,
        heard: set[int],
    ) -> list[Round | Side]:
        """Bind strands of placed rounds; a single one is bound as rounds."""
        if len(strands) == 1:
            return [self.round(steps, arena, 0, heard) for steps in strands[0]]
        known = [set(heard) for _ in strands]
        bound: list[list[Round | Side]] = [
            [
                self.round(steps, arena.within(k % window), of_strand(0, k), known[k])
                for steps in one
            ]
            for k, one in enumerate(strands)
        ]
        heard.update(*known)
        return [Side(bound, window)]

    def round(
        self, steps: Sequence[Placed], arena: MessageScratch, tag: int, heard: set[int]
    ) -> Round:
        """Bind one round; `arena` is scratch memory for messages, `tag` and `heard` a strand's."""
        arena.taken = 0
        if tag >= self._space:
            raise ScheduleError(
                f"parallel is nested too deep, or has too many strands: a strand needs tag {tag}, "
                f"and an operation on this backend has the tags 0 to {self._space - 1}"
            )
        before: list[Action] = []
        after: list[Action] = []
        sends: list[RoundMessage] = []
        receives: list[RoundMessage] = []
        grouped = self.op is not None and self.op.grouping != ANY
        together: Together | None = {} if grouped else None
        for step, rows in steps:
            if isinstance(step, Copy):
                after.extend(self._combined(together))
                after.extend(self._copy(step, rows))
            elif isinstance(step, Reduce):
                receives.append(self._reduce(step, rows, arena, tag, after, together))
            elif isinstance(step, Recv):
                receives.append(self._message(step, rows, arena, tag, after))
            else:
                assert isinstance(step, Send)
                sends.append(self._message(step, rows, arena, tag, before))
        after.extend(self._combined(together))
        messages = receives + sends
        self.messages += len(sends)
        self._requests += len(messages)
        transfer: Transfer | None = None
        if messages:
            transfer = self._transfer(messages, heard)
        return Round(tuple(before), transfer, tuple(after))

    def _transfer(self, messages: Sequence[RoundMessage], heard: set[int]) -> Transfer:
        """Bind the messages of a round; receives wait for the greetings of new peers.

        These are the peers of other nodes that are not in `heard`, to which they are added.
        """
        greeting = self._greeting
        if greeting is None:
            return self._bind(messages)
        for message in messages:
            greeting.count(message)
        unheard = ({m.peer for m in messages if m.incoming} & greeting.absent) - heard
        heard |= unheard
        return Greeted(greeting, messages, self._bind) if unheard else self._bind(messages)

    def _bind(self, messages: Sequence[RoundMessage]) -> Transfer:
        transfer = self.backend.bind(messages) if self.persistent else None
        if transfer is None:
            backend = cast(Backend, self.backend)  # NCCL binds all messages
            transfer = UnboundTransfer(backend, messages, self._bank, self._space)
        return transfer

    def _message(
        self,
        step: Send | Recv,
        rows: Sequence[tuple[Piece, ...]],
        arena: MessageScratch,
        tag: int,
        actions: list[Action],
    ) -> RoundMessage:
        """Return a message; `actions` get the copies of pieces that are apart in memory."""
        incoming = isinstance(step, Recv)
        pieces = [piece for (piece,) in rows]
        if len(pieces) == 1:
            return RoundMessage(incoming, step.peer, self.memory.view(pieces[0]), tag)
        packed = arena.take(sum(stop - start for _, start, stop in pieces))
        for piece, part in _cut(packed, pieces):
            actions.append(self._store(piece, part) if incoming else self._store(part, piece))
        return RoundMessage(incoming, step.peer, self.memory.view(packed), tag)

    def _reduce(
        self,
        step: Reduce,
        rows: Sequence[tuple[Piece, ...]],
        arena: MessageScratch,
        tag: int,
        after: list[Action],
        together: Together | None,
    ) -> RoundMessage:
        """Return the message of a Reduce; its combination is added to `after`, or `together`."""
        own = [mine for mine, _ in rows]
        incoming = arena.take(sum(stop - start for _, start, stop in own))
        parts = [
            (mine, theirs, target) for (mine, theirs), (_, target) in zip(_cut(incoming, own), rows)
        ]
        if together is not None:
            for block, (mine, theirs, target) in zip(block_tuple(step.blocks), parts):
                terms = together.setdefault((step.buffer, block), ([self.backend.rank], [mine], []))
                terms[0].append(step.peer)
                terms[1].append(theirs)
                terms[2][:] = [target]
            return RoundMessage(True, step.peer, self.memory.view(incoming), tag)
        memory, op = self.memory, self.op
        lower = step.peer < self.backend.rank  # the left operand is the lower rank's, as proved
        for row in merge_rows(parts):
            assert op is not None  # a barrier has no data
            mine, theirs, target = (memory.view(piece) for piece in row)
            operands = (theirs, mine) if lower else (mine, theirs)
            after.append(memory.combine(op, *operands, target))
        return RoundMessage(True, step.peer, memory.view(incoming), tag)

    def _combined(self, together: Together | None) -> list[Action]:
        """Return the actions that combine all terms of the blocks in `together`, and empty it."""
        if not together:
            return []
        op, actions = self.op, list[Action]()
        assert op is not None
        by_ranks: dict[tuple[int, ...], list[tuple[Piece, ...]]] = {}
        for ranks, terms, targets in together.values():
            by_ranks.setdefault(tuple(ranks), []).append((*terms, *targets))
        together.clear()
        for order, rows in by_ranks.items():
            divisor = len(order) if at_once(op) and is_mean(op) else 0
            for row in merge_rows(rows):
                *inputs, target = map(self.memory.view, row)
                actions += fold_in_order(op, inputs, order, [target], divisor)
        return actions

    def _copy(self, step: Copy, rows: Sequence[tuple[Piece, ...]]) -> list[Action]:
        places = {(step.source, b) for b in block_tuple(step.source_blocks)}
        if places.isdisjoint((step.target, b) for b in block_tuple(step.target_blocks)):
            return [self._store(*pair) for pair in merge_rows(rows)]
        # The blocks overlap: all reads, then all writes.
        aside = [(self.memory.allocate(stop - at), 0, stop - at) for _, (_, at, stop) in rows]
        return [
            *(self._store(held, source) for held, (_, source) in zip(aside, rows)),
            *(self._store(target, held) for held, (target, _) in zip(aside, rows)),
        ]

    def _store(self, target: Piece, source: Piece) -> Action:
        return self.memory.store(self.memory.view(target), self.memory.view(source))


def _cut(whole: Piece, pieces: Sequence[Piece]) -> list[tuple[Piece, Piece]]:
    """Cut the Piece `whole` into parts as long as `pieces`; return each piece with its part."""
    array, at, _ = whole
    pairs: list[tuple[Piece, Piece]] = []
    for piece in pieces:
        n = piece[2] - piece[1]
        pairs.append((piece, (array, at, at + n)))
        at += n
    return pairs
