"""Written schedules over NCCL: the messages of a round are a group, arithmetic is queued after it.

A message of NCCL waits until its other end is in a group that is under way, so a schedule that
sends in one round what is received in a later one, which MPI would keep meanwhile, cannot run.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache, partial
from typing import Any

from ..backends.base import Message
from ..binding import CallBinder
from ..call import Call
from ..device.array import DeviceArray
from ..device.recognise import make_like
from ..engine import Engine
from ..errors import Unsupported
from ..operations import Op
from ..pipelining import Pipelining
from ..plan import materialise
from ..schedule.registry import Algorithm, Choice, Groups
from ..storage import Action, Piece
from .nccl import NcclBackend
from .rendezvous import why_stuck


class StreamMemory:
    """Memory of a device, in which everything is queued on one stream.

    See :class:`~mpidist.storage.Memory`.

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
        pointers, count = [source.pointer for source in sources], target.size
        self._device.combine(
            op, self.dtype, pointers, [target.pointer], count, divisor, self._stream
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

    See :class:`~mpidist.binding.Bindable`.
    """

    tag_limit = 1 << 31  # there are no tags

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


class NcclRounds:
    """Runs schedules on one communicator of NCCL.

    Parameters
    ----------
    backend : NcclBackend
        Over the ranks.
    groups : tuple of tuple of int
        Which of them share a node.
    engine : Engine
        What runs the programs.
    """

    def __init__(self, backend: NcclBackend, groups: Groups, engine: Engine):
        self._backend, self._groups, self._engine = backend, groups, engine
        self._binder = CallBinder(groups, WholeBlocks())

    def check(self, call: Call, choice: Choice, arity: int) -> None:
        """Raise Unsupported, the same on every rank, if the schedule would wait for itself."""
        stuck = _why_stuck(choice.algorithm, call.size, call.root, arity, self._groups)
        if stuck is not None:
            raise Unsupported(
                f"rank {call.rank}: {call.collective} {choice.name!r}: NCCL keeps no messages: "
                f"{stuck}; MPIDIST_GPU=staged runs it through the host"
            )

    def queue(self, call: Call, choice: Choice, arity: int, stream: int) -> list[Any]:
        """Queue a call that was checked; return what must outlive it."""
        backend = StreamBackend(self._backend, stream)
        memory = StreamMemory(call.out if call.x is None else call.x, stream)
        program = self._binder.program(backend, memory, call, choice, arity)
        self._engine.run(program, None)
        return [program]


@lru_cache(maxsize=256)
def _why_stuck(
    algorithm: Algorithm, size: int, root: int, arity: int, groups: Groups
) -> str | None:
    """Return which ranks would wait for each other, or None."""
    return why_stuck(
        [materialise(algorithm.schedule(r, size, root, arity, groups)) for r in range(size)]
    )
