"""The MPI backend: mpi4py point-to-point, persistent requests where a buffer is used again."""

from __future__ import annotations

import logging
import os
import signal
import sys
import time
import weakref
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from types import MappingProxyType
from typing import Any, TypeVar

import numpy as np
from mpi4py import MPI

from ..errors import (
    CollectiveMismatch,
    CollectiveTimeout,
    CommunicationError,
    RankFailed,
    Unsupported,
)
from . import memory_file, rendezvous, ulfm
from .base import MAX_MESSAGE_BYTES, AllOf, Backend, Request, RoundMessage, pieces
from .board import Board, bytes_needed, private_words
from .liveness import Liveness, failed
from .mpi_messages import (
    MpiAnyShortRequest,
    MpiRequest,
    MpiShortRequest,
    MpiTransfer,
    as_bytes,
    drain,
)
from .native import NativeCollectives
from .recorder import Track, current, raised
from .roll_call import RollCall
from .tags import ARRIVALS, SPLIT, of_group, tags_of
from .waiting import LOOKS, LOOKS_CROWDED, SPINS, SPINS_CROWDED, Condition, Progress, poll

log = logging.getLogger("mpidist")
_Made = TypeVar("_Made")
_COMPLETED = AllOf(())
_BEGINNING = "/dev/shm/mpich_shm_"


def remove_shared_memory_names() -> None:
    """Remove the names of MPICH's shared-memory files; called once all ranks have started.

    A killed job would leave the files behind.
    """
    for path in _mapped():
        with suppress(OSError):  # another rank has removed it
            os.unlink(path)


def _mapped() -> set[str]:
    """Return the files of MPICH that this process has mapped and that still have a name."""
    try:
        with open("/proc/self/maps", encoding="utf-8", errors="replace") as lines:
            paths = {line.split(maxsplit=5)[-1].strip() for line in lines if _BEGINNING in line}
    except OSError:
        return set()
    return {path for path in paths if not path.endswith(" (deleted)")}


def _process_space() -> tuple[int, int]:
    """Return what processes share that know each other by the same process numbers."""
    try:
        space = os.stat("/proc/self/ns/pid")
    except OSError:
        return 0, os.getpid()  # then none does
    return space.st_dev, space.st_ino


_HYDRA = "MPI_LOCALNRANKS"  # set by MPICH's own launcher, on this machine and in SLURM


class DisseminationArrival:
    """A barrier between nodes in which the ranks compare the fingerprints of their operations.

    By dissemination: in round k = 0, 1, … each rank sends the least and the greatest fingerprint
    that it knows to rank + 2^k (cyclic), so that after ⌈log₂ size⌉ rounds each rank knows those of
    all ranks.  That takes as long as ``Ibarrier``; ``Iallreduce`` takes twice as long (Open MPI
    5.0.11: 343 µs instead of 187 between two nodes that are 100 µs apart).

    Nothing else uses `tag` while the barrier is `busy`: started and not complete.
    """

    def __init__(self, comm: MPI.Comm, tag: int):
        rank, size, distance = comm.Get_rank(), comm.Get_size(), 1
        self._rounds: list[tuple[MpiTransfer, np.ndarray, np.ndarray]] = []
        # Rank 0 of 5 hears, at distance 1, from 4; at 2, from 3, which has heard from 2; at 4, from
        # 1, which knows 0, 4 and 3 too: to hear of a rank twice changes no least and no greatest.
        while distance < size:
            mine, heard = np.zeros(2, np.int64), np.zeros(2, np.int64)
            there, back = (rank + distance) % size, (rank - distance) % size
            messages = [RoundMessage(True, back, heard, tag), RoundMessage(False, there, mine, tag)]
            self._rounds.append((MpiTransfer(comm, messages, MAX_MESSAGE_BYTES), mine, heard))
            distance *= 2
        self._most, self._least, self._at, self.busy = 0, 0, 0, False

    def start(self, fingerprint: int) -> DisseminationArrival:
        """Begin the barrier at the operation with this fingerprint; return this object."""
        self._most = self._least = fingerprint
        self._at, self.busy = 0, True
        self._start_round()
        return self

    def _start_round(self) -> None:
        transfer, mine, _ = self._rounds[self._at]
        mine[0], mine[1] = self._most, self._least
        transfer.start()

    def test(self) -> bool:
        """Make progress; return whether all ranks have arrived."""
        while self.busy:
            transfer, _, heard = self._rounds[self._at]
            if not transfer.test():
                return False
            most, least = heard.tolist()
            self._most, self._least = max(self._most, most), min(self._least, least)
            self._at += 1
            self.busy = self._at < len(self._rounds)
            if self.busy:
                self._start_round()
        return True

    @property
    def alike(self) -> bool:
        """Whether all ranks announced the same operation; valid once all have arrived."""
        return self._most == self._least


class MpiBackend(Backend):
    """The MPI backend: messages and collectives on a duplicate of an MPI communicator.

    Parameters
    ----------
    comm : MPI.Intracomm
        The communicator, which is duplicated and not used itself.
    hosts : sequence or callable, optional
        A key per rank; ranks with equal keys share a node.  By default MPI determines the nodes.
        Or a function ``hosts(backend)`` that returns them, or None; messages can be used in it.
    own : bool
        Whether `comm` is used itself, and freed by `close`, instead of a duplicate.
    generation : int
        How often the ranks have gone on without lost ones, before this communicator.
    deadline : float, optional
        Deadline of the set-up, a time of ``time.monotonic``; by default none.
    pids : mapping of int to int, optional
        Process numbers of ranks of this node, by rank, where they are known before the set-up.

    Attributes
    ----------
    roll_call : RollCall or None
        Asks the ranks of other nodes which operations they have reached; None if there are none.
    alike : bool
        Whether all ranks announced the same operation in the last ``arrive`` between nodes.
    liveness : Liveness or None
        Tells which ranks of this node are dead; None if there are no others.
    track : Track or None
        Records the operations in this process's flight record, if it has one.
    waiting_line : callable
        Returns the line of the user's program that waits, for that record.
    """

    name = "mpi"
    piece_bytes = MAX_MESSAGE_BYTES

    def __init__(
        self,
        comm: MPI.Intracomm,
        hosts: Sequence[object] | Callable[[MpiBackend], Sequence[object] | None] | None = None,
        *,
        own: bool = False,
        generation: int = 0,
        deadline: float | None = None,
        pids: Mapping[int, int] = MappingProxyType({}),
    ):
        self.comm = comm if own else comm.Dup()
        self.generation, self._set_up_by = generation, deadline
        self.comm.Set_errhandler(MPI.ERRORS_RETURN)
        self.rank, self.size = self.comm.Get_rank(), self.comm.Get_size()
        limit = MPI.COMM_WORLD.Get_attr(MPI.TAG_UB)  # Open MPI sets it on no other communicator
        self.tag_limit = int(limit) if limit else 32767
        self.roll_call: RollCall | None = None
        self.track: Track | None = None
        self.liveness: Liveness | None = None
        if pids:
            self.liveness = Liveness(self.rank, pids, lambda rank: False)
        self._in_world = self._find_in_world()
        self._told: set[int] = set()  # the dead ranks of which MPI was told
        cores_here = os.sched_getaffinity(0)
        # Until the ranks and cores of this node are known.
        self._looks = LOOKS_CROWDED if self.size > len(cores_here) else LOOKS
        if callable(hosts):
            hosts = hosts(self)
        first = self._first_here() if hosts is None else hosts.index(hosts[self.rank])
        self.board, firsts, cores, self._pids = self._make_board(first)  # notes `shares_memory`
        self.hosts: Sequence[object] = firsts if hosts is None else tuple(hosts)
        absent = sorted(set(range(self.size)) - set(self.board.ranks))
        if absent:  # on one rank, thus on all: either all boards are shared, or none
            tag = tags_of(self.tag_limit).roll_call
            self.roll_call = RollCall(self.comm, tag, absent, self.board)

        others = len(self._pids) > 1
        self.liveness = Liveness(self.rank, self._pids, self.board.has_left) if others else None

        def crowded(ranks: Sequence[int]) -> bool:
            return len(ranks) > len(set().union(*(cores[r] for r in ranks)))

        here = crowded(self.board.ranks)
        self._looks = LOOKS_CROWDED if here else LOOKS
        self.patience = SPINS_CROWDED if here else SPINS
        nodes = [[r for r in range(self.size) if firsts[r] == first] for first in set(firsts)]
        # Of any node, for the ranks choose by it, and have to choose alike.
        self.crowded = any(map(crowded, nodes)) if self.shares_memory else here
        self.threads = MPI.Query_thread() == MPI.THREAD_MULTIPLE
        self.native = NativeCollectives(self.comm)
        self._arriving: tuple[int, DisseminationArrival] | None = None
        self._arrivals: dict[int, DisseminationArrival] = {}
        self._begun = 0
        self._vendor, version = MPI.get_vendor()
        self.library = f"{self._vendor} {'.'.join(map(str, version))}"  # as tuning tables name it
        self.waiting_line: Callable[[], str] = str
        _backends.add(self)
        recorder = current()
        self.track = None if recorder is None else recorder.track(self._in_world, self.rank)

    def in_world(self) -> Sequence[int]:
        """Return the ranks in COMM_WORLD of all ranks."""
        return self._in_world

    def _find_in_world(self) -> list[int]:
        group, world = self.comm.Get_group(), MPI.COMM_WORLD.Get_group()
        ranks = group.Translate_ranks(None, world)
        for used in (group, world):
            used.Free()
        return list(ranks)

    def _first_here(self) -> int:
        """Return the lowest rank on this node, which MPI determines; collective."""
        node = self.comm.Split_type(MPI.COMM_TYPE_SHARED, self.rank)
        here, group = node.Get_group(), self.comm.Get_group()
        (first,) = here.Translate_ranks([0], group)
        for used in (here, group, node):
            used.Free()
        return first

    def everyone(self, value: Any) -> list[Any]:
        """Return the values of all ranks, by rank; collective, within the set-up's deadline.

        By messages: see :func:`~mpidist.backends.rendezvous.everyone`.
        """

        def wait(test: Condition) -> None:
            if not self.wait(test, self._set_up_by):
                raise CollectiveTimeout(f"rank {self.rank}: a rank has not come to the set-up")

        return rendezvous.everyone(self, value, wait)

    def _make_board(
        self, first: int
    ) -> tuple[Board, tuple[int, ...], tuple[set[int], ...], dict[int, int]]:
        """Create the arrival board that the ranks of this node share; collective.

        Return it, the lowest rank on each rank's node, the cores available to each rank, and the
        process numbers, by rank, of those on the board.  If the ranks of any node cannot share
        memory, only this rank is on the board.  `first` is the lowest rank on this node.
        """
        length = bytes_needed(self.size)
        cannot = (MemoryError, OSError, ValueError, OverflowError)
        # For each kind of file two exchanges, in which all ranks take part, whatever failed:
        #
        #     a node's first rank creates ─▶ 1: (first, cores, name …) ─▶ all attach ─▶ 2: attached?
        #     failed: the name is None                                    failed: no
        #
        # After the second one the file's name may go: each rank has mapped it, or never will.  If
        # one could not, all try the next kind: else ranks would wait on different boards.
        for kind in memory_file.KINDS:
            mine = mapping = None  # a rank that fails must still take part in what follows
            if self.rank == first:
                with suppress(*cannot):
                    mine = memory_file.create(length, "board", kind)
            process = os.getpid(), _process_space()
            facts = self.everyone((first, os.sched_getaffinity(0), mine, process))
            firsts, cores, made, processes = zip(*facts)
            if made[first] is not None:
                with suppress(*cannot):
                    mapping = memory_file.attach(made[first], length)
            everywhere = all(self.everyone(mapping is not None))
            if mine is not None:
                memory_file.remove(mine)
            if everywhere:
                break
        # Ranks that share a host name need not share a file system.
        if mapping is None or not everywhere:
            return Board(private_words(self.size), self.rank, [self.rank]), firsts, cores, {}
        self.shares_memory = True
        here = [r for r in range(self.size) if firsts[r] == first]
        # In a container of its own a rank would take another process for this one.
        pids = {r: processes[r][0] for r in here if processes[r][1] == process[1]}
        return Board(mapping.data.cast("q"), self.rank, here, mapping), firsts, cores, pids

    def isend(self, data: np.ndarray, peer: int, tag: int) -> Request:
        """Begin to send a contiguous array."""
        if data.nbytes > self.piece_bytes:
            parts = pieces(data, self.piece_bytes)
            return AllOf([self.isend(part, peer, tag) for part in parts])
        return MpiRequest(self.comm.Isend(as_bytes(data), peer, tag), data, self.rank)

    def irecv(self, data: np.ndarray, peer: int, tag: int) -> Request:
        """Begin to receive a message of exactly the array's length into a contiguous array."""
        if data.nbytes > self.piece_bytes:
            parts = pieces(data, self.piece_bytes)
            return AllOf([self.irecv(part, peer, tag) for part in parts])
        request = self.comm.Irecv(as_bytes(data), peer, tag)
        return MpiRequest(request, data, self.rank, MPI.Status())

    def isend_short(self, content: bytes, peer: int, tag: int) -> Request:
        """Begin to send a short message."""
        request = self.comm.Isend((content, MPI.BYTE), peer, tag)
        return _COMPLETED if request.Test() else MpiRequest(request, content, self.rank)

    def irecv_short(self, peer: int, tag: int) -> MpiShortRequest:
        """Begin to receive a short message, into memory for the longest one."""
        return MpiShortRequest(self.comm, peer, tag)

    def irecv_short_any(self, tag: int) -> MpiAnyShortRequest:
        """Begin to receive a short message from any rank."""
        return MpiAnyShortRequest(self.comm, tag)

    def iprobe(self, peer: int | None, tag: int) -> int | None:
        """Return the sender of an arrived message that was not received; None without one."""
        status = MPI.Status()
        source = MPI.ANY_SOURCE if peer is None else peer
        return status.Get_source() if self.comm.Iprobe(source, tag, status) else None

    def bind(self, messages: Sequence[RoundMessage]) -> MpiTransfer:
        """Bind the messages of a round to persistent requests."""
        return MpiTransfer(self.comm, messages, self.piece_bytes)

    def wait(self, test: Condition, deadline: float | None, progress: Progress = None) -> bool:
        """Wait until ``test()`` is true, calling MPI now and then; False past the deadline."""
        meanwhile = self._meanwhile(progress)
        ended = poll(test, deadline, meanwhile, self._looks, self._nudge, self._lasts)
        return ended and self._goes_on()

    def _lasts(self) -> None:
        """Record the line of the user's program that waits."""
        if self.track is not None:
            self.track.wait(self.waiting_line())

    def _goes_on(self) -> bool:
        """Record that a wait has ended well; return True."""
        if self.track is not None and self.track.waits:
            self.track.go_on()
        return True

    def _nudge(self) -> None:
        """Look for dead ranks, and call MPI so that pending messages advance.

        Reading flags in memory does not do that.

        Otherwise a large message that this rank has sent might never advance while this rank waits
        for the receiver, which needs the message before it can arrive.
        """
        if self.liveness is not None:
            self.liveness.check()
        self.comm.Iprobe(MPI.ANY_SOURCE, MPI.ANY_TAG)

    def _meanwhile(self, progress: Progress) -> Progress:
        """Return what a wait calls: answer other nodes' questions, then call `progress`."""
        roll_call = self.roll_call
        if roll_call is None:
            return progress

        def both() -> None:
            roll_call.answer()
            if progress is not None:
                progress()

        return both

    def missing(self, sequence: int) -> tuple[int, ...]:
        """Return the ranks, of all nodes, not known to have reached `sequence`, sorted.

        A rank of another node that does not answer within 300 ms counts as missing.
        """
        here = self.board.missing(sequence)
        elsewhere = self.roll_call.missing(sequence) if self.roll_call is not None else ()
        return tuple(sorted((*here, *elsewhere)))

    def arrive(self, sequence: int, deadline: float | None, progress: Progress = None) -> bool:
        """Wait for all ranks: on one node by polling the board, between nodes by messages."""
        if len(self.board.ranks) == self.size:
            board = self.board
            if board.spin(sequence, self.patience):
                return self._goes_on()  # a wait that was interrupted to look around
            return self.wait(lambda: board.all_reached(sequence), deadline, progress)
        if self._arriving is None or self._arriving[0] != sequence:  # else continue a wait
            self._arriving = (sequence, self._arrival(0).start(self.board.fingerprint(sequence)))
        arrival = self._arriving[1]
        look = None if self.liveness is None else self.liveness.check
        meanwhile = self._meanwhile(progress)
        if not poll(arrival.test, deadline, meanwhile, nudge=look, lasts=self._lasts):
            return False
        self.alike = arrival.alike
        return self._goes_on()

    def begin_arrival(self, sequence: int) -> DisseminationArrival:
        """Begin a non-blocking wait for the ranks of all nodes to announce operation `sequence`.

        Raises Unsupported if `ARRIVALS` (2048) such waits are pending already.
        """
        self._begun += 1
        number = 1 + self._begun % ARRIVALS  # equal on all ranks
        if self._arrival(number).busy:
            raise Unsupported(
                f"rank {self.rank}: {ARRIVALS} native operations are pending in the background, "
                "which is the limit: wait for some of them first"
            )
        return self._arrival(number).start(self.board.fingerprint(sequence))

    def _arrival(self, number: int) -> DisseminationArrival:
        """Return barrier `number`, made at its first use: 0 for blocking waits, others for pending.

        Each barrier has a message tag of its own.
        """
        if number not in self._arrivals:
            tag = tags_of(self.tag_limit).arrival(number)
            self._arrivals[number] = DisseminationArrival(self.comm, tag)
        return self._arrivals[number]

    def split(self, color: int | None, key: int) -> MpiBackend | None:
        """Return a backend over the ranks of one color, ordered by key, or None for color None."""
        colors = self.everyone((color, key, self.rank))
        members = [r for c, k, r in sorted(colors, key=lambda e: e[1:]) if c == color]
        return self._over(members if color is not None else (), SPLIT, by_all=True)

    def subgroup(self, ranks: Sequence[int], tag: int) -> MpiBackend:
        """Return a backend over `ranks`, in that order; only these call it, with the same tag."""
        made = self._over(ranks, of_group(tag), by_all=len(ranks) == self.size)
        assert made is not None
        return made

    def _over(self, ranks: Sequence[int], tag: int, by_all: bool) -> MpiBackend | None:
        """Return a backend over `ranks`, in that order; None over none.

        Collective over these, or over all ranks, then also for parts without members in common.
        `tag` is that of the MPI call.
        """
        tolerant = by_all and ulfm.tolerates_faults()
        if not (ranks or tolerant):
            return None
        group = self.comm.Get_group()
        part = group.Incl(ranks)
        try:
            if tolerant:
                look = None if self.liveness is None else self.liveness.check
                made = ulfm.part(self.comm, part, look)
            else:  # MPI's split would be a collective of all ranks
                made = self.comm.Create_group(part, tag)
        finally:
            for used in (part, group):
                used.Free()
        if not ranks:
            return None
        known = self._known_of(ranks)
        try:
            return MpiBackend(made, **known, own=True, generation=self.generation)
        except RankFailed as error:  # by the numbers that the ranks would have had in the part
            reasons = {ranks[r]: why for r, why in error.reasons.items()}
            raise failed(self.rank, reasons) from error.__cause__

    def _known_of(self, ranks: Sequence[int]) -> dict[str, Any]:
        """Return hosts and processes of these ranks, which a backend over them begins with."""
        pids = {new: self._pids[old] for new, old in enumerate(ranks) if old in self._pids}
        return {"hosts": [self.hosts[r] for r in ranks], "pids": pids}

    def why_no_survivors(self) -> str | None:
        """Return why the ranks cannot go on after a loss; None if they can."""
        return ulfm.why_not()

    def survivors(self, make: Callable[[Backend], _Made], seconds: float | None) -> _Made:
        """Return ``make(backend)`` of a backend over the ranks that are alive; collective.

        Every communicator of this process is revoked first: a rank in a call of any of them would
        wait for this one.  What all ranks use then is made until nobody has died meanwhile.
        """
        self.leave_all()
        failure: Exception | None = None
        for _ in range(self.size + 1):  # each turn but the first is for another lost rank
            # Nobody comes into the library's call, which has no deadline, before all have come.
            deadline = None if seconds is None else time.monotonic() + seconds
            if ulfm.agree(self.comm, True, deadline, self._look_for_left) is None:
                raise self._late(seconds)
            # What follows is the library's time, however late the last one has come.
            deadline = time.monotonic() + max(ulfm.LIMIT, seconds or 0.0)
            comm = ulfm.shrink(self.comm, deadline)
            # Revoked before all have it, by a rank that fails below, it would crash the others: the
            # library (5.0.11) does not expect that while it makes a communicator.
            if ulfm.agree(self.comm, True, deadline, self.notice_losses) is None:
                raise self._late(seconds)
            made, late = None, None
            try:
                backend = self._over_survivors(comm, deadline)
                made = make(backend)
            except CollectiveTimeout as error:
                late = error
            except (MPI.Exception, CommunicationError) as error:
                failure = error
                log.debug("another rank was lost while the rest went on: %s", error)
            if made is None:
                ulfm.revoke(comm)  # the others wait for this rank in the set-up
            if late is not None:
                raise self._late(seconds) from late
            agreed = ulfm.agree(comm, made is not None, deadline, self.notice_losses)
            if agreed is None:
                raise self._late(seconds)
            if agreed == (True, False) and made is not None:
                backend._set_up_by = None
                return made
            ulfm.revoke(comm)
        raise CommunicationError(
            f"rank {self.rank}: survivors: no communicator of the ranks that are left could be "
            f"made: {failure or 'it failed on another rank each time'}"
        ) from failure

    def leave_all(self) -> None:
        """Let the calls of all ranks end, on every communicator of this process; not collective."""
        for other in list(_backends):
            if other.generation <= self.generation:  # not those of who went on already
                ulfm.revoke(other.comm)
        self.board.recover()

    def vote(self, flag: bool, seconds: float | None) -> bool:
        """Return whether all ranks that are alive vote True: the same on all; collective.

        Also after a loss, and after `leave_all`.
        """
        deadline = None if seconds is None else time.monotonic() + seconds
        told = ulfm.agree(self.comm, flag, deadline, self.notice_losses)
        if told is None:
            raise self._late(seconds)
        return told[0]

    def _over_survivors(self, comm: MPI.Intracomm, deadline: float | None) -> MpiBackend:
        """Return a backend over the ranks of a shrunk communicator."""
        comm.Set_errhandler(MPI.ERRORS_RETURN)
        alive, everyone = comm.Get_group(), self.comm.Get_group()
        ranks = alive.Translate_ranks(None, everyone)
        for group in (alive, everyone):
            group.Free()
        later = self.generation + 1
        return MpiBackend(
            comm, **self._known_of(ranks), own=True, generation=later, deadline=deadline
        )

    def _late(self, seconds: float | None) -> CollectiveTimeout:
        """Return the error for survivors that have not all come within the deadline."""
        lost = self.lost()
        late = tuple(r for r in self.board.not_recovering() if r not in lost)
        reason = "; ".join(map(self.board.describe, late)) or "a rank hangs, or is on another node"
        return CollectiveTimeout(
            f"rank {self.rank}: survivors not finished within {seconds} s: {reason}",
            collective="survivors",
            missing=late,
        )

    def translate(self, error: BaseException) -> BaseException:
        """Convert an exception of MPI to one of :mod:`mpidist.errors`; return others as is."""
        if not isinstance(error, MPI.Exception):
            return error
        if error.Get_error_class() == MPI.ERR_TRUNCATE:
            translated: CommunicationError = CollectiveMismatch(
                f"rank {self.rank}: a message is longer than expected: the ranks disagree on "
                "the array's length; MPIDIST_DEBUG=1 shows each rank's call site"
            )
        elif reasons := self._lost_by(error):
            translated = failed(self.rank, reasons)
        elif ulfm.tolerates_faults() and error.Get_error_class() == MPI.ERR_REVOKED:
            translated = RankFailed(
                f"rank {self.rank}: another rank has left the communicator, because a rank is lost"
            )
        else:
            translated = CommunicationError(f"rank {self.rank}: MPI reports: {error}")
        translated.__cause__ = error
        return translated

    def lost(self) -> dict[int, str]:
        """Return the ranks known to be dead, and how each of them ended."""
        lost = self.notice_losses()
        if ulfm.tolerates_faults() and not MPI.Is_finalized() and self.comm != MPI.COMM_NULL:
            for rank in ulfm.dead_ranks(self.comm):
                lost.setdefault(rank, "has ended")
        return lost

    def raised(self, rank: int) -> bool:
        """Return whether a rank of this node is known to have ended by an exception."""
        return raised(self._in_world[rank])

    def notice_losses(self) -> dict[int, str]:
        """Return the dead ranks of this node, and tell MPI of them; any thread may call it."""
        lost = {} if self.liveness is None else dict(self.liveness.look())
        new = lost.keys() - self._told
        if new and ulfm.tolerates_faults():
            self._told |= new
            ulfm.report(self._in_world[rank] for rank in new)
        return lost

    def _look_for_left(self) -> None:
        """Raise CommunicationError if a rank of this node has left: it comes to no meeting."""
        # MPI must not be told that it is dead: it may wait for this rank in MPI_Finalize.
        lost = self.notice_losses()
        for rank in self.board.ranks:
            if rank not in lost and self.board.has_left(rank):
                raise CommunicationError(
                    f"rank {self.rank}: survivors: rank {rank} has ended already, and does not come"
                )

    def _lost_by(self, error: MPI.Exception) -> dict[int, str]:
        """Return the dead ranks by which MPI may have come to an error."""
        lost = self.lost()
        if ulfm.tolerates_faults():
            # Other classes may stand for a loss too: that of some statuses, "other" of a barrier.
            sure = error.Get_error_class() in ulfm.LOSSES
            until = time.monotonic() + ulfm.KNOWN_WITHIN * (1 if sure else 0.1)
            while not lost and time.monotonic() < until:
                with suppress(MPI.Exception):  # it makes progress, by which the library learns more
                    self.comm.Iprobe(MPI.ANY_SOURCE, MPI.ANY_TAG)
                time.sleep(1e-3)
                lost = self.lost()
        return lost

    def close(self) -> None:
        """Free the communicator; collective."""
        if not MPI.Is_finalized() and self.comm != MPI.COMM_NULL:
            self._arrivals.clear()
            drain(self.comm, tags_of(self.tag_limit).last)
            self.comm.Free()
            self.liveness = None  # which has files open

    def abort(self, code: int) -> None:
        """End the job on all ranks.

        Under MPICH's own launcher this rank ends by a signal, and `code` is lost.  The launcher
        (5.0.2) notices every death by a signal, but misses about one in fifty ranks that end by an
        exit code, as with MPI_Abort, and leaves the others running.
        """
        if self._vendor == "MPICH" and _HYDRA in os.environ:
            sys.stdout.flush()
            sys.stderr.flush()
            if signal.getsignal(signal.SIGTERM) is signal.SIG_DFL:
                os.kill(os.getpid(), signal.SIGTERM)
            os.kill(os.getpid(), signal.SIGKILL)
        MPI.COMM_WORLD.Abort(code)  # of a part Open MPI may end the ranks of that part only


_backends: weakref.WeakSet[MpiBackend] = weakref.WeakSet()  # all of this process


def describe_library() -> dict[str, Any]:
    """Return texts on the MPI library: vendor, version, standard, library, thread_level.

    "standard" is the version of the MPI standard, "library" the library's own description, and
    "thread_level" is single, funneled, serialized or multiple.
    """
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
