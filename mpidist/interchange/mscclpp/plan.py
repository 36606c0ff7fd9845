"""MSCCL++'s execution plans: JSON files of operations by GPU and thread block, read.

They are what ``python/mscclpp/language`` of microsoft/mscclpp writes and its executor runs.  The
numbers of channels, remote buffers and semaphores in an operation count those of its thread block,
which lists those of its GPU.
"""

from __future__ import annotations

import os
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, Literal

from ...errors import InvalidArgument, Unsupported
from ...foreign import read_file, read_json, shown, typed

LONGEST = 64 << 20  # bytes of a file
MOST_CHUNKS = 1 << 15  # of a buffer
MOST_GPUS = 1 << 10
MOST_BLOCKS = 1 << 12  # thread blocks of all GPUs
MOST_USES = 1 << 18  # chunks and words of all GPUs and operations: a proof takes some 20 s
COLLECTIVES = {
    "allreduce": "allreduce",
    "allgather": "allgather",
    "alltoall": "alltoall",
    "reducescatter": "reduce_scatter",
}
"""Our collective for each value of ``collective``."""
BUFFERS = {"i": "input", "o": "output", "s": "scratch"}
CHANNELS = ("memory", "port")
# Operations by what they take: a number of local or remote places to read, and to write.
MOVES = {
    "copy": ("local", "local"),
    "put": ("local", "remote"),
    "pws": ("local", "remote"),
    "pwsf": ("local", "remote"),
    "get": ("remote", "local"),
}
REDUCTIONS = {  # what is behind the first operand and the first target, which are local
    "re": ("local", "none"),
    "res": ("local", "remote"),
    "rre": ("remote", "none"),
    "rres": ("remote", "remote"),
}
WORDS = ("signal", "wait", "rlxsignal", "rlxwait", "flush")
SEMAPHORES = ("sem_acquire", "sem_release")
KNOWN = (*MOVES, *REDUCTIONS, *WORDS, *SEMAPHORES, "barrier", "nop")
PACKETS = ("ppkt", "rppkt", "respkt", "cpkt", "upkt", "repkt", "recpkt", "recspkt", "gstorepkt")
NOT_MODELLED = {
    **dict.fromkeys(PACKETS, "packets (LL)"),
    **dict.fromkeys(("glre", "glres", "gstore"), "switch channels"),
    "pipeline": "loops",
}


@dataclass(slots=True)
class Reference:
    """Chunks of a buffer: a local one by `type`, a remote one by `buffer_id`."""

    index: int
    size: int
    type: Literal["i", "o", "s"] | None = None
    buffer_id: int | None = None
    switch_channel_id: int | None = None


@dataclass(slots=True)
class Operation:
    """An operation of a thread block, as the file has it."""

    name: str
    src_buff: list[Reference] = field(default_factory=list)
    dst_buff: list[Reference] = field(default_factory=list)
    channel_ids: list[int] = field(default_factory=list)
    channel_type: str = "none"
    reduce_op: Literal["sum", "min", "max"] = "sum"
    barrier_id: int = 0
    num_threadblocks: int = 0
    semaphore_ids: list[int] = field(default_factory=list)
    tbg_info: Any = None


@dataclass(slots=True)
class TypedChannels:
    """The channels of one type of a thread block, as numbers of those of its GPU."""

    channel_type: str
    channel_ids: list[int]
    buff: Any = None


@dataclass(slots=True)
class BufferReferences:
    """The remote buffers that a thread block reaches by one type of channel."""

    access_channel_type: str
    remote_buffer_ids: list[int]


@dataclass(slots=True)
class ThreadBlock:
    """A thread block of a GPU; `ops` are read one by one, so that errors name them."""

    id: int
    ops: list[dict[str, Any]]
    channels: list[TypedChannels]
    remote_buffer_refs: list[BufferReferences] = field(default_factory=list)


@dataclass(slots=True)
class Connections:
    """The channels of one type of a GPU: the peer of each."""

    channel_type: str
    connected_to: list[int] = field(default_factory=list)
    buffer_type: Any = None
    rank_groups: Any = None


@dataclass(slots=True)
class RemoteBuffer:
    """A buffer of another GPU."""

    rank: int
    type: Literal["i", "o", "s"]
    access_channel_types: list[str]


@dataclass(slots=True)
class Semaphore:
    """A semaphore of a GPU's thread blocks."""

    init_value: int


@dataclass(slots=True)
class Gpu:
    """A GPU: the chunks of its buffers, its thread blocks, and what they reach."""

    id: int
    input_chunks: int
    output_chunks: int
    scratch_chunks: int
    threadblocks: list[ThreadBlock]
    channels: list[Connections]
    remote_buffers: list[RemoteBuffer]
    semaphores: list[Semaphore] = field(default_factory=list)


@dataclass(slots=True)
class _File:
    name: str
    collective: str
    protocol: str
    inplace: bool
    gpus: list[Gpu]
    reuse_resources: bool = False
    use_double_scratch_buffer: bool = False
    # How it is launched, and for which calls: nothing that a proof is about.
    num_threads_per_block: Any = None
    buffer_alignment: Any = None
    min_message_size: Any = None
    max_message_size: Any = None


@dataclass(frozen=True, slots=True)
class Place:
    """Chunks of a buffer ("i", "o" or "s") of a GPU, from `index` on."""

    gpu: int
    buffer: str
    index: int
    size: int


@dataclass(frozen=True, slots=True)
class End:
    """One end of a channel: its type, the GPU at the other end, and its number among theirs.

    The n-th channel of GPU a to GPU b is the n-th one of b to a.  `own` is its number on its GPU.
    """

    type: str
    peer: int
    number: int
    own: int


@dataclass(frozen=True, slots=True)
class Op:
    """An operation with its places and ends of channels; `number` counts those of its thread block.

    `ids` are those of the barrier or of semaphores.
    """

    number: int
    name: str
    sources: tuple[Place, ...] = ()
    targets: tuple[Place, ...] = ()
    ends: tuple[End, ...] = ()
    ids: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class Plan:
    """A plan that was read.

    Attributes
    ----------
    what, name : str
        The path of the file, and the name in it.
    collective : str
        The collective of mpidist that it is for.
    inplace : bool
        Whether input and output are one buffer.
    double_scratch : bool
        Whether two halves of scratch memory take turns, launch by launch.
    chunks : int
        The number of chunks that the data are cut into.
    scratch : int
        The most scratch chunks of a GPU.
    gpus : tuple
        The operations by GPU and thread block.
    """

    what: str
    name: str
    collective: str
    inplace: bool
    double_scratch: bool
    chunks: int
    scratch: int
    gpus: tuple[tuple[tuple[Op, ...], ...], ...]

    def operations(self) -> Iterator[tuple[int, int, Op]]:
        """Yield all operations with the numbers of their GPU and thread block."""
        for g, blocks in enumerate(self.gpus):
            for t, ops in enumerate(blocks):
                for op in ops:
                    yield g, t, op


def read_plan(path: str | os.PathLike) -> Plan:
    """Return the plan of a file.

    Parameters
    ----------
    path : str or path
        A JSON file that MSCCL++'s language wrote.

    Returns
    -------
    Plan
        The operations, with the places and the channels that they name.

    Raises
    ------
    InvalidArgument
        If it is no plan; the message has GPU, thread block, operation and value.
    Unsupported
        If something in it is not modelled, such as packets; the message names it.

    Examples
    --------
    >>> from mpidist.interchange.mscclpp.kernels import prove_plan
    >>> prove_plan(read_plan("pair.json")).messages  # doctest: +SKIP
    8
    """
    what = os.fspath(path)
    try:
        text = read_file(path, longest=LONGEST)
    except OSError as error:
        raise InvalidArgument(f"{what}: {error.strerror or error}") from None
    return _Reader(what, read_json(text, what, _File, longest=LONGEST)).plan()


class _Reader:
    """What makes a :class:`Plan` of a file."""

    def __init__(self, what: str, file: _File):
        self.what, self.file, self.uses = what, file, 0
        self.reduce_op = ""  # of all operations, and
        self.reduces = ""  # the first one that has it

    def plan(self) -> Plan:
        file = self.file
        if file.collective not in COLLECTIVES:
            raise Unsupported(
                f"{self.what}: collective {shown(file.collective[:40])!r}: expected "
                f"{', '.join(COLLECTIVES)}"
            )
        if file.reuse_resources:
            raise Unsupported(f"{self.what}: reuse_resources is not modelled: expected false")
        if file.protocol == "LL":
            raise Unsupported(
                f"{self.what}: protocol 'LL': packets (LL) are not modelled: expected Simple"
            )
        if file.protocol != "Simple":
            raise InvalidArgument(
                f"{self.what}: protocol {shown(file.protocol[:40])!r}: expected Simple or LL"
            )
        if not file.gpus:
            raise InvalidArgument(f"{self.what}: no gpus: expected at least one")
        if len(file.gpus) > MOST_GPUS:
            raise Unsupported(f"{self.what}: {len(file.gpus)} GPUs: expected up to {MOST_GPUS}")
        blocks = sum(len(gpu.threadblocks) for gpu in file.gpus)
        if blocks > MOST_BLOCKS:
            raise Unsupported(f"{self.what}: {blocks} thread blocks: expected up to {MOST_BLOCKS}")
        chunks = self._chunks()
        self.ends = [self._connected(gpu) for gpu in file.gpus]
        gpus = tuple(
            tuple(self._block(g, t, block) for t, block in enumerate(gpu.threadblocks))
            for g, gpu in enumerate(file.gpus)
        )
        self._check_barriers(gpus)
        scratch = max(gpu.scratch_chunks for gpu in file.gpus)
        name = shown(" ".join(file.name.split())[:80])
        collective, double = COLLECTIVES[file.collective], file.use_double_scratch_buffer
        return Plan(self.what, name, collective, file.inplace, double, chunks, scratch, gpus)

    def _chunks(self) -> int:
        """Return the number of chunks of the data; raise if the buffers do not fit it."""
        gpus, size = self.file.gpus, len(self.file.gpus)
        for g, gpu in enumerate(gpus):
            where = f"{self.what}: GPU {g}"
            if gpu.id != g:
                raise InvalidArgument(f"{where}: id {gpu.id}: expected {g}")
            lengths = (gpu.input_chunks, gpu.output_chunks, gpu.scratch_chunks)
            if not all(0 <= length <= MOST_CHUNKS for length in lengths):
                raise InvalidArgument(f"{where}: chunks {lengths}: expected 0 … {MOST_CHUNKS}")
            for s, semaphore in enumerate(gpu.semaphores):
                if semaphore.init_value:
                    raise Unsupported(
                        f"{where}, semaphore {s}: init_value {semaphore.init_value} is not "
                        "modelled: expected 0"
                    )
            wide, narrow = gpu.input_chunks, gpu.output_chunks
            self._use(wide + narrow, where)  # callers write and read them all
            if self.file.collective == "allgather":
                wide, narrow = narrow, wide
            each = 1 if self.file.collective in ("allreduce", "alltoall") else size
            several = size if self.file.collective != "allreduce" else 1
            first = max(gpus[0].input_chunks, gpus[0].output_chunks)
            if not wide or wide != narrow * each or wide % several or wide != first:
                raise InvalidArgument(
                    f"{where}: input_chunks {gpu.input_chunks} and output_chunks "
                    f"{gpu.output_chunks} are not those of {self.file.collective} on {size} GPUs"
                )
        return max(gpus[0].input_chunks, gpus[0].output_chunks)

    def _connected(self, gpu: Gpu) -> dict[str, list[End]]:
        """Return the ends of a GPU's channels by type."""
        ends: dict[str, list[End]] = {name: [] for name in CHANNELS}
        counts: dict[tuple[str, int], int] = defaultdict(int)
        for channels in gpu.channels:
            kind, where = channels.channel_type, f"{self.what}: GPU {gpu.id}"
            self._check_kind(kind, where)
            for peer in channels.connected_to:
                if not 0 <= peer < len(self.file.gpus) or peer == gpu.id:
                    raise InvalidArgument(f"{where}: a channel to GPU {peer}: expected another one")
                ends[kind].append(End(kind, peer, counts[kind, peer], len(ends[kind])))
                counts[kind, peer] += 1
        for k, buffer in enumerate(gpu.remote_buffers):
            where = f"{self.what}: GPU {gpu.id}, remote buffer {k}"
            if not buffer.access_channel_types:
                raise InvalidArgument(
                    f"{where}: access_channel_types []: expected {' or '.join(CHANNELS)}"
                )
            for kind in buffer.access_channel_types:
                self._check_kind(kind, where)
        return ends

    def _check_kind(self, kind: str, where: str) -> None:
        if kind not in CHANNELS:
            raise Unsupported(
                f"{where}: {shown(kind[:40])!r} channels are not modelled: expected "
                f"{' or '.join(CHANNELS)}"
            )

    def _block(self, g: int, t: int, block: ThreadBlock) -> tuple[Op, ...]:
        where = f"{self.what}: GPU {g}, thread block {t}"
        if block.id != t:
            raise InvalidArgument(f"{where}: id {block.id}: expected {t}")
        ends: dict[str, list[End]] = {name: [] for name in CHANNELS}
        for channels in block.channels:
            self._check_kind(channels.channel_type, where)
            ends[channels.channel_type] += [
                self._of(self.ends[g][channels.channel_type], k, f"{where}: channel")
                for k in channels.channel_ids
            ]
        buffers: dict[str, list[RemoteBuffer]] = {name: [] for name in CHANNELS}
        for refs in block.remote_buffer_refs:
            kind = refs.access_channel_type
            self._check_kind(kind, where)
            for k in refs.remote_buffer_ids:
                buffer = self._of(self.file.gpus[g].remote_buffers, k, f"{where}: remote buffer")
                if kind not in buffer.access_channel_types:
                    raise InvalidArgument(
                        f"{where}: remote buffer {k} by {kind} channels: expected its "
                        f"access_channel_types, {' or '.join(buffer.access_channel_types)}"
                    )
                buffers[kind].append(buffer)
        found = []
        for number, content in enumerate(block.ops):
            there = f"{where}, operation {number}"
            found.append(self._op(g, number, self._typed(content, there), ends, buffers, there))
        return tuple(found)

    def _typed(self, content: dict[str, Any], where: str) -> Operation:
        name = content.get("name")
        text = name if isinstance(name, str) else ""
        if text in NOT_MODELLED:
            raise Unsupported(f"{where} ({text}): {NOT_MODELLED[text]} are not modelled")
        if text not in KNOWN:
            known = ", ".join(KNOWN)
            raise InvalidArgument(f"{where}: {shown(f'{name!r:.40}')}: expected one of {known}")
        try:
            op: Operation = typed(content, Operation)
        except TypeError as error:
            raise InvalidArgument(f"{where} ({name}): {error}") from None
        if op.tbg_info is not None:
            raise Unsupported(f"{where} ({name}): thread block groups are not modelled")
        return op

    def _of(self, values: list[Any], number: int, where: str) -> Any:
        if not 0 <= number < len(values):
            raise InvalidArgument(f"{where} {number}: expected one of {len(values)}, from 0")
        return values[number]

    def _op(
        self,
        g: int,
        number: int,
        op: Operation,
        ends: dict[str, list[End]],
        buffers: dict[str, list[RemoteBuffer]],
        where: str,
    ) -> Op:
        name, where = op.name, f"{where} ({op.name})"
        words = op.num_threadblocks if name == "barrier" else 1
        self._use(max(1, words, len(op.channel_ids), len(op.semaphore_ids)), where)
        if name == "nop":
            return Op(number, name)
        if name == "barrier":
            return Op(number, name, ids=(op.barrier_id, op.num_threadblocks))
        if name in SEMAPHORES:
            for k in op.semaphore_ids:
                self._of(self.file.gpus[g].semaphores, k, f"{where}: semaphore")
            return Op(number, name, ids=self._distinct(op.semaphore_ids, where))
        kind = op.channel_type
        local = name in ("copy", "re")
        if local and kind not in ("none", "memory"):
            raise InvalidArgument(f"{where}: channel_type {shown(kind[:40])!r}: expected none")
        if not local and kind not in CHANNELS:
            raise InvalidArgument(f"{where}: channel_type {shown(kind[:40])!r}: expected memory")
        port = name in ("pws", "pwsf", "flush")
        if kind == "port" and not (port or name in ("put", "signal", "wait")):
            raise InvalidArgument(f"{where}: channel_type 'port': expected memory")
        if port and kind != "port":
            raise InvalidArgument(f"{where}: channel_type {kind!r}: expected port")
        ids = () if local else op.channel_ids
        own = [self._of(ends[kind], k, f"{where}: channel") for k in ids]
        if name in WORDS:
            self._distinct(op.channel_ids, where)
            return Op(number, name, ends=tuple(own))
        reach = [] if local else buffers[kind]
        sources = tuple(self._place(g, ref, reach, f"{where}: src_buff") for ref in op.src_buff)
        targets = tuple(self._place(g, ref, reach, f"{where}: dst_buff") for ref in op.dst_buff)
        self._check_places(g, name, sources, targets, where)
        if name in REDUCTIONS:
            self.reduce_op, self.reduces = self.reduce_op or op.reduce_op, self.reduces or where
            if op.reduce_op != self.reduce_op:
                raise InvalidArgument(
                    f"{where}: reduce_op {op.reduce_op!r}: expected {self.reduce_op!r}, as of "
                    f"{self.reduces.removeprefix(f'{self.what}: ')}"
                )
        if kind == "port" and [e.peer for e in own] != [place.gpu for place in targets]:
            raise InvalidArgument(f"{where}: channel_ids are not those to the GPUs of dst_buff")
        return Op(number, name, sources, targets, tuple(own) if kind == "port" else ())

    def _distinct(self, ids: list[int], where: str) -> tuple[int, ...]:
        if not ids or len(set(ids)) < len(ids):
            raise InvalidArgument(f"{where}: ids {ids[:9]}: expected different ones")
        return tuple(ids)

    def _place(self, g: int, ref: Reference, remote: list[RemoteBuffer], where: str) -> Place:
        if ref.switch_channel_id is not None:
            raise Unsupported(f"{where}: switch channels are not modelled")
        if (ref.type is None) == (ref.buffer_id is None):
            raise InvalidArgument(f"{where}: expected a type or a buffer_id")
        gpu, buffer = g, ref.type
        if ref.buffer_id is not None:
            found = self._of(remote, ref.buffer_id, f"{where}: remote buffer")
            gpu, buffer = found.rank, found.type
            if not 0 <= gpu < len(self.file.gpus) or gpu == g:
                raise InvalidArgument(f"{where}: a buffer of GPU {gpu}: expected another one")
        assert buffer is not None
        owner = self.file.gpus[gpu]
        lengths = {"i": owner.input_chunks, "o": owner.output_chunks, "s": owner.scratch_chunks}
        if ref.size < 1 or ref.index < 0 or ref.index + ref.size > lengths[buffer]:
            raise InvalidArgument(
                f"{where}: {ref.size} chunks from {ref.index} on: the {BUFFERS[buffer]} of GPU "
                f"{gpu} has {lengths[buffer]}"
            )
        self._use(ref.size, where)
        return Place(gpu, buffer, ref.index, ref.size)

    def _use(self, number: int, where: str) -> None:
        """Count chunks and words; raise if there are too many."""
        self.uses += number
        if self.uses > MOST_USES:
            raise Unsupported(f"{where}: more than {MOST_USES} chunks and words in all")

    def _check_places(
        self, g: int, name: str, sources: tuple[Place, ...], targets: tuple[Place, ...], where: str
    ) -> None:
        """Raise if an operation's places are not as many, as long or where they must be."""
        sides: list[tuple[tuple[Place, ...], str, str]]
        if name in MOVES:
            right = len(sources) == len(targets) > 0 and (name != "copy" or len(sources) == 1)
            sides = [(sources, MOVES[name][0], "src"), (targets, MOVES[name][1], "dst")]
        else:
            more, sent = REDUCTIONS[name]
            right = len(sources) > 1 and len(targets) > 0 and (sent != "none" or len(targets) == 1)
            sides = [(sources[:1], "local", "src"), (targets[:1], "local", "dst")]
            sides += [(sources[1:], more, "src"), (targets[1:], sent, "dst")]
        if not right:
            counts = f"{len(sources)} in src_buff and {len(targets)} in dst_buff"
            raise InvalidArgument(f"{where}: {counts} are not those of a {name}")
        for places, side, buff in sides:
            if any((place.gpu == g) != (side == "local") for place in places):
                raise InvalidArgument(f"{where}: {buff}_buff: expected a {side} buffer")
        pairs = list(zip(sources, targets))
        if name in REDUCTIONS:
            pairs = [(sources[0], place) for place in (*sources, *targets)]
        if any(one.size != other.size for one, other in pairs):
            raise InvalidArgument(f"{where}: unequal sizes: expected one size")
        if not self.file.inplace and any(place.buffer == "i" for place in targets):
            raise InvalidArgument(f"{where}: writes the input, in a plan that is not in place")

    def _check_barriers(self, gpus: tuple[tuple[tuple[Op, ...], ...], ...]) -> None:
        """Raise if a barrier is not for as many thread blocks as come to it, equally often."""
        for g, blocks in enumerate(gpus):
            comes: dict[int, dict[int, list[Op]]] = defaultdict(lambda: defaultdict(list))
            for t, ops in enumerate(blocks):
                for op in ops:
                    if op.name == "barrier":
                        comes[op.ids[0]][t].append(op)
            for number, by_block in comes.items():
                for t, found in by_block.items():
                    for op in found:
                        if op.ids[1] != len(by_block):
                            raise InvalidArgument(
                                f"{self.what}: GPU {g}, thread block {t}, operation {op.number} "
                                f"(barrier): {op.ids[1]} thread blocks, but {len(by_block)} come "
                                f"to barrier {number}"
                            )
