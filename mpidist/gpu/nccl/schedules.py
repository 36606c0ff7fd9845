"""Schedules over NCCL's messages: each round is an NCCL group; arithmetic is queued after it.

NCCL does not buffer messages: a send waits until its receive is in a group in progress.  So a
schedule that sends a message in one round and receives it in a later one cannot run, although MPI
would buffer the message.

Used by :mod:`.executor` for schedules that are requested by name.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from functools import lru_cache, partial
from typing import Any

from ...backends.base import RoundMessage
from ...backends.program import Action, Program, library_call
from ...calls.call import Call
from ...device.array import DeviceArray
from ...device.base import Device
from ...device.recognise import make_like
from ...engine.binding import CallBinder
from ...engine.service import Service
from ...engine.storage import Piece
from ...errors import Unsupported
from ...operations import Op
from ...schedule.registry import Algorithm, Choice, Groups
from ...schedule.rounds import Recv, Reduce, Send, Step
from ...schedule.unrolled import Strands, Written, materialise
from ...selection.segmentation import Segmentation
from .backend import NcclBackend
from .collectives import NcclQueue


def why_stuck(written: Sequence[Written]) -> str | None:
    """Simulate the rounds of all ranks; return which ranks would deadlock, or None.

    A rank's round is complete when each of its messages has met its other end in the peer's current
    round.  Strands, the parts of a schedule that may overlap, run one after another here.
    """
    # rank 0   Send(1) | Recv(1)      stuck: neither reaches the round in which it receives
    # rank 1   Send(0) | Recv(0)
    # rank 0   Send(1), Recv(1)       runs: both ends of each message are in a current round
    # rank 1   Send(0), Recv(0)
    remaining = [deque(_rounds_of(one)) for one in written]
    current = [_next_round(rounds) for rounds in remaining]
    progress = True
    while progress:
        progress = False
        for rank, (sends, _) in enumerate(current):
            for peer in [p for p, n in sends.items() if n]:
                wanted = current[peer][1]
                matched = min(sends[peer], wanted.get(rank, 0))
                if matched:
                    sends[peer] -= matched
                    wanted[rank] -= matched
                    progress = True
        for rank, rounds in enumerate(remaining):
            while not any(any(side.values()) for side in current[rank]) and rounds:
                current[rank] = _next_round(rounds)
                progress = True
    stuck = [rank for rank, sides in enumerate(current) if any(any(s.values()) for s in sides)]
    if not stuck:
        return None
    return f"ranks {', '.join(map(str, stuck))} would wait for each other"


def _rounds_of(written: Written) -> list[tuple[Step, ...]]:
    found: list[tuple[Step, ...]] = []
    for item in written:
        if isinstance(item, Strands):
            for one in item.strands:
                found += _rounds_of(one)
        else:
            found.append(item)
    return found


def _next_round(rounds: deque[tuple[Step, ...]]) -> tuple[dict[int, int], dict[int, int]]:
    """Remove one rank's next round; return its number of sends to, and of receives from, each peer.

    Both are empty if no round is left.
    """
    sends: dict[int, int] = {}
    receives: dict[int, int] = {}
    for step in rounds.popleft() if rounds else ():
        if isinstance(step, (Send, Recv, Reduce)):
            side = sends if isinstance(step, Send) else receives
            side[step.peer] = side.get(step.peer, 0) + 1
    return sends, receives


class StreamMemory:
    """Device memory whose copies and arithmetic are queued on one stream, when an action is called.

    It implements :class:`~mpidist.engine.storage.Memory`.  Scratch memory is allocated by the
    library of the array `like`, with its dtype.
    """

    def __init__(self, like: DeviceArray, stream: int):
        self._like, self._stream, self._device = like, stream, like.device
        self.dtype = like.dtype

    def array(self, data: DeviceArray) -> DeviceArray:
        """Return `data`: arrays on the device are used as they are."""
        return data

    def allocate(self, count: int) -> DeviceArray:
        """Return new memory for `count` elements, which must outlive the queued work."""
        return make_like(self._like, (count,), self.dtype)

    def view(self, piece: Piece) -> DeviceArray:
        """Return the elements of a Piece as an array."""
        return piece[0].part(piece[1], piece[2])

    def address(self, piece: Piece) -> int:
        """Return the address of the first element of a Piece."""
        return piece[0].pointer + piece[1] * self.dtype.itemsize

    def store(self, target: DeviceArray, source: DeviceArray) -> Action:
        """Return the action that queues a copy of `source` to `target`."""
        return partial(self._copy, target, source)

    def combine(self, op: Op, left: DeviceArray, right: DeviceArray, target: DeviceArray) -> Action:
        """Return the action that queues op(left, right) into `target`; for a mean, the sum."""
        name = "sum" if op.name == "mean" else op.name  # divided at the end
        return partial(self._fold, name, (left, right), target, 1)

    def divide(self, source: DeviceArray, target: DeviceArray, divisor: int) -> Action:
        """Return the action that queues source / divisor into `target`, the end of a mean."""
        return partial(self._fold, "sum", (source,), target, divisor)

    def _copy(self, target: DeviceArray, source: DeviceArray) -> None:
        if source.nbytes and target.pointer != source.pointer:
            self._device.copy(target.pointer, source.pointer, source.nbytes, self._stream)

    def _fold(
        self, op: str, sources: tuple[DeviceArray, ...], target: DeviceArray, divisor: int
    ) -> None:
        if target.size:
            pointers = [source.pointer for source in sources]
            self._device.combine(
                op, self.dtype, pointers, [target.pointer], target.size, divisor, self._stream
            )


class MessageGroup:
    """The messages of a round as one NCCL group: a :class:`~mpidist.backends.base.Transfer`.

    Tags are ignored: messages between two ranks match in schedule order.
    """

    def __init__(self, backend: NcclBackend, messages: Sequence[RoundMessage], stream: int):
        self._backend, self._stream = backend, stream
        self._messages = [m for m in messages if m.data.size]

    def start(self) -> None:
        """Queue the group."""
        backend = self._backend
        with backend.group():
            for message in self._messages:
                queue_message = backend.recv if message.incoming else backend.send
                data: Any = message.data
                queue_message(data, message.peer, self._stream)

    def test(self) -> bool:
        """Return True: work that needs the messages is queued after them on the stream."""
        return True


class StreamBackend:
    """NCCL on one stream, as a backend that binds the messages of a round.

    It implements :class:`~mpidist.engine.binding.Bindable`.
    """

    tag_limit = 1 << 31  # there are no tags
    roll_call = None

    def __init__(self, backend: NcclBackend, stream: int):
        self.rank, self._backend, self._stream = backend.rank, backend, stream

    def bind(self, messages: Sequence[RoundMessage]) -> MessageGroup:
        """Return the messages of a round as one NCCL group on this backend's stream."""
        return MessageGroup(self._backend, messages, self._stream)


class WholeBlocks(Segmentation):
    """Segmentation of schedules over NCCL: no block is cut, as parts do not overlap on a stream."""

    def of(
        self, algorithm: Algorithm, size: int, nodes: int, blocks: int, largest: int
    ) -> tuple[int, int]:
        """Return (1, 1): each block is one segment, and one segment is in flight."""
        return 1, 1


class NcclRounds:
    """The schedules that calls name, over NCCL's messages."""

    def __init__(self, service: Service, device: Device):
        self._service, self._device = service, device
        self._binder = CallBinder(service.groups, WholeBlocks())

    def why_not(self, call: Call, background: bool) -> str | None:
        """Return why no schedule can serve a call, or None if one can."""
        if background:
            return "NCCL runs schedules in blocking calls only"
        if call.op is None or (call.op.builtin and self._device.combines(call.dtype)):
            return None
        return f"the device has no {call.op.name!r} of {call.dtype}"

    def program(self, call: Call, choice: Choice, queue: NcclQueue) -> Program:
        """Return the program that queues the rounds of a schedule.

        Raises Unsupported on every rank, if it would deadlock without buffered messages.
        """
        arity = choice.arity or self._service.arity
        stuck = _why_stuck(choice.algorithm, call.size, call.root, arity, self._service.groups)
        if stuck is not None:
            raise Unsupported(
                f"rank {call.rank}: {call.collective} {choice.name!r}: NCCL does not buffer "
                f"messages: {stuck}; MPIDIST_GPU=staged runs it through the host"
            )
        timeout = self._service.sequencer.timeout

        def put(call: Call, stream: int) -> list[Any]:
            backend = StreamBackend(queue.backend, stream)
            memory = StreamMemory(call.out if call.x is None else call.x, stream)
            program = self._binder.program(backend, memory, call, choice, arity)
            self._service.sequencer.engine.run(program, None)
            return [program]  # it holds the memory that must outlive the queued work

        return library_call(lambda: queue.serve(call, timeout, put))


@lru_cache(maxsize=256)
def _why_stuck(
    algorithm: Algorithm, size: int, root: int, arity: int, groups: Groups
) -> str | None:
    """Return which ranks of an algorithm would deadlock over NCCL, or None if none; cached."""
    return why_stuck(
        [materialise(algorithm.schedule(r, size, root, arity, groups)) for r in range(size)]
    )
