"""Written schedules over NCCL's messages: each round is a group, arithmetic is queued after it.

A message of NCCL waits until its other end is in a group that is under way, so a schedule that
sends in one round what is received in a later one, which MPI would keep meanwhile, cannot run.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Any

from ..call import Call
from ..device.array import DeviceArray
from ..device.recognise import make_like
from ..errors import Unsupported
from ..operations import divides_first, is_mean
from ..plan import Lengths, Strands, Written, materialise
from ..schedule.contract import COLLECTIVES
from ..schedule.registry import Choice, Groups
from ..schedule.rounds import Copy, Recv, Reduce, Send, Step, block_tuple
from ..storage import Piece, Storage, merge, merge_rows
from .nccl import NcclBackend
from .rendezvous import why_stuck


class DeviceStorage(Storage):
    """Where each block lies, in memory of the device."""

    like: DeviceArray
    made: list[Any]

    def allocate(self, count: int) -> Any:
        """Make scratch memory; it must live until what is queued on it is done."""
        self.made.append(make_like(self.like, (count,), self.dtype))
        return self.made[-1]

    def left(self) -> list[tuple[Piece, Piece]]:
        """Give what the schedule left elsewhere than in the result, with its place there."""
        homes = ((self._homes.get(("out", b)), self.where.get(("out", b))) for b in self.results)
        pairs = [(home, now) for home, now in homes if home is not None and now is not None]
        return [pair for pair in pairs if pointer(pair[0]) != pointer(pair[1])]


def pointer(piece: Piece) -> int:
    """Give the address of a piece."""
    array: Any = piece[0]
    return array.pointer + piece[1] * array.dtype.itemsize


class NcclRounds:
    """Runs schedules on one communicator of NCCL.

    Parameters
    ----------
    backend : NcclBackend
        Over the ranks.
    groups : tuple of tuple of int
        Which of them share a node.
    """

    def __init__(self, backend: NcclBackend, groups: Groups):
        self._backend, self._groups = backend, groups
        self._checked: dict[Any, str | None] = {}

    def check(self, call: Call, choice: Choice, arity: int) -> None:
        """Raise Unsupported, the same on every rank, if the schedule would wait for itself."""
        algorithm, key = choice.algorithm, (choice.algorithm, call.size, call.root, arity)
        if key not in self._checked:
            every = [
                materialise(algorithm.schedule(r, call.size, call.root, arity, self._groups))
                for r in range(call.size)
            ]
            self._checked[key] = why_stuck(every)
        stuck = self._checked[key]
        if stuck is not None:
            raise Unsupported(
                f"rank {call.rank}: {call.collective} {choice.name!r}: NCCL keeps no messages: "
                f"{stuck}; MPIDIST_GPU=staged runs it through the host"
            )

    def queue(self, call: Call, choice: Choice, arity: int, stream: int) -> list[Any]:
        """Queue a call that was checked; give the memory that must outlive it."""
        algorithm = choice.algorithm
        count = algorithm.block_count(call.size, groups=self._groups)
        if call.counts:
            each = count // call.size
            lengths = Lengths.per_rank(call.counts, call.out_counts, each, 1)
        else:
            lengths = Lengths.even(call.count, count, 1)
        schedule = algorithm.schedule(call.rank, call.size, call.root, arity, self._groups)
        written = materialise(schedule)
        out = call.out
        if call.collective == "broadcast" and call.rank == call.root and call.in_place:
            out = None  # the root's array is read, whatever the schedule brings back to it
        place = call.rank, call.size, call.root
        contract = COLLECTIVES[call.collective]
        like, x = call.out if call.x is None else call.x, call.x
        assert isinstance(like, DeviceArray)
        made: list[Any] = []
        if call.collective == "alltoall" and call.in_place:  # every part is sent and received
            x = make_like(like, like.shape, call.dtype)
            self._backend.device.copy(x.pointer, like.pointer, like.nbytes, stream)
            made.append(x)
        if divides_first(call.op, call.dtype) and x.size:
            x = make_like(like, like.shape, call.dtype)
            here, there = [call.x.pointer], [x.pointer]
            device = self._backend.device
            device.combine("sum", call.dtype, here, there, x.size, call.size, stream)
            made.append(x)
        storage = DeviceStorage(contract, place, lengths, x, out, call.dtype)
        storage.like, storage.made = like, made
        storage.prepare(written)
        _Run(self._backend, storage, call, stream).strand(written)
        return storage.made


class _Run:
    """One call."""

    def __init__(self, backend: NcclBackend, storage: DeviceStorage, call: Call, stream: int):
        self._backend, self._device, self._storage = backend, backend.device, storage
        self._call, self._stream = call, stream
        self._item = call.dtype.itemsize

    def strand(self, written: Written) -> None:
        """Queue a whole schedule, and bring the result to its place."""
        self._rounds(written)
        for home, now in merge_rows(self._storage.left()):
            self._copy(home, now)
        call, out = self._call, self._call.out
        if divides_first(call.op, call.dtype):
            return
        if is_mean(call.op) and out is not None and out.size:
            here = [out.pointer]
            self._device.combine("sum", call.dtype, here, here, out.size, call.size, self._stream)

    def _rounds(self, written: Written) -> None:
        for item in written:
            if isinstance(item, Strands):
                for one in item.strands:  # one after another, the same on every rank
                    self._rounds(one)
            else:
                self._round(item)

    def _round(self, steps: tuple[Step, ...]) -> None:
        sends = [(s.peer, self._packed(s)) for s in steps if isinstance(s, Send)]
        receives: list[tuple[int, DeviceArray]] = []
        after: list[Any] = []
        for step in steps:
            if isinstance(step, Recv):
                pieces = merge([self._storage.write(p) for p in _places(step)])
                landing = self._one(pieces)
                receives.append((step.peer, landing))
                if len(pieces) > 1:
                    after += [(self._copy, *pair) for pair in _beside(pieces, landing)]
            elif isinstance(step, Reduce):
                after += self._reduce(step, receives)
            elif isinstance(step, Copy):
                sources = [(step.source, b) for b in block_tuple(step.source_blocks)]
                targets = [(step.target, b) for b in block_tuple(step.target_blocks)]
                apart = set(sources).isdisjoint(targets)
                held = [self._storage.read(place) for place in sources]
                homes = [self._storage.write(place) for place in targets]
                after.append((self._copies, homes, held, apart))
        with self._backend.group():
            for peer, data in sends:
                if data.size:
                    self._backend.send(data, peer, self._stream)
            for peer, data in receives:
                if data.size:
                    self._backend.recv(data, peer, self._stream)
        for act, *arguments in after:
            act(*arguments)

    def _packed(self, step: Send) -> DeviceArray:
        """Give what is sent in one piece: the old value, for nothing is stored before that."""
        pieces = merge([self._storage.read(place) for place in _places(step)])
        data = self._one(pieces)
        if len(pieces) > 1:
            for piece, there in _beside(pieces, data):
                self._copy(there, piece)
        return data

    def _one(self, pieces: Sequence[Piece]) -> DeviceArray:
        """Give the only piece, or scratch memory for all of them."""
        if len(pieces) == 1:
            array: Any = pieces[0][0]
            return array.part(pieces[0][1], pieces[0][2])
        return self._storage.allocate(sum(stop - start for _, start, stop in pieces))

    def _reduce(self, step: Reduce, receives: list[tuple[int, DeviceArray]]) -> list[Any]:
        own = [self._storage.read(place) for place in _places(step)]
        landing = self._storage.allocate(sum(stop - start for _, start, stop in own))
        receives.append((step.peer, landing))
        theirs = [there for _, there in _beside(own, landing)]
        targets = [self._storage.write(place) for place in _places(step)]
        rows = merge_rows(list(zip(own, theirs, targets)))
        lower = step.peer < self._call.rank
        return [(self._fold, lower, *row) for row in rows]

    def _fold(self, lower: bool, mine: Piece, theirs: Piece, target: Piece) -> None:
        operands = (theirs, mine) if lower else (mine, theirs)
        op, count = self._call.op, mine[2] - mine[1]
        assert op is not None
        sources = [pointer(operand) for operand in operands]
        name = "sum" if op.name == "mean" else op.name
        self._device.combine(
            name, self._call.dtype, sources, [pointer(target)], count, 1, self._stream
        )

    def _copies(self, targets: list[Piece], sources: list[Piece], apart: bool) -> None:
        """Copy blocks; where they may lie over each other, all are read before one is written."""
        if not apart:
            aside = self._storage.allocate(sum(stop - start for _, start, stop in sources))
            held = [there for _, there in _beside(sources, aside)]
            for there, source in zip(held, sources):
                self._copy(there, source)
            sources = held
        for target, source in zip(targets, sources):
            self._copy(target, source)

    def _copy(self, target: Piece, source: Piece) -> None:
        nbytes = (source[2] - source[1]) * self._item
        if nbytes and pointer(target) != pointer(source):
            self._device.copy(pointer(target), pointer(source), nbytes, self._stream)


def _places(step: Send | Recv | Reduce) -> list[tuple[str, int]]:
    return [(step.buffer, block) for block in block_tuple(step.blocks)]


def _beside(pieces: Sequence[Piece], whole: Any) -> list[tuple[Piece, Piece]]:
    """Pair pieces with those of one array that holds them all, in this order."""
    starts = [0]
    for _, start, stop in pieces:
        starts.append(starts[-1] + stop - start)
    return [(piece, (whole, *span)) for piece, span in zip(pieces, pairwise(starts))]
