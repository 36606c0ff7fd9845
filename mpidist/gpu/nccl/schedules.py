"""Written schedules over NCCL: the messages of a round are a group, arithmetic is queued after it.

A message of NCCL waits until its other end is in a group that is under way, so a schedule that
sends in one round what is received in a later one, which MPI would keep meanwhile, cannot run.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from functools import lru_cache, partial
from typing import Any

from ...backends.base import Message
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
from ...schedule.registry import RESERVED, Algorithm, Choice, Groups
from ...schedule.rounds import Copy, Send, Step
from ...schedule.unrolled import Strands, Written, materialise
from ...selection.segmentation import Pipelining
from ..executor import GpuExecutor
from .backend import NcclBackend
from .collectives import Nccl


def why_stuck(written: Sequence[Written]) -> str | None:
    """Play the rounds of all ranks; say which ranks would wait for ever, or give None.

    A round is over when each of its messages has met its other end; strands go one after another.

    Parameters
    ----------
    written : sequence
        The schedule of every rank.
    """
    left = [deque(_flat(one)) for one in written]
    now = [_open(rounds) for rounds in left]
    moved = True
    while moved:
        moved = False
        for rank, (sends, _) in enumerate(now):
            for peer in [p for p, n in sends.items() if n]:
                wanted = now[peer][1]
                met = min(sends[peer], wanted.get(rank, 0))
                if met:
                    sends[peer] -= met
                    wanted[rank] -= met
                    moved = True
        for rank, rounds in enumerate(left):
            while not any(any(side.values()) for side in now[rank]) and rounds:
                now[rank] = _open(rounds)
                moved = True
    stuck = [rank for rank, sides in enumerate(now) if any(any(s.values()) for s in sides)]
    if not stuck:
        return None
    return f"ranks {', '.join(map(str, stuck))} would wait for each other"


def _flat(written: Written) -> list[tuple[Step, ...]]:
    found: list[tuple[Step, ...]] = []
    for item in written:
        if isinstance(item, Strands):
            for one in item.strands:
                found += _flat(one)
        else:
            found.append(item)
    return found


def _open(rounds: deque[tuple[Step, ...]]) -> tuple[dict[int, int], dict[int, int]]:
    """Take the next round: how many messages go to each rank, and come from each."""
    sends: dict[int, int] = {}
    gets: dict[int, int] = {}
    for step in rounds.popleft() if rounds else ():
        if not isinstance(step, Copy):
            side = sends if isinstance(step, Send) else gets
            side[step.peer] = side.get(step.peer, 0) + 1
    return sends, gets


class StreamMemory:
    """Memory of a device, in which everything is queued on one stream.

    See :class:`~mpidist.engine.storage.Memory`.

    Parameters
    ----------
    like : DeviceArray
        Scratch memory is made by the same library, with the same dtype.
    stream : int
        Where copies and arithmetic are queued.
    """

    def __init__(self, like: DeviceArray, stream: int):
        self._like, self._stream, self._device = like, stream, like.device
        self.dtype = like.dtype

    def array(self, data: DeviceArray) -> DeviceArray:
        """Return the array itself."""
        return data

    def allocate(self, count: int) -> DeviceArray:
        """Return new memory; it must outlive what is queued."""
        return make_like(self._like, (count,), self.dtype)

    def view(self, piece: Piece) -> DeviceArray:
        """Return the elements of a piece."""
        return piece[0].part(piece[1], piece[2])

    def address(self, piece: Piece) -> int:
        """Return the address of the first element."""
        return piece[0].pointer + piece[1] * self.dtype.itemsize

    def store(self, target: DeviceArray, source: DeviceArray) -> Action:
        """Return the action that queues a copy."""
        return partial(self._copy, target, source)

    def combine(self, op: Op, left: DeviceArray, right: DeviceArray, target: DeviceArray) -> Action:
        """Return the action that queues the arithmetic."""
        name = "sum" if op.name == "mean" else op.name  # divided at the end
        return partial(self._fold, name, (left, right), target, 1)

    def divide(self, source: DeviceArray, target: DeviceArray, divisor: int) -> Action:
        """Return the action that queues the division."""
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


class Group:
    """The messages of a round, queued as one group; see :class:`~mpidist.backends.base.Transfer`.

    Parameters
    ----------
    backend : NcclBackend
        What they go by.
    messages : sequence of Message
        Their tags do not count: messages between two ranks match in the order of the schedule.
    stream : int
        Where they are queued.
    """

    def __init__(self, backend: NcclBackend, messages: Sequence[Message], stream: int):
        self._backend, self._stream = backend, stream
        self._messages = [m for m in messages if m.data.size]

    def start(self) -> None:
        """Queue the group."""
        backend = self._backend
        with backend.group():
            for message in self._messages:
                act = backend.recv if message.incoming else backend.send
                data: Any = message.data
                act(data, message.peer, self._stream)

    def test(self) -> bool:
        """Return True: what needs the messages is queued behind them."""
        return True


class StreamBackend:
    """NCCL on one stream, as what binds the messages of a round.

    See :class:`~mpidist.engine.binding.Bindable`.
    """

    tag_limit = 1 << 31  # there are no tags
    roll_call = None

    def __init__(self, backend: NcclBackend, stream: int):
        self.rank, self._backend, self._stream = backend.rank, backend, stream

    def bind(self, messages: Sequence[Message]) -> Group:
        """Return these messages as a group."""
        return Group(self._backend, messages, self._stream)


class WholeBlocks(Pipelining):
    """No segments: strands follow each other on a stream, so that they would not overlap."""

    def of(
        self, algorithm: Algorithm, size: int, nodes: int, blocks: int, largest: int
    ) -> tuple[int, int]:
        """Return one segment, one at a time."""
        return 1, 1


class NcclRounds(GpuExecutor):
    """Schedules that are asked for by name.

    Parameters
    ----------
    service : Service
        Whose engine runs the programs.
    nccl : Nccl
        What the messages go by.
    taken : dict
        The path of each collective of arrays in private memory.
    device : Device
        What combines.
    """

    name = "nccl"

    def __init__(self, service: Service, nccl: Nccl, taken: dict[str, str], device: Device):
        self._service, self._nccl, self._taken, self._device = service, nccl, taken, device
        self._binder = CallBinder(service.groups, WholeBlocks())

    def takes(self, call: Call, algorithm: str, background: bool) -> bool:
        """Return whether a schedule was asked for, blocking; in the background it is staged."""
        named = algorithm not in RESERVED
        return named and self._taken[call.collective] == self.name and not background

    def why_not(self, call: Call, background: bool) -> str | None:
        """Return what the device cannot do."""
        if call.op is None or (call.op.builtin and self._device.combines(call.dtype)):
            return None
        return f"the device has no {call.op.name!r} of {call.dtype}"

    def agreed(self, call: Call, choice: Choice | None) -> str:
        """Return the name of the schedule."""
        assert choice is not None
        return f"by NCCL's messages, {choice.name}"

    def bind(
        self,
        call: Call,
        choice: Choice | None,
        *,
        background: bool = False,
        repeated: bool = False,
        turn: int = 0,
    ) -> Program:
        """Return the program that queues the rounds.

        Raises
        ------
        Unsupported
            The same on every rank, if the schedule would wait for itself.
        """
        assert choice is not None
        arity = choice.arity or self._service.arity
        stuck = _why_stuck(choice.algorithm, call.size, call.root, arity, self._service.groups)
        if stuck is not None:
            raise Unsupported(
                f"rank {call.rank}: {call.collective} {choice.name!r}: NCCL keeps no messages: "
                f"{stuck}; MPIDIST_GPU=staged runs it through the host"
            )
        path, timeout = self._nccl.path, self._service.timeout

        def queue(call: Call, stream: int) -> list[Any]:
            backend = StreamBackend(path.backend, stream)
            memory = StreamMemory(call.out if call.x is None else call.x, stream)
            program = self._binder.program(backend, memory, call, choice, arity)
            self._service.engine.run(program, None)
            return [program]  # it holds the memory that must outlive what is queued

        return library_call(lambda: path.serve(call, timeout, queue))


@lru_cache(maxsize=256)
def _why_stuck(
    algorithm: Algorithm, size: int, root: int, arity: int, groups: Groups
) -> str | None:
    """Return which ranks would wait for each other, or None."""
    return why_stuck(
        [materialise(algorithm.schedule(r, size, root, arity, groups)) for r in range(size)]
    )
