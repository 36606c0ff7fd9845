"""Thread blocks become rounds: the steps of an MSCCL file as the rounds of each rank.

A file orders its steps: within a thread block, by dependencies, and by messages, whose sends do
not wait.  Rounds are one of the orders that this allows: both ends of a message are in one round.
That any other gives the same is checked by the clocks of the thread blocks: where two steps of a
GPU use a chunk, one of them to write it, the file must say which is first.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from graphlib import CycleError, TopologicalSorter
from itertools import zip_longest

import numpy as np

from ...errors import ScheduleError, Unsupported
from ...schedule.contract import COLLECTIVES
from ...schedule.rounds import Blocks, Copy, Recv, Reduce, Send
from .file import WITH_SOURCE, WITH_TARGET, Chunk, File, Step

Place = tuple[str, int]  # buffer and block
Channel = tuple[int, int, int]  # sender, receiver, number
Rounds = list[tuple[Send | Recv | Reduce | Copy, ...]]
_AFTER_COPIES = ("copy", "reduce", "add")  # what sees the copies of its own round


@dataclass(eq=False, slots=True)
class Op:
    """A part of a step: "send", "receive", "reduce" (what is received), "copy", "add" or "nop".

    An "add" combines chunks of one place into another of the same rank.  `thread` is the number of
    its thread block among all, `tick` its own number in there, from 1.
    """

    kind: str
    rank: int
    thread: int
    tick: int
    line: int
    sources: tuple[Place, ...]
    targets: tuple[Place, ...]
    before: list[Op] = field(default_factory=list)
    message: tuple[int, int, int, int] = (0, 0, 0, 0)  # its channel, and its number in there
    receiver: Op | None = None  # of a send: what receives it

    @property
    def reads(self) -> tuple[Place, ...]:
        """The places that it reads."""
        return self.sources + self.targets if self.kind in ("reduce", "add") else self.sources


class _Layout:
    """Which blocks of our buffers the chunks of a file's buffers are.

    Either input and output are one buffer, or they are `apart`: the input is only read, and nothing
    is in the output at the start.
    """

    def __init__(self, file: File, apart: bool):
        self.apart = apart
        self.name = file.collective
        self.each = file.chunks // len(file.gpus)
        self.own_input = COLLECTIVES[file.collective].input_buffer == "in"
        self.output = max(gpu.chunks["s"] for gpu in file.gpus)  # in "tmp", behind the scratch
        self.spare = [self.output + file.chunks] * len(file.gpus)

    def at(self, rank: int, chunk: Chunk, count: int) -> tuple[Place, ...]:
        """Return the places of `count` chunks of a rank."""
        buffer, start = chunk
        name = "tmp"
        if buffer == "i":
            start += rank * self.each if self.name == "allgather" else 0
            name = "in" if self.apart and self.own_input else "out"
        elif buffer == "o" and self.apart and not self.own_input:
            start += self.output
        elif buffer == "o":
            start += rank * self.each if self.name == "reduce_scatter" else 0
            name = "out"
        return tuple([(name, start + k) for k in range(count)])

    def new(self, rank: int, count: int) -> tuple[Place, ...]:
        """Return places of a rank that nothing else uses."""
        self.spare[rank] += count
        return tuple([("tmp", self.spare[rank] - k) for k in range(count, 0, -1)])

    def around(self, rank: int, chunks: int) -> tuple[Rounds, Rounds]:
        """Return the rounds before and after those of the file, which move its data."""
        every = tuple(range(chunks))
        if self.own_input:
            return ([] if self.apart else [(Copy(every, every),)]), []
        if not self.apart:
            return [], []
        results = every
        if self.name == "reduce_scatter":
            results = every[rank * self.each : (rank + 1) * self.each]
        held = tuple(self.output + k for k in range(len(results)))
        return [], [(Copy(held, results, "tmp", "out"),)]


def rounds_of(file: File, apart: bool, exact: bool = True) -> list[Rounds]:
    """Return the rounds of each rank, with input and output `apart` or in one buffer.

    If `exact`, a ``rrs`` (receive, reduce, send) leaves its operand as it was, as in MSCCL; else
    the sum takes its place, which needs no copy.

    Raises ScheduleError, with their lines, if steps wait for each other, if nothing receives what
    one sends, or if two steps use a chunk in either order and one of them writes it; Unsupported
    if a ``re`` combines what no message brought, or if no rounds have the steps' order.
    """
    layout = _Layout(file, apart)
    ordered = _in_order(file, _ops(file, layout, exact))
    taken, overwritten = _check_places(file, ordered)
    ties = _defer(file, ordered, taken)
    levels = _levels(file, ordered, overwritten, ties)
    return _steps(file, layout, ordered, levels)


def _wrong(file: File, ops: Iterable[Op], message: str) -> ScheduleError:
    """Return the error of some operations, with their lines in the file."""
    named = list(ops)
    return ScheduleError(f"{file.what}, {_lines(named)}: {message}", rank=named[0].rank)


def _lines(ops: Iterable[Op]) -> str:
    numbers = sorted({op.line for op in ops})
    return f"line{'s' * (len(numbers) > 1)} {', '.join(map(str, numbers[:8]))}"


# -- the operations, and what the file says of their order ----------------------------------------


def _ops(file: File, layout: _Layout, exact: bool) -> list[Op]:
    """Return the operations of all thread blocks, each with those that the file has before it."""
    made: list[Op] = []
    ends: dict[tuple[int, int, int], Op] = {}  # the last of each step, by GPU, thread block, step
    waits: list[tuple[Op, Step]] = []
    sends: dict[Channel, list[Op]] = defaultdict(list)
    receives: dict[Channel, list[Op]] = defaultdict(list)
    thread = 0
    for rank, gpu in enumerate(file.gpus):
        for number, block in enumerate(gpu.blocks):
            tick = 0
            for n, step in enumerate(block.steps):
                for k, part in enumerate(_parts(rank, step, layout, exact)):
                    op = Op(part[0], rank, thread, tick + 1, step.line, *part[1:])
                    if layout.apart and step.type in WITH_TARGET and step.target[0] == "i":
                        message = "writes 'i', the input, which is only read out of place"
                        raise _wrong(file, [op], message)
                    if tick:
                        op.before.append(made[-1])
                    if step.after is not None and k == 0:
                        waits.append((op, step))
                    if op.kind == "send":
                        _post(op, (rank, block.send, block.channel), sends)
                    elif op.kind in ("receive", "reduce"):
                        _post(op, (block.recv, rank, block.channel), receives)
                    made.append(op)
                    tick += 1
                ends[rank, number, n] = made[-1]
            thread += 1
    for op, step in waits:
        assert step.after is not None
        end = ends.get((op.rank, *step.after))
        what = f"step {step.after[1]} of thread block {step.after[0]}"
        if end is None:
            raise _wrong(file, [op], f"waits for {what}, which the GPU does not have")
        if not file.gpus[op.rank].blocks[step.after[0]].steps[step.after[1]].awaited:
            raise _wrong(file, [op, end], f"waits for {what}, which tells nobody: hasdep is 0")
        op.before.append(end)
    for channel in {**sends, **receives}:
        _match(file, channel, sends[channel], receives[channel])
    return made


def _parts(
    rank: int, step: Step, layout: _Layout, exact: bool
) -> Iterator[tuple[str, tuple[Place, ...], tuple[Place, ...]]]:
    """Yield kind, sources and targets of each operation of a step."""
    kind, n = step.type, step.count
    source = layout.at(rank, step.source, n) if kind in WITH_SOURCE else ()
    target = layout.at(rank, step.target, n) if kind in WITH_TARGET else ()
    if kind == "rrs":
        target = layout.new(rank, n) if exact else source
    if kind in ("cpy", "rrs", "rrc", "rrcs") and source != target:
        yield "copy", source, target
    if kind in ("r", "rcs"):
        yield "receive", (), target
    elif kind in ("rrs", "rrc", "rrcs"):
        yield "reduce", (), target
    elif kind == "re":
        yield "add", source, target
    elif kind == "nop" or (kind == "cpy" and source == target):
        yield "nop", (), ()
    if kind in ("s", "rcs", "rrs", "rrcs"):
        yield "send", source if kind == "s" else target, ()


def _post(op: Op, channel: Channel, queues: dict[Channel, list[Op]]) -> None:
    op.message = (*channel, len(queues[channel]))
    queues[channel].append(op)


def _match(file: File, channel: Channel, sends: list[Op], receives: list[Op]) -> None:
    """Pair the sends of a channel with its receives, in their order."""
    source, target, number = channel
    for ops in (sends, receives):
        if len({op.thread for op in ops}) > 1:
            other = next(op for op in ops if op.thread != ops[0].thread)
            message = f"two thread blocks share channel {number} from GPU {source} to {target}"
            raise _wrong(file, [ops[0], other], message)
    for send, receive in zip_longest(sends, receives):
        if receive is None:
            raise _wrong(file, [send], f"GPU {target} does not receive it on channel {number}")
        if send is None:
            raise _wrong(file, [receive], f"GPU {source} does not send it on channel {number}")
        if len(send.sources) != len(receive.targets):
            message = f"sends {len(send.sources)} chunks to a step for {len(receive.targets)}"
            raise _wrong(file, [send, receive], message)
        receive.before.append(send)
        send.receiver = receive


def _in_order(file: File, ops: list[Op]) -> list[Op]:
    """Return the operations in an order that the file allows."""
    try:
        return list(TopologicalSorter({op: op.before for op in ops}).static_order())
    except CycleError as error:
        raise _wrong(file, error.args[1], "deadlock: these steps wait for each other") from None


# -- chunks ---------------------------------------------------------------------------------------

Taken = dict[Op, dict[Place, Op]]  # of a receive: the "add" that alone reads a chunk of it


def _check_places(file: File, ordered: list[Op]) -> tuple[Taken, list[tuple[Op, Op]]]:
    """Check that the file orders all uses of a chunk of which one writes it.

    Returns which "add" reads what receives brought for it alone, and the pairs of a send and what
    overwrites a chunk of it.
    """
    threads = max((op.thread for op in ordered), default=0) + 1
    clocks: dict[Op, np.ndarray] = {}  # the latest tick of each thread block that is before
    followers: dict[Op, int] = defaultdict(int)
    for op in ordered:
        for other in op.before:
            followers[other] += 1
    writers: dict[tuple[int, Place], Op] = {}
    readers: dict[tuple[int, Place], list[Op]] = {}  # since then
    taken: Taken = defaultdict(dict)
    kept: set[Op] = set()  # what else reads
    overwritten = []
    for op in ordered:
        clock = np.zeros(threads, np.int32)
        for other in op.before:
            np.maximum(clock, clocks[other], out=clock)
            followers[other] -= 1
            if not followers[other]:
                del clocks[other]
        clock[op.thread] = op.tick
        clocks[op] = clock
        for place in op.reads:
            key = (op.rank, place)
            writer, others = writers.get(key), readers.setdefault(key, [])
            if writer is not None:
                _check_order(file, writer, op, clock)
                if op.kind == "add" and place in op.sources and not others:
                    taken[writer][place] = op
                else:
                    kept.add(writer)
            others.append(op)
        for place in op.targets:
            key = (op.rank, place)
            earlier = readers.pop(key, [])
            if key in writers:
                earlier.append(writers[key])
            for other in earlier:
                if other is not op:
                    _check_order(file, other, op, clock)
                if other.kind == "send":
                    overwritten.append((other, op))
            writers[key] = op
    alone = {op: adds for op, adds in taken.items() if op not in kept}
    return alone, overwritten


def _check_order(file: File, first: Op, second: Op, clock: np.ndarray) -> None:
    if clock[first.thread] < first.tick:
        message = "these steps use the same chunk, in either order, and one of them writes it"
        raise _wrong(file, [first, second], message)


def _defer(file: File, ordered: list[Op], taken: Taken) -> list[tuple[Op, Op]]:
    """Let messages that only an "add" reads be combined there, and not wait in scratch memory.

    Each such receive becomes a nop, and its message a "reduce", which is appended to `ordered`.
    Returns the pairs of a send and an "add" that must be in the same round.
    """
    ties: list[tuple[Op, Op]] = []
    combined: dict[Op, set[Place]] = defaultdict(set)  # what each "add" gets from messages
    for send in [op for op in ordered if op.receiver in taken]:
        receive = send.receiver
        assert receive is not None
        adds = taken[receive]
        if receive.kind != "receive" or len(adds) < len(receive.targets):
            continue
        targets = tuple(adds[p].targets[adds[p].sources.index(p)] for p in receive.targets)
        if len({buffer for buffer, _ in targets}) > 1:
            message = "chunks of one message are combined into two buffers"
            raise Unsupported(f"{file.what}, {_lines([receive, *adds.values()])}: {message}")
        for place, add in adds.items():
            combined[add].add(place)
        ties += [(send, add) for add in dict.fromkeys(adds.values())]
        receive.kind, receive.targets = "nop", ()
        receive.before.remove(send)
        made = Op("reduce", receive.rank, receive.thread, receive.tick, receive.line, (), targets)
        made.message, made.before, send.receiver = receive.message, [receive], made
        ordered.append(made)
    for op in ordered:
        if op.kind == "add" and combined[op] != set(op.sources):
            raise Unsupported(
                f"{file.what}, {_lines([op])}: re combines what no message brought for it alone: "
                "expected a source that one step received, and no other step reads"
            )
    return ties


# -- rounds ---------------------------------------------------------------------------------------


def _between(first: Op, second: Op) -> int:
    """Return how many rounds are at least between two operations of a rank."""
    if first.kind == "nop":
        return 0
    if first.kind == "add":
        return int(second.kind != "add")
    if first.kind == second.kind == "reduce" and first.thread != second.thread:
        # One round may combine several messages into a chunk, one after the other.
        return int(set(first.targets).isdisjoint(second.targets))
    return int(first.kind != "copy" or second.kind not in _AFTER_COPIES)


def _levels(
    file: File, ordered: list[Op], overwritten: list[tuple[Op, Op]], ties: list[tuple[Op, Op]]
) -> dict[Op, int]:
    """Return the round of each operation, from 0: of a message, that of its send.

    It is the first that the order allows.
    """
    nodes = {op.receiver: op for op in ordered if op.receiver is not None}  # by what receives
    at_once: dict[Op, list[Op]] = defaultdict(list)  # what must not be in a later round
    later: dict[Op, list[Op]] = defaultdict(list)  # what must be in a later round
    waits: dict[Op, int] = {op: 0 for op in ordered if op not in nodes}

    def order(first: Op, second: Op, rounds: int) -> None:
        first, second = nodes.get(first, first), nodes.get(second, second)
        if rounds:
            later[first].append(second)
            waits[second] += 1
        elif first is not second:
            at_once[first].append(second)

    # Sends do not wait for their message: what follows one may be in an earlier round, but later
    # sends of its thread block, and what overwrites what it sends.
    past: dict[Op, dict[Op, None]] = {}  # of a send: what is before it, past other sends
    for second in ordered:
        befores: dict[Op, None] = {}
        for first in second.before:
            if first.kind != "send":
                befores[first] = None
            elif nodes.get(second) is not first:
                befores.update(past[first])
                if second.kind == "send" and second.thread == first.thread:
                    order(first, second, 0)
        if second.kind == "send":
            past[second] = befores
        for first in befores:
            order(first, second, _between(first, second))
    for send, writer in overwritten:
        order(send, writer, int(writer.kind == "receive"))  # a round sends what was before it
    for send, add in ties:
        order(send, add, 0)
        order(add, send, 0)
    levels: dict[Op, int] = {}
    todo = set(waits)
    level = 0
    while todo:
        # All that waits for nothing in this or a later round, but what follows something that does:
        # operations that follow each other in a circle may be in one round.
        ready = {op for op in todo if not waits[op]}
        blocked = list(todo - ready)
        while blocked:
            for op in at_once[blocked.pop()]:
                if op in ready:
                    ready.remove(op)
                    blocked.append(op)
        if not ready:
            stuck = sorted(todo, key=lambda op: op.line)
            raise Unsupported(
                f"{file.what}, {_lines(stuck)}: no rounds have this order, as each of these steps "
                "must be both before and after another"
            )
        for op in ready:
            levels[op] = level
            for other in later[op]:
                waits[other] -= 1
        todo -= ready
        level += 1
    return levels


def _steps(file: File, layout: _Layout, ordered: list[Op], levels: dict[Op, int]) -> list[Rounds]:
    """Return the rounds of each rank: copies first, then messages, alike at both ends."""
    size = len(file.gpus)
    copies: list[dict[int, list[Copy]]] = [defaultdict(list) for _ in range(size)]
    messages: list[dict[int, list]] = [defaultdict(list) for _ in range(size)]
    for op in ordered:
        if op.kind == "copy":
            (source, read), (target, written) = _blocks(op.sources), _blocks(op.targets)
            copies[op.rank][levels[op]].append(Copy(read, written, source, target))
        elif op.kind == "send":
            receiver = op.receiver
            assert receiver is not None
            (source, read), (target, written) = _blocks(op.sources), _blocks(receiver.targets)
            end = Reduce if receiver.kind == "reduce" else Recv
            sent = Send(receiver.rank, read, source)
            messages[op.rank][levels[op]].append((op.message, sent))
            received = end(op.rank, written, target)
            messages[receiver.rank][levels[op]].append((op.message, received))
    made = []
    for rank in range(size):
        begin, end_ = layout.around(rank, file.chunks)
        rounds = []
        for level in sorted({*copies[rank], *messages[rank]}):
            sorted_ = sorted(messages[rank][level], key=lambda one: one[0])
            rounds.append((*copies[rank][level], *(step for _, step in sorted_)))
        made.append([*begin, *rounds, *end_])
    return made


def _blocks(places: tuple[Place, ...]) -> tuple[str, Blocks]:
    """Return the buffer of some places, and their blocks."""
    buffer, block = places[0]
    return buffer, block if len(places) == 1 else tuple([block for _, block in places])
