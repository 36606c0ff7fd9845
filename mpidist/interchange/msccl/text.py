"""An algorithm as an MSCCL file: one thread block for each pair of peers and channel.

The rounds are those of the prover's machine.  A round's order is not kept as such: a step waits for
those that wrote what it reads or overwrites, and that read what it overwrites.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from itertools import zip_longest
from typing import Any
from xml.sax.saxutils import quoteattr

from ...errors import InvalidArgument, Unsupported
from ...measure import counted
from ...schedule.contract import Contract
from ...schedule.exchange import Posted
from ...schedule.machine import Machine
from ...schedule.prove import prepare
from ...schedule.registry import Algorithm, Choice, Groups
from ...schedule.rounds import Copy, Reduce, Schedule, Send, block_tuple
from ...schedule.strand import Strand
from .algorithm import proved
from .file import COLLECTIVES, MOST_CHUNKS, PROTOCOLS, Chunk, parse

# RCCL's limits (msccl_struct.h, device.h).
_STEPS, _BLOCKS, _COUNT, _CHANNELS = 64, 64, 71, 128
_NAMES = {ours: theirs for theirs, ours in COLLECTIVES.items()}  # RCCL's, the later one
_NO_CHUNK = ("o", -1)

Place = tuple[str, int]


@dataclass(slots=True)
class Message:
    """A message: its channel, and where its chunks are at both ends."""

    source: int
    target: int
    channel: int
    sent: list[Chunk] = field(default_factory=list)
    own: list[Chunk] = field(default_factory=list)  # the operands of a reduction
    written: list[Chunk] = field(default_factory=list)


@dataclass(eq=False, slots=True)
class Step:
    """A step of a file that is being written."""

    kind: str
    source: Chunk
    target: Chunk
    count: int
    block: int = 0
    after: list[Step] = field(default_factory=list)
    awaited: bool = False
    number: int = 0


class _Recorder(Machine):
    """The prover's machine, which keeps the steps of each rank in order, with their messages."""

    def record(self) -> None:
        """Run all ranks."""
        self.messages: dict[tuple[Strand, int], Message] = {}  # of a round, by the step of an end
        self.done: list[list[tuple[Any, Message | None]]] = [[] for _ in range(self.size)]
        self.channels: dict[tuple[Any, ...], int] = {}
        self.run()

    def _move(self, send: Posted, receive: Posted, sent: bool = False) -> None:
        source, target = send.strand.rank, receive.strand.rank
        # Messages of one round to one peer are on channels of their own, so that they overlap.
        earlier = send.strand.steps[: send.index]
        turn = sum(isinstance(s, Send) and s.peer == target for s in earlier)
        channel = self.channels.setdefault((send.strand.path, turn), len(self.channels))
        message = Message(source, target, channel)
        self.messages[send.strand, send.index] = message
        self.messages[receive.strand, receive.index] = message
        super()._move(send, receive, sent)

    def _finish_round(self, strand: Strand) -> None:
        pairs = [(s, self.messages.pop((strand, k), None)) for k, s in enumerate(strand.steps)]
        pairs.sort(
            key=lambda pair: not isinstance(pair[0], Send)
        )  # they send what was there before
        self.done[strand.rank] += pairs
        super()._finish_round(strand)


class _Chunks:
    """Where a rank's blocks are: in the input as long as nothing was written there, as in calls."""

    def __init__(self, contract: Contract, rank: int, size: int, count: int):
        self.name = contract.name
        self.inputs = contract.input_blocks(rank, size, 0, count)
        self.results = contract.output_blocks(rank, size, 0, count)
        name = contract.input_buffer
        self.where: dict[Place, Chunk] = {(name, b): ("i", k) for k, b in enumerate(self.inputs)}
        self.scratch: dict[Place, int] = {}

    def home(self, place: Place) -> Chunk:
        """Return the chunk for a block that is written: of the output, or of scratch memory."""
        buffer, block = place
        if buffer == "out" and block in self.results:
            return "o", block - self.results.start
        return "s", self.scratch.setdefault(place, len(self.scratch))

    def write(self, place: Place) -> Chunk:
        """Return the chunk for a block that is written, which is there from now on."""
        self.where[place] = chunk = self.home(place)
        return chunk

    def alias(self, chunk: Chunk) -> Chunk:
        """Return the same chunk for those of input and output that are one in place."""
        buffer, number = chunk
        if self.name == "alltoall" or buffer == "s":
            return chunk
        return "io", number + (self.inputs if buffer == "i" else self.results).start


def export_msccl(
    collective: str,
    choice: str | Algorithm | Choice | Callable[..., Schedule],
    size: int,
    *,
    arity: int = 2,
    groups: Groups | None = None,
    segments: int = 1,
    window: int | None = None,
    protocol: str = "Simple",
) -> str:
    """Return an algorithm as an MSCCL file, as RCCL reads it, after its proof.

    Parameters
    ----------
    collective, choice, size, arity, groups, segments, window
        As for :func:`~mpidist.schedule.prove`; a strand is a channel, or several.
    protocol : {"Simple", "LL", "LL128"}
        NCCL's protocol of the messages.

    Returns
    -------
    str
        The file, for calls in place and out of place; alltoall out of place only.

    Raises
    ------
    ScheduleError
        If the schedule is wrong.
    Unsupported
        If the format has no words for it, as for a root or shared memory, or if it is beyond the
        limits of RCCL, of 64 steps in a thread block for example.
    """
    if protocol not in PROTOCOLS:
        raise InvalidArgument(f"protocol={protocol!r}: expected {', '.join(PROTOCOLS)}")
    known, machine = prepare(
        collective,
        choice,
        size,
        arity=arity,
        groups=groups,
        segments=segments,
        window=window,
        machine=_Recorder,
    )
    assert isinstance(machine, _Recorder)
    if known.memory is not None:
        raise Unsupported(f"{known.label} needs shared memory: MSCCL has messages and copies only")
    if collective not in _NAMES:
        raise Unsupported(f"{known.label}: MSCCL's files are of {', '.join(_NAMES)}")
    if machine.count > MOST_CHUNKS:
        raise Unsupported(f"{known.label}: {machine.count} blocks: expected at most {MOST_CHUNKS}")
    machine.record()
    contract, count = machine.contract, machine.count
    chunks = [_Chunks(contract, rank, size, count) for rank in range(size)]
    # Both ends of a message say where its blocks are, before it is cut into steps.
    parts = [_locate(rounds, here) for rounds, here in zip(machine.done, chunks)]
    gpus = [_thread_blocks(part, here) for part, here in zip(parts, chunks)]
    _check_limits(known.label, gpus, len(machine.channels))
    scratch = max(len(here.scratch) for here in chunks)
    apart_only = collective == "alltoall"
    lines = [
        f"<!-- {known.label} on {counted(size, 'rank')}; proved and written by mpidist -->",
        f'<algo name={quoteattr(known.label)} proto="{protocol}" '
        f'nchannels="{max(1, len(machine.channels))}" nchunksperloop="{count}" '
        f'ngpus="{size}" coll="{_NAMES[collective]}" '
        f'inplace="{int(not apart_only)}" outofplace="1" minBytes="0" maxBytes="0">',
    ]
    for rank, (here, blocks) in enumerate(zip(chunks, gpus)):
        lines.append(
            f'  <gpu id="{rank}" i_chunks="{len(here.inputs)}" o_chunks="{len(here.results)}" '
            f's_chunks="{scratch}">'
        )
        for number, ((send, recv, channel), steps) in enumerate(blocks):
            lines.append(f'    <tb id="{number}" send="{send}" recv="{recv}" chan="{channel}">')
            lines += [_line(step) for step in steps]
            lines.append("    </tb>")
        lines.append("  </gpu>")
    text = "\n".join([*lines, "</algo>"]) + "\n"
    proved(parse(text.encode(), known.label))
    return text


Local = tuple[str, Message | None, list[Chunk], list[Chunk]]  # kind, message, sources, targets


def _locate(steps: Iterable[tuple[Any, Message | None]], here: _Chunks) -> list[Local]:
    """Return a rank's sends, receives, reductions and copies with the chunks of their blocks."""
    found: list[Local] = []
    for step, message in steps:
        if isinstance(step, Copy):
            sources = [here.where[step.source, b] for b in block_tuple(step.source_blocks)]
            targets = [here.write((step.target, b)) for b in block_tuple(step.target_blocks)]
            found.append(("cpy", None, sources, targets))
            continue
        assert message is not None
        places = [(step.buffer, b) for b in block_tuple(step.blocks)]
        if isinstance(step, Send):
            message.sent = [here.where[place] for place in places]
            found.append(("s", message, message.sent, []))
            continue
        reduces = isinstance(step, Reduce)
        message.own = [here.where[place] for place in places] if reduces else []
        message.written = [here.write(place) for place in places]
        found.append(("rrc" if reduces else "r", message, message.own, message.written))
    missing = [b for b in here.results if here.where["out", b] != here.home(("out", b))]
    sources = [here.where["out", b] for b in missing]
    found.append(("cpy", None, sources, [here.home(("out", b)) for b in missing]))
    return found


def _runs(*columns: list[Chunk]) -> list[tuple[int, int]]:
    """Return starts and lengths of the parts in which all columns have neighbouring chunks."""
    filled = [column for column in columns if column]
    runs: list[tuple[int, int]] = []
    for k, row in enumerate(zip(*filled)):
        if runs and runs[-1][1] < _COUNT:
            start, length = runs[-1]
            first = [column[start] for column in filled]
            if all(now == (was[0], was[1] + length) for now, was in zip(row, first)):
                runs[-1] = (start, length + 1)
                continue
        runs.append((k, 1))
    return runs


Peers = tuple[int, int, int]  # of a thread block: send, recv, channel
End = tuple[bool, int, int]  # of a message: whether it is sent, peer, channel
Block = tuple[Peers, list[Step]]


def _thread_blocks(parts: list[Local], here: _Chunks) -> list[Block]:
    """Return the thread blocks of a rank."""
    ends, numbers = _peers(parts)
    steps: list[list[Step]] = [[] for _ in ends]
    writers: dict[Chunk, Step] = {}
    readers: dict[Chunk, list[Step]] = defaultdict(list)
    seen: dict[Step, dict[int, int]] = {}  # the steps of other thread blocks that are before
    for kind, message, sources, targets in parts:
        columns: tuple[list[Chunk], ...] = (sources, targets)
        if message is not None:
            columns = (message.sent, message.own, message.written)
        for start, count in _runs(*columns):
            source = sources[start] if sources else targets[start]
            target = targets[start] if targets else source
            if kind == "cpy" and source == target:
                continue
            end: End | None = None
            if message is not None:
                peer = message.target if kind == "s" else message.source
                end = (kind == "s", peer, message.channel)
            block = steps[numbers[end]]
            step = Step(kind, source, target, count, numbers[end])
            reads = (
                [here.alias((source[0], source[1] + k)) for k in range(count)] if sources else []
            )
            writes = (
                [here.alias((target[0], target[1] + k)) for k in range(count)] if targets else []
            )
            if reads == writes and kind == "cpy":
                writes = []  # in place it changes nothing, and out of place it is last
            before = [writers[c] for c in (*reads, *writes) if c in writers]
            before += [s for c in writes for s in readers[c]]
            last = block[-1] if block else None
            known = dict(seen[last]) if last is not None else {}
            if last is not None:
                known[step.block] = last.number
            # What was just received, and is sent on at once, is one step.
            if kind == "s" and last is not None and _sent_on(last, source, count, before):
                last.kind += "cs" if last.kind == "r" else "s"
                for chunk in reads:
                    readers[chunk].append(last)
                continue
            for other in sorted(set(before), key=lambda s: -s.number):
                if known.get(other.block, -1) < other.number:
                    step.after.append(other)
                    other.awaited = True
                    for where, number in {**seen[other], other.block: other.number}.items():
                        known[where] = max(known.get(where, -1), number)
            step.number = len(block)
            seen[step] = known
            block.append(step)
            for chunk in reads:
                readers[chunk].append(step)
            for chunk in writes:
                writers[chunk] = step
                readers[chunk] = []
    for part in steps:
        number = -1
        for step in part:
            number += max(
                1, len(step.after)
            )  # a step waits for one: before it is a nop for each other
            step.number = number
    return list(zip(ends, steps))


def _sent_on(last: Step, source: Chunk, count: int, before: list[Step]) -> bool:
    """Return whether a send of these chunks is of what `last` received, and waits for it alone."""
    received = last.kind in ("r", "rrc") and (last.target, last.count) == (source, count)
    return received and set(before) <= {last}


def _peers(parts: list[Local]) -> tuple[list[Peers], dict[End | None, int]]:
    """Return the thread blocks' peers, and the number of that of each end of a message.

    The peers of a channel to which a rank sends, and from which it receives, are paired in the
    order of their first messages; None has the copies.
    """
    sends: dict[int, dict[int, None]] = defaultdict(dict)
    receives: dict[int, dict[int, None]] = defaultdict(dict)
    for kind, message, _, _ in parts:
        if message is not None and kind == "s":
            sends[message.channel][message.target] = None
        elif message is not None:
            receives[message.channel][message.source] = None
    peers: list[Peers] = []
    numbers: dict[End | None, int] = {}
    for channel in sorted({*sends, *receives}):
        for send, recv in zip_longest(sends[channel], receives[channel], fillvalue=-1):
            numbers[True, send, channel] = numbers[False, recv, channel] = len(peers)
            peers.append((send, recv, channel))
    if any(message is None and sources for _, message, sources, _ in parts):
        numbers[None] = len(peers)
        peers.append((-1, -1, 0))
    return peers, numbers


def _line(step: Step) -> str:
    """Return the line of a step, after those of the nops that wait for all but its last."""
    others, last = step.after[:-1], step.after[-1] if step.after else None
    first = step.number - len(others)
    lines = [
        _element(first + k, "nop", _NO_CHUNK, _NO_CHUNK, 0, other, False)
        for k, other in enumerate(others)
    ]
    own = _element(step.number, step.kind, step.source, step.target, step.count, last, step.awaited)
    return "\n".join([*lines, own])


def _element(
    number: int, kind: str, source: Chunk, target: Chunk, count: int, after: Step | None, told: bool
) -> str:
    block, step = (-1, -1) if after is None else (after.block, after.number)
    return (
        f'      <step s="{number}" type="{kind}" srcbuf="{source[0]}" srcoff="{source[1]}" '
        f'dstbuf="{target[0]}" dstoff="{target[1]}" cnt="{count}" '
        f'depid="{block}" deps="{step}" hasdep="{int(told)}"/>'
    )


def _check_limits(label: str, gpus: list[list[Block]], channels: int) -> None:
    """Raise Unsupported if RCCL would not load the file."""
    longest = max((part[-1].number + 1 for gpu in gpus for _, part in gpu if part), default=0)
    for number, most, what in (
        (longest, _STEPS, "steps in a thread block"),
        (max(map(len, gpus)), _BLOCKS, "thread blocks on a GPU"),
        (channels, _CHANNELS, "channels"),
    ):
        if number > most:
            raise Unsupported(
                f"{label} on {counted(len(gpus), 'rank')}: {number} {what}: RCCL has at most {most}"
            )
