"""The MPI backend: mpi4py point-to-point, persistent requests where a buffer is used again."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any

import numpy as np
from mpi4py import MPI

from ..errors import CollectiveMismatch, CommunicationError
from ..waiting import LOOKS, LOOKS_CROWDED, SPINS, SPINS_CROWDED, poll
from . import memory_file
from .base import PIECE_BYTES, AllOf, Message, Request, pieces
from .board import Board, bytes_needed, private_words
from .mpi_messages import GONE, MpiRequest, MpiShortRequest, MpiTransfer, ShortRoom, as_bytes
from .native import NativeCollectives
from .roll_call import RollCall

_HYDRA = "MPI_LOCALNRANKS"  # set by MPICH's own launcher, on this machine and in SLURM


class MpiBackend:
    """A duplicate of an MPI communicator.

    Parameters
    ----------
    comm : MPI.Comm
        It is duplicated, never used bare.
    hosts : sequence, optional
        A key per rank; ranks with equal keys share a node.  By default found by MPI.
    """

    name = "mpi"
    piece_bytes = PIECE_BYTES

    def __init__(self, comm: MPI.Comm, hosts: Sequence[object] | None = None):
        self.comm = comm.Dup()
        self.comm.Set_errhandler(MPI.ERRORS_RETURN)
        self.rank, self.size = self.comm.Get_rank(), self.comm.Get_size()
        self._rooms: list[ShortRoom] = []
        limit = self.comm.Get_attr(MPI.TAG_UB)
        self.tag_limit = int(limit) if limit else 32767
        self.hosts: Sequence[object] = tuple(hosts) if hosts is not None else self._find_hosts()
        self.board = self._make_board()
        absent = sorted(set(range(self.size)) - set(self.board.ranks))
        # Making a roll call is collective: all must know whether any rank has absent ones.
        anywhere = self.comm.allreduce(len(absent), MPI.MAX)
        self._roll_call = RollCall(self.comm, absent) if anywhere else None
        crowded = len(self.board.ranks) > self._cores_here()
        self._looks = LOOKS_CROWDED if crowded else LOOKS
        self.patience = SPINS_CROWDED if crowded else SPINS
        self.crowded = crowded
        self.threads = MPI.Query_thread() == MPI.THREAD_MULTIPLE
        self.native = NativeCollectives(self.comm)
        self._arriving: tuple[int, MPI.Request] | None = None
        self.vendor, version = MPI.get_vendor()
        self.library = f"{self.vendor} {'.'.join(map(str, version))}"  # as tuning tables name it

    def _find_hosts(self) -> tuple[int, ...]:
        """Name each node by the lowest rank on it."""
        node = self.comm.Split_type(MPI.COMM_TYPE_SHARED, self.rank)
        lowest = node.allreduce(self.rank, MPI.MIN)
        node.Free()
        return tuple(self.comm.allgather(lowest))

    def _cores_here(self) -> int:
        """Count the cores that the ranks on the board may run on, all together."""
        allowed = self.comm.allgather(os.sched_getaffinity(0))
        return len(set().union(*(allowed[r] for r in self.board.ranks)))

    def _make_board(self) -> Board:
        """Share the arrival board with the ranks of this node."""
        here = [r for r in range(self.size) if self.hosts[r] == self.hosts[self.rank]]
        length = bytes_needed(self.size)
        for kind in memory_file.KINDS:
            mine = memory_file.create(length, "board", kind) if self.rank == here[0] else None
            mapping = None
            with suppress(OSError):
                mapping = memory_file.attach(self.comm.allgather(mine)[here[0]], length)
            everywhere = self.comm.allreduce(mapping is not None, MPI.LAND)
            if mine is not None:
                memory_file.remove(mine)
            if everywhere:
                break
        if mapping is None:  # ranks that share a host name need not share a file system
            return Board(private_words(self.size), self.rank, [self.rank])
        return Board(mapping.data.cast("q"), self.rank, here, mapping)

    def isend(self, data: np.ndarray, peer: int, tag: int) -> Request:
        """Begin to send a contiguous array."""
        if data.nbytes > self.piece_bytes:
            parts = pieces(data, self.piece_bytes)
            return AllOf([self.isend(part, peer, tag) for part in parts])
        return MpiRequest(self.comm.Isend(as_bytes(data), peer, tag), data, self.rank)

    def irecv(self, data: np.ndarray, peer: int, tag: int) -> Request:
        """Begin to receive into a contiguous array."""
        if data.nbytes > self.piece_bytes:
            parts = pieces(data, self.piece_bytes)
            return AllOf([self.irecv(part, peer, tag) for part in parts])
        request = self.comm.Irecv(as_bytes(data), peer, tag)
        return MpiRequest(request, data, self.rank, MPI.Status())

    def isend_short(self, content: bytes, peer: int, tag: int) -> Request:
        """Begin to send a short message."""
        request = self.comm.Isend((content, MPI.BYTE), peer, tag)
        return GONE if request.Test() else MpiRequest(request, content, self.rank)

    def irecv_short(self, peer: int, tag: int) -> MpiShortRequest:
        """Begin to receive a short message, into memory that none can overrun."""
        free = self._rooms
        room = free.pop() if free else ShortRoom()
        return MpiShortRequest(self.comm.Irecv(room.buffer, peer, tag), room, free)

    def bind(self, messages: Sequence[Message]) -> MpiTransfer:
        """Bind the messages of a round to persistent requests."""
        return MpiTransfer(self.comm, messages, self.piece_bytes)

    def wait(
        self,
        test: Callable[[], bool],
        deadline: float | None,
        progress: Callable[[], object] | None = None,
    ) -> bool:
        """Wait for `test`; False if the deadline passed first."""
        return poll(test, deadline, self._meanwhile(progress), self._looks, self._nudge)

    def _nudge(self) -> None:
        """Have MPI move what is under way: a look at flags in memory is no call of the library.

        Without it, a rank that waits here could keep from moving a large message that it has sent,
        and for which another rank waits before it comes here.
        """
        self.comm.Iprobe(MPI.ANY_SOURCE, MPI.ANY_TAG)

    def _meanwhile(self, progress: Callable[[], object] | None) -> Callable[[], object] | None:
        """Answer other nodes' questions while we wait."""
        roll_call, board, rank = self._roll_call, self.board, self.rank
        if roll_call is None:
            return progress

        def both() -> None:
            roll_call.answer(board.reached(rank))
            if progress is not None:
                progress()

        return both

    def missing(self, sequence: int) -> tuple[int, ...]:
        """Give the ranks that have not reached operation `sequence`, on this node and elsewhere."""
        here = self.board.missing(sequence)
        elsewhere = self._roll_call.missing(sequence) if self._roll_call is not None else ()
        return tuple(sorted((*here, *elsewhere)))

    def arrive(
        self,
        sequence: int,
        deadline: float | None,
        progress: Callable[[], object] | None = None,
    ) -> bool:
        """Wait until every rank has announced operation `sequence`; False if the deadline passed.

        On one node the board tells; across nodes a non-blocking barrier.
        """
        if len(self.board.ranks) == self.size:
            board = self.board
            if board.spin(sequence, self.patience):
                return True
            return self.wait(lambda: board.all_reached(sequence), deadline, progress)
        if self._arriving is None or self._arriving[0] != sequence:  # else a wait goes on
            self._arriving = (sequence, self.comm.Ibarrier())
        return poll(self._arriving[1].Test, deadline, self._meanwhile(progress))

    def split(self, color: int | None, key: int) -> MpiBackend | None:
        """Give a backend over the ranks of one color, ordered by key."""
        colors = self.comm.allgather((color, key, self.rank))
        part = self.comm.Split(MPI.UNDEFINED if color is None else color, key)
        if color is None:
            return None
        members = [r for c, k, r in sorted(colors, key=lambda e: e[1:]) if c == color]
        sub = MpiBackend(part, [self.hosts[r] for r in members])
        part.Free()
        return sub

    def translate(self, error: BaseException) -> BaseException:
        """Give what MPI reported as an error of ours."""
        if not isinstance(error, MPI.Exception):
            return error
        if error.Get_error_class() == MPI.ERR_TRUNCATE:
            ours: CommunicationError = CollectiveMismatch(
                f"rank {self.rank}: a message is longer than expected: the ranks disagree on "
                "the array's "
                "length; MPIDIST_DEBUG=1 shows who called what where"
            )
        else:
            ours = CommunicationError(f"rank {self.rank}: MPI reports: {error}")
        ours.__cause__ = error
        return ours

    def close(self) -> None:
        """Free the communicator; collective."""
        if not MPI.Is_finalized() and self.comm != MPI.COMM_NULL:
            if self._roll_call is not None:
                self._roll_call.close()
            self.comm.Free()

    def abort(self, code: int) -> None:
        """End the job on all ranks.

        MPICH's own launcher misses about one in fifty ranks that end by an exit code, as those do
        that call MPI_Abort, and leaves the others running (5.0.2); it sees a death by a signal.
        """
        if self.vendor == "MPICH" and _HYDRA in os.environ:
            sys.stdout.flush()
            sys.stderr.flush()
            if signal.getsignal(signal.SIGTERM) is signal.SIG_DFL:
                os.kill(os.getpid(), signal.SIGTERM)
            os.kill(os.getpid(), signal.SIGKILL)
        self.comm.Abort(code)


def describe_library() -> dict[str, Any]:
    """Give the vendor, version, thread level and address of the MPI library."""
    levels = {
        MPI.THREAD_SINGLE: "single",
        MPI.THREAD_FUNNELED: "funneled",
        MPI.THREAD_SERIALIZED: "serialized",
        MPI.THREAD_MULTIPLE: "multiple",
    }
    vendor, version = MPI.get_vendor()
    return {
        "vendor": vendor,
        "version": ".".join(map(str, version)),
        "standard": ".".join(map(str, MPI.Get_version())),
        "library": MPI.Get_library_version().split("\n")[0].strip("\0").strip(),
        "thread_level": levels[MPI.Query_thread()],
    }
